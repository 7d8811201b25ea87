"""Out of memory, in a sentence: in which phase, what was predicted and what was there, part by part, and what to lower.

What parameters, gradients and the optimiser's states take is measured where it happened, on this rank. All else that
the process has is what flows: activations, logits, what FSDP2 has gathered. Where it happened is read off the stack, so
a step that goes well does nothing for it.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tangram.hardware.host.machine import resident_mb
from tangram.planner.local.estimate import megabytes
from tangram.planner.local.peak_memory import Memory
from tangram.training.mesh.local_parts import local
from tangram.training.run.signals import LESS_MEMORY

NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")
"""What torch says on the CPU, where it has no exception of its own for it."""


class NoMemoryError(MemoryError):
    """A rank has run out of memory."""


PHASES: tuple[tuple[str, str, str], ...] = (
    # a file and a function on the stack (as ends of their names), the phase; the first that is there decides
    ("training/state/checkpointer.py", "", "saving a checkpoint"),
    ("training/step/evaluate.py", "held_out", "measuring the held-out loss"),
    ("training/updates/ruled_optimiser.py", "step", "the update"),
    ("torch/optim/adamw.py", "", "the update"),
    ("torch/optim/optimizer.py", "", "the update"),
    ("training/objective/loss.py", "", "the loss"),
    ("torch/autograd/graph.py", "_engine_run_backward", "the backward"),
    ("training/step/backward.py", "backward", "the forward"),
    ("training/state/build_model.py", "", "building the model"),
    ("training/data/stream.py", "", "reading the samples"),
)

LOWER = {
    "parameters": "cut parameters over more ranks, or keep them in bfloat16 (precision.parameters)",
    "gradients": "cut parameters over more ranks, or freeze some (model.freeze)",
    "optimiser": "cut parameters over more ranks, or freeze some (model.freeze)",
    "what flows": LESS_MEMORY,
}
"""What helps, by the part that is too large."""


def phase_of(error: BaseException) -> str:
    """What was going on when an error was raised."""
    frames = [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    for file, function, phase in PHASES:
        if any(name.endswith(file) and (not function or own == function) for name, own in frames):
            return phase
    return "training"


def is_no_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


@dataclass(frozen=True)
class MemoryInUse:
    """Bytes on this rank."""

    parameters: float
    gradients: float
    optimiser: float
    flows: float
    """All else of the process but what it takes by itself."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimiser + self.flows


def memory_in_use(model: nn.Module | None, optimiser: Optimizer | None, process: float) -> MemoryInUse:
    """What this rank has now. `process`: bytes that a process takes by itself."""
    parameters = [] if model is None else [*model.parameters()]
    states: Iterable[object] = () if optimiser is None else (x for s in optimiser.state.values() for x in s.values())
    known = _bytes(parameters), _bytes([p.grad for p in parameters]), _bytes(states)
    device = parameters[0].device if parameters else torch.device("cpu")
    here = 1e6 * resident_mb() - process if device.type == "cpu" else torch.accelerator.memory_allocated(device)
    return MemoryInUse(*known, max(0.0, here - sum(known)))


def _bytes(tensors: Iterable[object]) -> float:
    parts = (local(x) for x in tensors if isinstance(x, Tensor))
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return float(sum(storages.values()))


def sentence(phase: str, here: MemoryInUse, predicted: Memory | None) -> str:
    """What is told of it: the part that most exceeds its share of the prediction, and what to lower."""
    if predicted is None:
        known = f"parameters {megabytes(here.parameters)}, gradients {megabytes(here.gradients)}"
        rest = f"optimiser {megabytes(here.optimiser)}, activations and all else {megabytes(here.flows)}"
        return f"out of memory in {phase}: {known}, {rest}: {LOWER['what flows']}"
    flows = predicted.activations + predicted.logits + predicted.gathered
    parts = {
        "parameters": (here.parameters, predicted.parameters),
        "gradients": (here.gradients, predicted.gradients),
        "optimiser": (here.optimiser, predicted.optimiser),
        "what flows": (here.flows, flows),
    }
    words = {
        "what flows": f"what flows (activations {megabytes(predicted.activations)}, logits "
        f"{megabytes(predicted.logits)}, gathered parameters {megabytes(predicted.gathered)})",
    }
    over = {name: now - before for name, (now, before) in parts.items() if now > 1.05 * before + 1e6}
    if "gradients" in over:  # which come as activations go, and are predicted for one moment of both
        together = here.gradients + here.flows - predicted.gradients - flows
        over["gradients"] = min(over["gradients"], together)
        over = {name: more for name, more in over.items() if more > 0}
    if over:
        most = max(over, key=lambda name: over[name])
        now, before = parts[most]
        what = f"{words.get(most, most)} took {megabytes(now)} where {megabytes(before)} were predicted"
    else:
        most = max(parts, key=lambda name: parts[name][1])
        what = (
            f"no part exceeds its prediction, {megabytes(predicted.total)} in all, so the machine has less to give; "
            f"most is {words.get(most, most)}"
        )
    return f"out of memory in {phase}: {what}: {LOWER[most]}"


@contextlib.contextmanager
def explained(model: nn.Module | None, optimiser: Optimizer | None, predicted: Memory | None) -> Generator[None]:
    """Raise NoMemoryError with a sentence for whatever says within that there is no memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, NoMemoryError) or not is_no_memory(error):
            raise
        process = predicted.process if predicted is not None else 0.0
        said = sentence(phase_of(error), memory_in_use(model, optimiser, process), predicted)
        raise NoMemoryError(f"{said} ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
