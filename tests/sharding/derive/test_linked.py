"""Derived models in which parts need each other: windows and scans over a cut sequence, at the price of what passes."""

# ruff: noqa: N803  a tensor carries its dims in its name

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tangram.layout import Mesh
from tangram.models.capturing.graph import Graph
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import moved
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.of_model import derive_model, graph_of
from tangram.sharding.proof.derived import check
from tests.training.own_models import Convolved

B, H, S = 4, 16, 24


class Shorter(nn.Module):
    """Windows that make fewer elements than they read, so that no even parts are left."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.near = nn.Linear(8, H), nn.Conv1d(H, H, 3)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.near(self.embed(x_BSH).transpose(1, 2)).mean(2)


def derived(model: nn.Module, given: dict[str, Tensor], mesh: str, *marks: str) -> Derived:
    graph: Graph = graph_of(model, given, torch.float32)
    return derive_model(graph, [Mark.parse(mark) for mark in marks], Mesh.parse(mesh))


def passing(found: Derived) -> dict[str, float]:
    """Bytes that a rank receives within operators, forward, by kind."""
    some: dict[str, float] = {}
    for one in moved(found):
        if one.forward in ("halo", "scan"):
            assert (one.source, one.backward, one.backward_bytes) == (one.target, one.forward, one.forward_bytes)
            some[one.forward] = some.get(one.forward, 0.0) + one.forward_bytes
    return some


@pytest.mark.parametrize(
    ("mesh", "sequence", "stretches"),
    [
        ("cp=2", "s/cp", 1),
        ("cp=3", "s/cp", 1),
        ("cp=2", "(2 s/cp)", 2),
        ("cp=3", "(4 s/cp)", 4),
        ("dp=2 cp=3", "s/cp", 1),
    ],
)
def test_windows_and_scans_stay_cut(mesh: str, sequence: str, stretches: int) -> None:
    torch.manual_seed(0)
    model, ids = Convolved(), torch.randint(32, (B, S))
    batch = "b/dp" if "dp" in mesh else "b"
    found = derived(model, {"ids_BS": ids}, mesh, f"embed: {batch} {sequence} h", f"far: {batch} h {sequence}")
    assert check(found, {**dict(model.named_parameters()), "ids_BS": ids}).wrong == ""
    axes = {axis: n for axis, (n, _) in Mesh.parse(mesh).axes.items()}
    k, row = axes["cp"], B * H * 4 / axes.get("dp", 1)
    borders = 2 * (k * stretches - 1) / k  # each is read over from both sides
    assert passing(found) == {
        "halo": pytest.approx(row * borders * (1 + 2)),  # of one element, and of two
        "scan": pytest.approx(row * 2 * stretches * (k - 1)),
    }
    assert not [one for one in moved(found) if one.axis == "cp" and one.forward == "all-gather" and one.taker]


def test_where_the_results_of_windows_are_no_even_parts_all_is_gathered() -> None:
    torch.manual_seed(0)
    model, x = Shorter(), torch.randn(B, S, 8)
    found = derived(model, {"x_BSH": x}, "cp=2", "embed: b s/cp h")
    assert check(found, {**dict(model.named_parameters()), "x_BSH": x}).wrong == ""
    assert passing(found) == {}
    assert "all-gather" in {one.forward for one in moved(found)}
