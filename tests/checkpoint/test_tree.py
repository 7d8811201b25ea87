"""The tree of a checkpoint: folding loses nothing, a big model fits a screen, values are looked at in parts."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tangram.checkpoint.inspect import tree
from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.store.manifest import StoredPiece, StoredTensor
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import TensorSpec
from tests.checkpoint.making import flip, make, regions


def stored(name: str, shape: tuple[int, ...] = (4, 2), layout: str = "") -> StoredTensor:
    piece = StoredPiece(Region.full(shape), "f", 4096)
    return StoredTensor(name, TensorSpec(shape), "0" * 32, (piece,), layout)


def shown(names: list[str]) -> list[str]:
    return ["  " * line.depth + f"{line.label} {line.tensors}" for line in tree.tree([stored(name) for name in names])]


def test_layers_share_a_line() -> None:
    names = [f"model.layers.{i}.{part}" for i in range(28) for part in ("attn.q", "attn.k", "mlp")]
    assert shown([*names, "model.norm", "optim.step"]) == [
        "model 85",
        "  layers.{0..27} 84",
        "    attn 56",
        "      q 28",
        "      k 28",
        "    mlp 28",
        "  norm 1",
        "optim.step 1",
    ]


def test_numbers_that_are_not_all_there_are_said() -> None:
    assert shown(["m.0.w", "m.2.w", "m.3.w"]) == ["m.{0,2..3}.w 3"]
    assert shown(["m.1.e.0", "m.1.e.1", "m.2.e.0"]) == ["m 3", "  1.e.{0..1} 2", "  2.e.0 1"]
    assert shown(["m.01.w", "m.1.w"]) == ["m 2", "  01.w 1", "  1.w 1"]


def test_tensors_of_other_shapes_or_layouts_have_lines_of_their_own() -> None:
    lines = tree.tree([stored("m.0"), stored("m.1", (5, 2)), stored("m.2", layout="a/tp b")])
    assert [(line.label, line.shape, line.layout) for line in lines if line.dtype] == [
        ("0", (4, 2), ""),
        ("1", (5, 2), ""),
        ("2", (4, 2), "a/tp b"),
    ]


def test_a_name_that_continues_another_has_its_own_line() -> None:
    assert shown(["m.a", "m.a.b"]) == ["m.a 1", "m.a 1", "  b 1"]


def test_a_name_of_many_dots_is_no_deep_tree() -> None:
    (line,) = tree.tree([stored("a" + ".a" * 100_000)])
    assert line.label == "a" + ".a" * 100_000
    two = [stored("a" + ".a" * 100_000 + end) for end in "bc"]
    assert max(line.depth for line in tree.tree(two)) <= tree.DEEPEST


NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b", "0", "1", "2", "10"]), min_size=1, max_size=4).map(".".join), unique=True
)


@given(NAMES)
def test_folding_loses_and_invents_nothing(names: list[str]) -> None:
    tensors = [stored(name) for name in names]
    folded = tree.tree(tensors)
    assert sum(line.tensors for line in folded if line.dtype) == len(names)
    assert sum(line.nbytes for line in folded if line.dtype) == sum(t.nbytes for t in tensors)
    plain = tree.tree(tensors, fold=False)
    assert len([line for line in plain if line.dtype]) == len(names)


def test_a_pattern_narrows(tmp_path: Path) -> None:
    manifest = make(
        tmp_path / "a", {"model.l.0.w": torch.ones(2), "model.l.1.w": torch.ones(2), "opt.x": torch.ones(1)}
    )
    assert [t.name for t in tree.chosen(manifest, "*.w")] == ["model.l.0.w", "model.l.1.w"]
    assert [t.name for t in tree.chosen(manifest, "model.l.1")] == ["model.l.1.w"]
    assert len(tree.chosen(manifest, "*")) == 3
    with pytest.raises(UserError, match=r"no tensor's name fits 'modle': give .*; the sections are model, opt"):
        tree.chosen(manifest, "modle")


def test_a_line_has_what_the_manifest_says(tmp_path: Path) -> None:
    cuts = {"model.w": regions((4, 6), "a/tp b", "tp=2")}
    made = make(tmp_path / "a", {"model.w": torch.ones(4, 6)}, cuts, writers=2, layouts={"model.w": "a/tp b"})
    (line,) = tree.tree(tree.chosen(made, "*"))
    assert (line.label, line.dtype, line.shape, line.layout) == ("model.w", "float32", (4, 6), "a/tp b")
    assert (line.pieces, line.nbytes, line.digest) == (2, 96, made.tensors["model.w"].digest)
    fields = json.loads(json.dumps(tree.as_json(tmp_path / "a", made, tree.chosen(made, "*"))))
    assert fields["tensors"]["model.w"]["shape"] == [4, 6]
    assert fields["bytes"] == 96


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint16])
def test_values_are_those_of_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    values = torch.arange(-3 if dtype.is_signed else 0, 60).reshape(-1, 3).to(dtype)
    made = make(tmp_path / "a", {"m.w": values}, {"m.w": regions(tuple(values.shape), "a b/tp", "tp=3")}, writers=3)
    monkeypatch.setattr(tree, "CHUNK", 40)
    found = tree.values_of(tmp_path / "a", made, "m.w")
    expected = values.to(torch.float64).reshape(-1)
    assert list(found.first) == expected[:6].tolist()
    assert list(found.last) == expected[-6:].tolist()
    assert (found.smallest, found.largest) == (expected.min(), expected.max())
    assert found.mean == pytest.approx(float(expected.mean()))


def test_values_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    values = torch.tensor([1.0, math.nan, math.inf, 3.0])
    made = make(tmp_path / "a", {"m.w": values, "m.c": torch.tensor([1j]), "m.e": torch.empty(0, 2)})
    found = tree.values_of(tmp_path / "a", made, "m.w")
    assert (found.smallest, found.largest, found.mean, found.nans, found.infinite) == (1.0, 3.0, 2.0, 1, 1)
    assert found.last == ()
    assert json.loads(json.dumps(found.as_json()))["first"] == [1.0, "nan", "inf", 3.0]
    other = tree.values_of(tmp_path / "a", made, "m.c")
    assert (other.smallest, other.first) == (None, (1j,))
    assert json.dumps(other.as_json())
    assert tree.values_of(tmp_path / "a", made, "m.e").first == ()


def test_damaged_values_are_not_shown(tmp_path: Path) -> None:
    made = make(tmp_path / "a", {"m.w": torch.ones(5)})
    flip(tmp_path / "a" / "m-00001-of-00001.safetensors", 4100)
    with pytest.raises(DamagedError, match=r"m\.w"):
        tree.values_of(tmp_path / "a", made, "m.w")
    with pytest.raises(UserError, match=r"has no tensor 'm\.x'"):
        tree.values_of(tmp_path / "a", made, "m.x")


def test_long_objects_are_cut() -> None:
    assert tree.short({"a": [1, 2]}) == '{"a": [1, 2]}'
    assert len(tree.short(list(range(100)))) == 60
    assert "\x1b" not in tree.short("\x1b[31m")


def test_numbers_of_every_type_numpy_lacks() -> None:
    assert tree.numbers(torch.ones(1, dtype=torch.bfloat16)).dtype == np.float32
