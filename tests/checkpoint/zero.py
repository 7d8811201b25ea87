"""Checkpoints of DeepSpeed in tests: a small writer of their layout, by torch.cat alone, and what is read compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from tangram.checkpoint.conversion.convert import IDENTITY
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.detect import open_any
from tangram.layout import Region
from tangram.relayout import Piece, PieceIndex, bind, execute, plan

MOMENTS = ("exp_avg", "exp_avg_sq")
TIED = {"head.weight": "embed.weight", "lm_head.weight": "model.embed_tokens.weight"}


def values(opened: OpenCheckpoint) -> dict[str, Tensor]:
    """All tensors of a checkpoint, put together as a conversion does."""
    bound = bind(IDENTITY, opened.specs)
    out = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in opened.specs.items()}
    wanted = [Piece("out", name, Region.full(spec.shape)) for name, spec in opened.specs.items()]
    steps = plan(bound, PieceIndex(opened.pieces, bound.source), wanted)
    execute(steps, opened.read, {("out", name): into for name, into in out.items()})
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def compare(folder: Path) -> tuple[OpenCheckpoint, int]:
    """What is read of `folder`/saved is what DeepSpeed said that it holds; how many tensors have been compared."""
    opened = open_any(folder / "saved")
    found, expected = values(opened), load_file(folder / "expected.safetensors")
    for full, value in expected.items():
        section, _, name = full.partition(".")
        param, _, state = name.rpartition(".")
        if section == "state" and name not in found:  # no copy where the weights themselves are float32
            assert state == "master", name
            assert same(found[param], value), name
        elif section == "state":
            assert same(found[name], value), name
        elif section == "module":
            assert same(found[name].to(value.dtype), value), name
        else:
            copy = found.get(f"{name}.master", found.get(f"{TIED.get(name, name)}.master", found[name]))
            assert torch.equal(copy.float(), value.float()), name
    trained = {full.split(".", 1)[1].rpartition(".")[0] for full in expected if full.endswith(".exp_avg")}
    assert all(found[f"{name}.step"] == 2 for name in trained)
    known = {full.split(".", 1)[1] for full in expected} | {f"{name}.step" for name in trained}
    assert set(found) <= known | {"mean", "seen", *TIED}
    return opened, len(expected)


# ---------------------------------------------------------------- a writer


@dataclass
class Run:
    """What a run of ZeRO has: groups of trained parameters in float32, and what is beside them."""

    stage: int
    ranks: int
    groups: list[dict[str, Tensor]]
    frozen: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    tied: dict[str, str] = field(default_factory=dict[str, str])
    dtype: torch.dtype = torch.bfloat16
    align: int = 1
    """Elements that each parameter but the last of a group is padded to a multiple of, in stages 1 and 2."""
    lean: bool = True
    """Whether what pads a group is left out of the partitions, as new versions of DeepSpeed do."""


def moments(param: Tensor) -> dict[str, Tensor]:
    """The states of an optimiser, told apart from each other and from the parameter."""
    return {"exp_avg": param * 2 + 1, "exp_avg_sq": param * param + 3}


def rows(run: Run, group: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Stages 1 and 2: the partitions of a group, and how much of each is padding."""
    flat: list[Tensor] = []
    for one, gap in zip(group, paddings(run, group), strict=True):
        flat.append(functional.pad(one.flatten(), (0, gap)))
    line = torch.cat(flat)
    padded = functional.pad(line, (0, -len(line) % (2 * run.ranks)), value=-7.0)
    parts = list(padded.chunk(run.ranks))
    ends = [max(0, min(len(part), len(line) - i * len(part))) for i, part in enumerate(parts)]
    return parts, [len(part) - n for part, n in zip(parts, ends, strict=True)]


def shares(run: Run, group: Sequence[Tensor]) -> list[Tensor]:
    """Stage 3: each rank's part of each parameter, one behind the other."""
    cut = [functional.pad(one.flatten(), (0, -one.numel() % run.ranks)).view(run.ranks, -1) for one in group]
    return [torch.cat([one[rank] for one in cut]) for rank in range(run.ranks)]


