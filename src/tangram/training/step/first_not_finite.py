"""Where numbers of a step were the first that are not finite: its forwards and backwards once more, module by module.

It costs a step, and is done where a run ends anyway. A hook sees what a module takes and gives: where the first such is
taken, the code of the parent made it. Of what modules compute NaN and +inf count, for masks and scores have -inf by
intention. Compiled code is run as written, so that an operator which only its compiled form gets wrong is not found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.tracing.files.format import Phase
from tangram.tracing.trace import UNTRACED
from tangram.training.data import RankBatches
from tangram.training.mesh.layout_to_torch import named_modules
from tangram.training.mesh.local_parts import local
from tangram.training.observe.events import Note
from tangram.training.parallel.model import ParallelModel
from tangram.training.step.backward import backward

WEIGHTS, FORWARD, LOSS, BACKWARD, GRADIENTS, NONE = range(6)
"""What comes before what."""
_LOOKED_AT = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
ALL_FINITE = "run once more, all numbers of the step are finite"


def first_not_finite(model: ParallelModel, batches: RankBatches, emit: Callable[[object], None]) -> str:
    """What was the first of all ranks, in words, after a note: a step may take long. The trace has it, too.

    Collective over all ranks, whose gradients it replaces. "" where a backward updates weights.
    """
    if model.plan.optimiser.in_backward:
        return ""
    if model.world.index == 0:
        emit(Note("numbers of the step are not finite: it is run once more to see where that begins"))
    model.module.zero_grad()
    model.trace.phase(Phase.EVALUATION)  # its calls are of no step of the plan
    seen, world = _Seen(), model.world
    with ExitStack() as stack, torch.compiler.set_stance("force_eager"):
        for part in model.parts:
            for name, parameter in part.module.named_parameters():
                seen.add(WEIGHTS, f"the weights {name} were", name, _largest(local(parameter)))
            for name, module in named_modules(part.module)[1:]:
                for handle in (
                    module.register_forward_pre_hook(partial(seen.enter, name), with_kwargs=True),
                    module.register_forward_hook(partial(seen.leave, name)),
                ):
                    stack.callback(handle.remove)
        loss = backward(replace(model, trace=UNTRACED), batches).loss
    seen.add(LOSS, "what modules compute is finite, and the loss of it is", "", _largest(loss))
    for name, parameter in model.module.named_parameters():
        if parameter.grad is not None:
            seen.add(GRADIENTS, f"the gradient of {name} is", name, _largest(local(parameter.grad)))
    kind, at, words, name = seen.first()
    stage = world.stages - world.stage if kind == BACKWARD else world.stage
    kind, _, _, rank, words, name = min(world.peers.all_words([kind, stage, at, world.index, words, name]))
    words = f"{words} the first that is not finite, on rank {rank}" if kind != NONE else ALL_FINITE
    model.trace.first_not_finite(words, name)
    return words


class _Seen:
    """What was looked at, in order; nothing is read from the device before the end."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, str, str, Tensor]] = []

    def add(self, kind: int, words: str, name: str, largest: Tensor | None) -> None:
        if largest is not None:
            self._seen.append((kind, words, name, largest))

    def enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        for x in cast("list[object]", tree_leaves((args, kwargs))):
            self.add(FORWARD, f"what {name} takes is", name, _most(x))

    def leave(self, name: str, _: nn.Module, args: Any, result: Any) -> None:
        words = f"the gradient of what {name} computes is"
        for x in cast("list[object]", tree_leaves(result)):
            self.add(FORWARD, f"what {name} computes is", name, _most(x))
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(self._gradient, words, name))

    def _gradient(self, words: str, name: str, gradient: Tensor) -> None:
        self.add(BACKWARD, words, name, _largest(gradient))

    def first(self) -> tuple[int, int, str, str]:
        """Its kind, its place, words and the name; `NONE` where all are finite."""
        if not self._seen:
            return NONE, 0, "", ""
        finite = cast("list[bool]", torch.stack([largest for *_, largest in self._seen]).isfinite().tolist())
        bad = [(kind, at, words, name) for at, (kind, words, name, _) in enumerate(self._seen) if not finite[at]]
        return min(bad, default=(NONE, 0, "", ""))


def _most(x: object) -> Tensor | None:
    """Not finite for NaN and +inf."""
    return x.detach().amax().float() if _looked_at(x) else None


def _largest(x: object) -> Tensor | None:
    """Not finite for -inf, too."""
    return cast(Tensor, torch.linalg.vector_norm(x.detach(), math.inf)).float() if _looked_at(x) else None


def _looked_at(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.dtype in _LOOKED_AT and x.numel() > 0
