"""Comparing two checkpoints: equal ones without reading, others element by element, whatever their layouts."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tangram.checkpoint.inspect import diff
from tangram.checkpoint.inspect.diff import CheckpointDiff, TensorChange, compare
from tangram.checkpoint.loading.block_source import DamagedError
from tangram.errors import UserError
from tests.checkpoint.making import flip, make, regions


def compared(tmp_path: Path, a: dict[str, Tensor], b: dict[str, Tensor], layout: str = "_ _/tp") -> CheckpointDiff:
    """The first is saved whole, of the second each matrix cut over two ranks."""
    cuts = {name: regions(tuple(t.shape), layout, "tp=2") for name, t in b.items() if t.dim() == 2}
    one, other = make(tmp_path / "a", a), make(tmp_path / "b", b, cuts, writers=2)
    return compare((tmp_path / "a", one), (tmp_path / "b", other))


def only(found: CheckpointDiff) -> TensorChange:
    assert not found.same
    (change,) = found.changes
    json.dumps(found.as_json(), allow_nan=False)
    return change


def test_the_same_values_in_another_layout_are_equal_without_reading(tmp_path: Path) -> None:
    tensors = {"m.w": torch.randn(30, 20), "m.b": torch.randn(7).to(torch.bfloat16)}
    cuts = {"m.w": regions((30, 20), "a b/tp", "tp=2")}
    one, other = make(tmp_path / "a", tensors), make(tmp_path / "b", tensors, cuts, writers=2)
    for file in [*(tmp_path / "a").glob("*.safetensors"), *(tmp_path / "b").glob("*.safetensors")]:
        file.unlink()
    found = compare((tmp_path / "a", one), (tmp_path / "b", other))
    assert found.same
    assert found.equal == 2
    assert diff.to_read(one, other) == 0


def test_a_difference_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "CHUNK", 640)
    a = torch.ones(30, 20)
    b = a.clone()
    b[3, 4], b[29, 19] = 1.5, -3.0
    found = only(compared(tmp_path, {"m.w": a, "m.s": torch.ones(3)}, {"m.w": b, "m.s": torch.ones(3)}))
    assert (found.name, found.kind, found.elements, found.differing) == ("m.w", "values", 600, 2)
    assert found.largest == 4.0
    assert found.relative == pytest.approx(4 / 3)


def test_names_shapes_and_types_are_compared(tmp_path: Path) -> None:
    a = {"m.a": torch.ones(2), "m.s": torch.ones(2, 3), "m.t": torch.ones(4)}
    b = {"m.b": torch.ones(2), "m.s": torch.ones(3, 2), "m.t": torch.ones(4, dtype=torch.bfloat16)}
    found = compared(tmp_path, a, b)
    assert [(c.name, c.kind, c.a, c.b) for c in found.changes] == [
        ("m.a", "a", "float32 [2]", ""),
        ("m.b", "b", "", "float32 [2]"),
        ("m.s", "shape", "float32 [2, 3]", "float32 [3, 2]"),
        ("m.t", "dtype", "float32 [4]", "bfloat16 [4]"),
    ]
    assert found.changes[-1].differing == 0


def test_another_type_is_compared_by_value(tmp_path: Path) -> None:
    found = only(
        compared(tmp_path, {"m.w": torch.tensor([1.0, math.nan])}, {"m.w": torch.tensor([2.0, math.nan]).half()})
    )
    assert (found.kind, found.differing, found.largest, found.nans) == ("dtype", 1, 1.0, (1, 1))


@pytest.mark.parametrize(
    ("a", "b", "differing", "largest", "relative"),
    [
        (0.0, -0.0, 1, 0.0, 0.0),
        (math.nan, 1.0, 1, 0.0, 0.0),
        (math.inf, 1.0, 1, math.inf, math.inf),
        (math.inf, -math.inf, 1, math.inf, math.inf),
        (0.0, 1e-30, 1, float(torch.tensor(1e-30)), 1.0),
    ],
)
def test_what_is_no_plain_number(
    tmp_path: Path, a: float, b: float, differing: int, largest: float, relative: float
) -> None:
    found = only(compared(tmp_path, {"m.w": torch.tensor([a, 5.0])}, {"m.w": torch.tensor([b, 5.0])}))
    assert (found.differing, found.largest, found.relative) == (differing, largest, relative)


TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64, torch.bool, torch.int64, torch.complex64]


@pytest.mark.parametrize("dtype", [*TYPES, torch.complex128, torch.int8, torch.float64])
def test_every_type_can_be_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    a, b = torch.tensor([1, 0, 1, 1]).to(dtype), torch.tensor([1, 0, 0, 1]).to(dtype)
    found = only(compared(tmp_path, {"m.w": a}, {"m.w": b}))
    assert (found.differing, found.largest, found.relative) == (1, 1.0, 1.0)


def test_objects_are_compared(tmp_path: Path) -> None:
    one = make(tmp_path / "a", {"m.w": torch.ones(1)}, objects={"p.step": 1, "p.same": [1], "p.none": None})
    other = make(tmp_path / "b", {"m.w": torch.ones(1)}, objects={"p.step": 2, "p.same": [1]})
    found = compare((tmp_path / "a", one), (tmp_path / "b", other))
    assert not found.same
    assert [(c.name, c.a, c.b, c.there) for c in found.objects] == [
        ("p.none", None, None, (True, False)),
        ("p.step", 1, 2, (True, True)),
    ]


def test_a_pattern_narrows_tensors_and_objects(tmp_path: Path) -> None:
    one = make(tmp_path / "a", {"m.w": torch.ones(1), "m.v": torch.ones(1)}, objects={"p.step": 1})
    other = make(tmp_path / "b", {"m.w": torch.zeros(1), "o.v": torch.ones(1)}, objects={"p.step": 2})
    sides = (tmp_path / "a", one), (tmp_path / "b", other)
    assert len(compare(*sides).changes) == 3
    found = compare(*sides, "o")
    assert [(c.name, c.kind) for c in found.changes] == [("o.v", "b")]
    assert found.objects == ()
    assert diff.to_read(one, other, "o") == 0
    assert diff.to_read(one, other) == 8
    with pytest.raises(UserError, match="no tensor's name fits 'x'"):
        compare(*sides, "x")


def test_damage_in_what_must_be_read_is_no_difference(tmp_path: Path) -> None:
    one, other = make(tmp_path / "a", {"m.w": torch.ones(9)}), make(tmp_path / "b", {"m.w": torch.zeros(9)})
    flip(tmp_path / "b" / "m-00001-of-00001.safetensors", 4099)
    with pytest.raises(DamagedError, match=r"m\.w"):
        compare((tmp_path / "a", one), (tmp_path / "b", other))


@settings(max_examples=12)
@given(st.data())
def test_counts_are_those_of_a_plain_comparison(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tmp_path = tmp_path_factory.mktemp("diff")
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    values = st.lists(st.sampled_from([0.0, 1.0, -2.0]), min_size=rows * columns, max_size=rows * columns)
    a, b = (torch.tensor(data.draw(values)).reshape(rows, columns) for _ in range(2))
    found = compared(tmp_path, {"m.w": a}, {"m.w": b}, data.draw(st.sampled_from(["_/tp _", "_ _/tp", "_ _ //tp"])))
    assert found.same == torch.equal(a, b)
    for change in found.changes:
        assert change.differing == int((a != b).sum())
        assert change.largest == float((a - b).abs().max())
