"""Parts of unlike sizes and index maps in a derivation: proved on all ranks in one process; their steps, by number."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tangram.layout import Layout, Mesh
from tangram.relayout.collectives import uneven
from tangram.sharding.derive.layouts import layout_of, value_layout
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.marking.marks import states as states_of
from tangram.sharding.derive.of_model import derive_model, graph_of
from tangram.sharding.derive.problem import states
from tangram.sharding.derive.problem.states import SAME, Cutting, State, cut
from tangram.sharding.derive.transitions import ordered, sizes_after, states_to_change
from tangram.sharding.proof.derived import check
from tangram.training.mesh.local_parts import own_part

E = 4


class Attends(nn.Module):
    """Embeds, attends in groups of heads and chooses."""

    def __init__(self, vocabulary: int, kv: int, repeat: int, ffn: int) -> None:
        super().__init__()
        self.kv, self.repeat, H = kv, repeat, 6
        self.embed = nn.Embedding(vocabulary, H)
        self.q, self.k, self.v = nn.Linear(H, kv * repeat * E), nn.Linear(H, kv * E), nn.Linear(H, kv * E)
        self.o, self.up, self.down = nn.Linear(kv * repeat * E, H), nn.Linear(H, ffn), nn.Linear(ffn, H)
        self.head = nn.Linear(H, vocabulary, bias=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSH = self.embed(ids_BS)
        B, S, _ = x_BSH.shape
        q, k, v = (f(x_BSH).view(B, S, -1, E).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.repeat, 1) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSH = x_BSH + self.o(a.transpose(1, 2).reshape(B, S, -1))
        x_BSH = x_BSH + self.down(F.gelu(self.up(x_BSH)))
        return self.head(x_BSH).log_softmax(-1)


MARKS = (
    "{embed,head}.weight: v/a h",
    "q.weight: (kv/a r e) h",
    "k.weight: (kv/a e) h",
    "up.weight: f/a h",
    "down.weight: h f/a",
    "embed: b/a s h",
    "o: b s/a h",
    "o: b s/a:zigzag h",
    "embed: b s/a:cyclic[2] h",
    "down: b s h/a:strided[2]",
)


def proved(mesh: str, marks: Sequence[str], vocabulary: int, kv: int, repeat: int, ffn: int, B: int, S: int) -> str:
    torch.manual_seed(0)
    model, ids_BS = Attends(vocabulary, kv, repeat, ffn), torch.randint(vocabulary, (B, S))
    texts = [mark.replace("kv/", f"{kv}/").replace(" r ", f" {repeat} ").replace(" e)", f" {E})") for mark in marks]
    graph = graph_of(model, {"ids_BS": ids_BS}, torch.float32)
    found = derive_model(graph, [Mark.parse(text) for text in texts], Mesh.parse(mesh))
    for v, _ in graph.of_kind("parameter"):  # what is said of them can be read again
        layout = value_layout(found, v)
        read = states_of(layout, layout.shape, found.mesh)
        used = {over.axis: over.used[found.folded.classes[v]] for over in found.axes}
        assert read == {axis: state for axis, state in used.items() if state.kind in ("cut", "sum")}
    return check(found, {**dict(model.named_parameters()), "ids_BS": ids_BS}).wrong


sizes = st.integers(2, 7)  # a dim of one element is none of a rule, and refused


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(MARKS),
    st.integers(2, 4),
    sizes,
    sizes,
    st.integers(1, 2),
    sizes,
    st.integers(2, 5),
    st.integers(2, 9),
)
def test_what_is_derived_for_any_sizes_is_proved(
    mark: str, k: int, vocabulary: int, kv: int, repeat: int, ffn: int, B: int, S: int
) -> None:
    assert proved(f"a={k}", [mark], vocabulary, kv, repeat, ffn, B, S) == ""


@pytest.mark.parametrize(
    ("mesh", "marks"),
    [
        ("b=2 a=3", ("{embed,head}.weight: v/a h", "embed: b/b s h", "o: b/b s/a h")),
        ("b=2 a=2", ("o: b s/b:zigzag/a h", "q.weight: (kv/a r e) h")),
        ("a=4", ("q.weight: (kv/a:[0 3 1 1] r e) h", "embed: b s/a:zigzag h")),
    ],
)
def test_over_several_axes_and_with_nothing(mesh: str, marks: Sequence[str]) -> None:
    assert proved(mesh, marks, 13, 5, 2, 7, 3, 8) == ""


MESH, SHAPE = Mesh.parse("a=2 b=2 c=3"), (24, 10)
CUTS = {
    axis: [
        SAME,
        cut(0),
        states.chunked(1, 10, k),
        cut(0, 1, states.parts_of("zigzag", 24, k)),
        cut(0, 1, states.parts_of("", 4, k, (), 6)),
        cut(0, 2, states.parts_of("", 3, k, (), 4)),
    ]
    for axis, (k, _) in MESH.axes.items()
}


def fits(lies: Mapping[str, State]) -> bool:
    """Whether a derivation would have a tensor lie so."""
    cuts = [(MESH.axes[axis][0], s) for axis, s in lies.items() if s.kind == "cut"]
    for dim in (0, 1):
        even = {outer: math.prod(k for k, s in cuts if s[1:] == (dim, outer, ())) for outer in (1, 2)}
        within = 2 if any(s.outer == 2 for _, s in cuts) and dim == 0 else SHAPE[dim]
        if within % even[1] or SHAPE[dim] // 2 % even[2]:
            return False
    return all(
        states.beside(SHAPE[s.dim], Cutting(s.outer, s.parts, k), Cutting(o.outer, o.parts, m))
        for (k, s), (m, o) in itertools.combinations(cuts, 2)
        if s.dim == o.dim and (s.parts or o.parts)
    )


lying = st.tuples(*(st.sampled_from(CUTS[axis]) for axis in "abc")).map(lambda own: dict(zip("abc", own, strict=True)))


@settings(max_examples=100, deadline=None)
@given(lying.filter(fits), lying.filter(fits))
def test_steps_bring_every_rank_its_part(source: dict[str, State], target: dict[str, State]) -> None:
    whole = torch.arange(240.0).reshape(SHAPE)
    parts = [own_part(whole, source, MESH, MESH.coords(rank)) for rank in range(MESH.size)]
    ks = {axis: k for axis, (k, _) in MESH.axes.items()}
    for step in ordered(source, {**source, **states_to_change(source, target, differentiable=True)}, ks):
        sizes = [sizes_after(part.shape, (step,), ks, MESH.coords(rank)) for rank, part in enumerate(parts)]
        parts = stepped(parts, *step)
        assert [[*part.shape] for part in parts] == sizes
    for rank, part in enumerate(parts):
        assert torch.equal(part, own_part(whole, target, MESH, MESH.coords(rank)))


def stepped(parts: Sequence[Tensor], axis: str, source: State, target: State) -> list[Tensor]:
    """One step on all ranks: what the group of each has is put together and cut again, by places."""
    found: list[Tensor] = []
    for rank in range(MESH.size):
        own = [parts[r] for r in sorted(MESH.peers(rank, axis), key=lambda r: MESH.coords(r)[axis])]
        k, me, x = len(own), MESH.coords(rank)[axis], own[0]
        if source.kind == "cut":
            n = sum(part.shape[source.dim] for part in own)
            x = uneven.joined(own, source.dim, uneven.indices(source.outer, n, k, source.parts))
        if target.kind == "cut":
            at = uneven.indices(target.outer, x.shape[target.dim], k, target.parts)[me]
            x = x.index_select(target.dim, torch.tensor(at.tolist(), dtype=torch.int64))
        found.append(x)
    return found


@pytest.mark.parametrize(
    ("layout", "shape", "said"),
    [
        ("v/c h", (50257, 4), "_=50257/c _=4"),
        ("(heads/c 8) h", (40, 4), "(_=5/c _=8) _=4"),
        ("(heads/a:[3 2] 8) h", (40, 4), "(_=5/a _=8) _=4"),
        ("(heads/a:[1 4] 8) h", (40, 4), "_=40/a:[8 32] _=4"),
        ("s/a:zigzag/b h", (16, 4), "_=16/a:zigzag/b _=4"),
        ("(3 g/a 4) h", (60, 4), "(_=3 _=5/a _=4) _=4"),
        ("x/c h", (2, 4), "_=2/c _=4"),
    ],
)
def test_states_are_written_as_marks_are(layout: str, shape: tuple[int, ...], said: str) -> None:
    lies = states_of(Layout.parse(layout), shape, MESH)
    written = layout_of(shape, lies)
    assert str(written) == said
    assert states_of(written, shape, MESH) == lies


def test_parts_left_in_the_order_of_ranks_are_seen() -> None:
    """Planted: what comes of a zigzag is not put at its places."""
    source = {"a": CUTS["a"][3], "b": SAME, "c": SAME}
    whole = torch.arange(240.0).reshape(SHAPE)
    parts = [own_part(whole, source, MESH, MESH.coords(rank)) for rank in range(MESH.size)]
    assert torch.equal(stepped(parts, "a", source["a"], SAME)[0], whole)
    with patch.object(uneven, "joined", lambda some, dim, at: torch.cat([*some], dim)):
        assert not torch.equal(stepped(parts, "a", source["a"], SAME)[0], whole)