def save(run: Run, folder: Path) -> None:
    """Write the folders of a run as `save_checkpoint` does."""
    step = folder / "global_step5"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    whole = {name: one for group in run.groups for name, one in group.items()}
    module = {name: one.to(run.dtype) for name, one in whole.items()} | run.frozen | run.buffers
    if run.stage == 3:
        module = {name: torch.empty(0) for name in module} | run.buffers
    module |= {alias: module[own] for alias, own in run.tied.items()}
    fragments: list[dict[str, Tensor]] = [dict(run.frozen)] * run.ranks
    if run.stage == 3:
        fragments = [{name: shares(run, [one])[rank] for name, one in run.frozen.items()} for rank in range(run.ranks)]
    for rank in range(run.ranks):
        model = {
            "module": module, "buffer_names": list(run.buffers), "shared_params": run.tied, "global_steps": 5,
            "param_shapes": [{name: one.shape for name, one in group.items()} for group in run.groups],
            "frozen_param_shapes": {name: one.shape for name, one in run.frozen.items()},
            "frozen_param_fragments": fragments[rank], "mp_world_size": 1,
        }  # fmt: skip
        if run.stage == 3:
            torch.save(model, step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(model, step / "mp_rank_00_model_states.pt")
        tree = {"optimizer_state_dict": optimiser(run, rank), "ds_version": "0.19.8"}
        torch.save(tree, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def optimiser(run: Run, rank: int) -> dict[str, Any]:
    kinds = [
        [list(group.values())] + [[moments(p)[m] for p in group.values()] for m in MOMENTS] for group in run.groups
    ]
    if run.stage == 3:
        cut = [[shares(run, kind)[rank] for kind in kinds_of] for kinds_of in kinds]
        gaps = [0] * len(cut)
    else:
        cut = [[rows(run, kind)[0][rank] for kind in kinds_of] for kinds_of in kinds]
        gaps = [rows(run, kinds_of[0])[1][rank] for kinds_of in kinds]
    state = {i: {"step": torch.tensor(5.0), "exp_avg": one[1], "exp_avg_sq": one[2]} for i, one in enumerate(cut)}
    groups = [{"lr": 0.1 * (i + 1), "betas": (0.9, 0.99), "params": [i]} for i in range(len(cut))]
    base = {"state": state, "param_groups": groups}
    if run.stage == 3:
        flat = [one[0] for one in cut]
        return {"zero_stage": 3, "partition_count": run.ranks, "optimizer_state_dict": base, "fp32_flat_groups": flat}
    flat = [one[0][: len(one[0]) - (gap if run.lean else 0)] for one, gap in zip(cut, gaps, strict=True)]
    found: dict[str, Any] = {
        "zero_stage": run.stage, "partition_count": [run.ranks] * len(cut), "base_optimizer_state": base,
        "single_partition_of_fp32_groups": flat, "group_paddings": gaps,
    }  # fmt: skip
    if run.align > 1:
        found["param_alignment_paddings"] = [paddings(run, list(group.values())) for group in run.groups]
    return found


def paddings(run: Run, group: Sequence[Tensor]) -> list[int]:
    """Behind each parameter of a group; none behind the last."""
    return [*(-one.numel() % run.align for one in group[:-1]), 0]


def expected(run: Run) -> Mapping[str, Tensor]:
    """What a reader has to find."""
    found = {**run.frozen, **run.buffers}
    for group in run.groups:
        for name, one in group.items():
            found[name] = one if run.stage == 3 else one.to(run.dtype)
            found |= {f"{name}.{moment}": value for moment, value in moments(one).items()}
            found[f"{name}.step"] = torch.tensor(5.0)
            if run.stage < 3 and run.dtype != torch.float32:
                found[f"{name}.master"] = one
    return found | {alias: found[own] for alias, own in run.tied.items()}
