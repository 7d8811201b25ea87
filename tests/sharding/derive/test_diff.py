"""What two derivations have not in common."""

from __future__ import annotations

import pytest

from tangram.sharding.derive.explain.diff import difference, summary, tables
from tangram.sharding.derive.explain.show import total
from tests.sharding.derive.test_derive import MEGATRON, derived, language


def test_the_same_is_not_told() -> None:
    _, graph, _ = language("llama")
    found = difference(derived(graph, "tp=2", MEGATRON), derived(graph, "tp=2", MEGATRON))
    assert (found.parameters, found.modules, found.communication) == ((), (), ())
    assert [*tables(found, ("a", "b"))] == []
    assert summary(found, ("a", "b")).startswith("a and b give the same: a rank receives ")


def test_tensors_that_lie_otherwise_and_what_moves() -> None:
    _, graph, _ = language("llama")
    one = derived(graph, "tp=2", MEGATRON)
    other = derived(graph, "tp=2", ("*.{q,up}_proj.weight: out/tp in", "lm_head.weight: v/tp h", MEGATRON[2]))
    found = difference(one, other)
    (only,) = found.parameters
    assert (only.name, only.one, only.other) == ("model.embed_tokens.weight", "_/tp _", "_ _")
    assert other.folded.graph.values[0].nbytes == only.other_bytes == 2 * only.one_bytes
    assert found.other_bytes - found.one_bytes == pytest.approx(total(other) - total(one))
    moves = sum(one.other_bytes - one.one_bytes for one in found.communication)
    assert moves == pytest.approx(total(other) - total(one))  # what is not told is the same
    places = {one.place.partition(" (")[0]: (one.one, one.other) for one in found.communication}
    assert places["from model.embed_tokens"] == ("reduce-scatter / all-gather", "")


def test_layers_are_told_once() -> None:
    _, graph, _ = language("llama")
    one = derived(graph, "tp=2", MEGATRON)
    found = difference(one, derived(graph, "tp=2", (*MEGATRON[:2], "model.layers.*: b s h")))
    names = [one.name for one in found.modules]
    assert len(names) == len({*names})
    assert "model.layers.{0..1}" in names
    assert not any(".1." in name for name in names)
    titles = [title for title, _, _ in tables(found, ("a", "b"))]
    assert titles == ["What modules give that lie otherwise", "What moves otherwise, forward / backward"]
