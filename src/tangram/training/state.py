"""The state of a training job as named tensors: written by every rank, read back through relayout.

`model.<name>` is a parameter or a persistent buffer, `optim.<name>.<state>` what the optimiser keeps for a parameter.
Which states there are and how each lies is declared in `tangram.relayout.states`, not guessed from names.

Writing is torch's distributed checkpoint for now. Reading is Tangram's own: the index of the checkpoint gives pieces,
the model at hand gives the wanted regions, and `tangram.relayout` proves coverage and copies; so a checkpoint of any
number of ranks goes into one process here, and into any other layout by other regions.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import AdamW

from tangram.checkpoint.formats.dcp import chunk_reader, read_index
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec, bind, execute, plan
from tangram.relayout.states import ADAMW, States

ADAMW_STATES: States = {name: ADAMW[name] for name in ("exp_avg", "exp_avg_sq", "step")}  # without amsgrad
HERE = "here"  # the place of the tensors that a checkpoint is read into


def state_tensors(model: nn.Module, optimiser: AdamW) -> dict[str, Tensor]:
    """Every tensor of the state by name, as it lies here: shards under FSDP, whole tensors in one process."""
    parameters = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    tensors = {f"model.{name}": tensor.detach() for name, tensor in (parameters | buffers).items()}
    for name, parameter in parameters.items():
        state = optimiser.state[parameter]
        if state.keys() != ADAMW_STATES.keys():
            raise RuntimeError(f"the optimiser keeps {sorted(state)} for {name}, not {sorted(ADAMW_STATES)}")
        tensors |= {f"optim.{name}.{key}": value for key, value in state.items()}
    return tensors


def empty_adamw_states(optimiser: AdamW) -> None:
    """Make the states that AdamW would make at its first step, so that a checkpoint has somewhere to go."""
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            for key, spec in ADAMW_STATES.items():
                value = torch.zeros_like(parameter) if spec.kind == "same" else torch.zeros((), dtype=torch.float32)
                optimiser.state[parameter][key] = value


def save(model: nn.Module, optimiser: AdamW, path: Path, group: dist.ProcessGroup) -> None:
    """Write the state; every rank of the group calls this, and each writes what it holds."""
    dcp.save(
        state_tensors(model, optimiser),
        storage_writer=dcp.FileSystemWriter(str(path)),
        process_group=group,
    )


def load_whole(path: Path, model: nn.Module, optimiser: AdamW) -> None:
    """Read a checkpoint, written by any number of ranks, into a model and optimiser that are whole in this process."""
    targets = state_tensors(model, optimiser)
    specs = {name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in targets.items()}
    index = read_index(path)
    wanted = [Piece(HERE, name, Region.full(spec.shape)) for name, spec in specs.items()]
    copies = plan(bind("{name*} -> {name*}", index.specs, specs), index.pieces, wanted)
    execute(copies, chunk_reader(path), {(HERE, name): target for name, target in targets.items()})
