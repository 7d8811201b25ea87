"""What four ranks do with whole sequences: as on ranks of one process, and gradients back."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tangram.layout import Layout, Mesh
from tangram.relayout.collectives.run_sequence import members, relayout, run
from tangram.relayout.collectives.sequences import CollectiveStep, sequence
from tangram.relayout.mapping.errors import RelayoutError
from tests.relayout.collecting import World
from tests.relayout.sequencing import laid, part

SHAPE = (16, 24)
MESH = "a=2 b=2"
LAYOUTS = (
    "x y",
    "x/a/b y",
    "x/b/a y",
    "x y/a/b",
    "(2 x/a)/b y",
    "x/a y/b",
    "x/b y",
    "x/a y sum:b",
    "x y sum:a sum:b",
)
_made: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _groups(steps: tuple[CollectiveStep, ...], mesh: Mesh, me: int) -> dict[tuple[str, ...], dist.ProcessGroup]:
    """The groups of all steps; every rank makes all groups, in one order."""
    found: dict[tuple[str, ...], dist.ProcessGroup] = {}
    for step in steps:
        for ranks in members(step, mesh):
            own = tuple(ranks)
            if own not in _made:
                group = dist.new_group(ranks)
                assert isinstance(group, dist.ProcessGroup) or me not in own
                _made[own] = group  # type: ignore[assignment]
            if me in own:
                found[step.axes] = _made[own]
    return found


def _gradient_of(layout: Layout) -> Layout:
    return Layout(layout.dims)  # whole where a sum is pending


def every_two_layouts(world: World) -> list[str]:
    """From each to each, forward and backward, as bfloat16 and as a number that is sent as bytes."""
    found: list[str] = []
    mesh, me = Mesh.parse(MESH), world.rank
    layouts = [Layout.parse(text).bind(SHAPE) for text in LAYOUTS]
    whole = torch.arange(16 * 24, dtype=torch.float64).reshape(SHAPE)
    slope = torch.flip(whole, (0,))
    for a in layouts:
        for b in layouts:
            there = sequence(SHAPE, a, b, mesh)
            back = sequence(SHAPE, _gradient_of(b), _gradient_of(a), mesh)
            groups = _groups((*there, *back), mesh, me)
            x = laid(whole, a, mesh)[me].requires_grad_()
            y = relayout(x, there, back, groups)
            if not _equal(y.detach(), whole, b, mesh, me):
                found.append(f"{a} to {b}")
            y.backward(part(slope, _gradient_of(b), mesh, me))
            if x.grad is None or not torch.equal(x.grad, part(slope, _gradient_of(a), mesh, me)):
                found.append(f"gradient of {a} to {b}")
            if not a.pending and not b.pending:
                own = part(whole.to(torch.int16), a, mesh, me)
                if not torch.equal(run(there, own, groups), part(whole.to(torch.int16), b, mesh, me)):
                    found.append(f"{a} to {b} of int16")
    return found


def _equal(got: torch.Tensor, whole: torch.Tensor, layout: Layout, mesh: Mesh, me: int) -> bool:
    expected = part(whole, layout, mesh, me)
    every = [torch.empty_like(expected) for _ in range(mesh.size)]
    dist.all_gather(every, got.contiguous()) if got.shape == expected.shape else None
    peers = mesh.peers(me, *[axis for _, axis in layout.pending]) if layout.pending else (me,)
    return got.shape == expected.shape and torch.equal(torch.stack([every[r] for r in peers]).sum(0), expected)


def refused_steps(world: World) -> list[str]:
    """Sentences, and nothing sent."""
    mesh = Mesh.parse(MESH)
    steps = sequence(SHAPE, Layout.parse("x/a y").bind(SHAPE), Layout.parse("x y").bind(SHAPE), mesh)
    found: list[str] = []
    for x, groups in (
        (torch.zeros(8, 24), {}),
        (torch.zeros(8, 24), {("a",): world.groups[4]}),
        (torch.zeros(9, 24), {("a",): world.groups[2]}),
    ):
        try:
            run(steps, x, groups)
        except RelayoutError as error:
            found.append(str(error))
    return found
