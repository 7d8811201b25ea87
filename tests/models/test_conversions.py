"""Conversions as statements move values as transformers' own operations do; what has no translation is refused."""

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Conv3dToLinear,
    ConversionOps,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from tangram.errors import UserError
from tangram.layout import Mapping as MappingText
from tangram.layout import Region, Statement
from tangram.models.building.conversions import Conversion, read_conversion
from tangram.relayout import Piece, TensorSpec, bind, execute, plan

Shapes = Mapping[str, tuple[int, ...]]


class Module(nn.Module):
    """Parameters of these shapes under names with dots, and a configuration."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=2, vision=SimpleNamespace(num_attention_heads=3))
        for name, shape in shapes.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for word in path:
                if word not in dict(place.named_children()):
                    place.add_module(word, nn.Module())
                place = place.get_submodule(word)
            place.register_parameter(last, nn.Parameter(torch.empty(shape)))


def values(shapes: Shapes) -> dict[str, Tensor]:
    """Every element of all tensors another number."""
    counter = itertools.count()
    return {
        name: torch.tensor([float(next(counter)) for _ in range(torch.Size(shape).numel())]).view(shape)
        for name, shape in shapes.items()
    }


def ours(conversion: Conversion, stored: Mapping[str, Tensor], made: Shapes) -> dict[str, Tensor]:
    """What the statements make, moved by relayout; they are printed and parsed on the way."""
    assert not conversion.missing
    assert not conversion.surplus
    statements = [
        Statement(tuple((t,) for t in part.source), tuple((t,) for t in part.target)) for part in conversion.parts
    ]
    text = MappingText.parse(str(MappingText(tuple(statements))))
    specs = {name: TensorSpec(tuple(tensor.shape)) for name, tensor in stored.items()}
    bound = bind(text, specs, {name: TensorSpec(shape) for name, shape in made.items()})
    out = {("here", name): torch.full(shape, -1.0) for name, shape in made.items()}
    pieces = [Piece("there", name, Region.full(spec.shape)) for name, spec in specs.items()]
    wanted = [Piece("here", name, Region.full(shape)) for name, shape in made.items()]
    execute(plan(bound, pieces, wanted), {("there", name): tensor for name, tensor in stored.items()}, out)
    return {name: out["here", name] for name in made}


def theirs(
    sources: Sequence[str], converter: WeightConverter, stored: Mapping[str, Tensor], model: nn.Module
) -> dict[str, Tensor]:
    """What the converter itself makes of the tensors, which belong to its patterns by turns."""
    first = ""
    for name, pattern in zip(stored, sources, strict=True):
        first, _ = converter.rename_source_key(name)
        converter.add_tensor(first, name, pattern, cast("Any", stored[name]))
    made = converter.convert(first, model=cast("Any", model), config=cast("Any", model).config)
    return {
        name: value if isinstance(value, Tensor) else value[0] for name, value in cast("dict[str, Any]", made).items()
    }


EXPERTS = {f"x.exp.{i}.{w}": (3, 2) for w in ("gate", "up") for i in range(11)}
GATE_UP = ["exp.*.gate"] * 11 + ["exp.*.up"] * 11
ROPE: list[ConversionOps] = [PermuteForRope(subconfig_key="vision")]
CASES: dict[str, tuple[Shapes, list[str], list[str], list[ConversionOps], Shapes]] = {
    "experts": (EXPERTS, GATE_UP, ["both"], [MergeModulelist(0), Concatenate(1)], {"x.both": (11, 6, 2)}),
    "experts elsewhere": (EXPERTS, GATE_UP, ["both"], [MergeModulelist(1), Concatenate(-1)], {"x.both": (3, 11, 4)}),
    "one expert": ({"x.0.exp.0.w": (3, 2)}, ["exp.*.w"], ["w"], [MergeModulelist(0)], {"x.0.w": (1, 3, 2)}),
    "unequal": ({"a": (2, 3), "b": (5, 3)}, ["a", "b"], ["c"], [Concatenate(0)], {"c": (7, 3)}),
    "shards": ({f"s_{i}.w": (2, 3) for i in range(11)}, ["s_*.w"] * 11, ["c"], [Concatenate(0)], {"c": (22, 3)}),
    "chunks": ({"x.a": (7, 2)}, ["a"], ["q", "k", "v"], [Chunk(0)], {"x.q": (3, 2), "x.k": (3, 2), "x.v": (1, 2)}),
    "split": ({"x.a": (7, 2)}, ["a"], ["q", "k"], [Split(0)], {"x.q": (2, 2), "x.k": (5, 2)}),
    "transpose": ({"a": (2, 3, 4)}, ["a"], ["b"], [Transpose(1, 2)], {"b": (2, 4, 3)}),
    "transposed already": ({"a": (2, 3)}, ["a"], ["b"], [Transpose(0, 1, check_dims=True)], {"b": (2, 3)}),
    "transposed if need be": ({"a": (3, 2)}, ["a"], ["b"], [Transpose(0, 1, check_dims=True)], {"b": (2, 3)}),
    "transpose, chunk": ({"a": (2, 6)}, ["a"], ["b", "c"], [Transpose(0, 1), Chunk(0)], {"b": (3, 2), "c": (3, 2)}),
    "pairs": ({"a": (2, 6)}, ["a"], ["b"], [Interleave(1)], {"b": (2, 6)}),
    "pairs back": ({"a": (6, 2)}, ["a"], ["b"], [Interleave(0, inverse=True)], {"b": (6, 2)}),
    "pairs, chunks": ({"a": (2, 6)}, ["a"], ["b", "c"], [Interleave(1), Chunk(1)], {"b": (2, 3), "c": (2, 3)}),
    "rope": ({"a": (24, 2)}, ["a"], ["b"], ROPE, {"b": (24, 2)}),
    "rope of a bias": ({"a": (24,)}, ["a"], ["b"], [PermuteForRope()], {"b": (24,)}),
    "rope back": ({"a": (24, 2)}, ["a"], ["b"], [PermuteForRope(inverse=True)], {"b": (24, 2)}),
    "rope, fused": ({"a": (12, 2), "b": (8, 2)}, ["a", "b"], ["c"], [PermuteForRope(), Concatenate(0)], {"c": (20, 2)}),
    "chunks, rope": (
        {"a": (24, 2)},
        ["a"],
        ["q", "v"],
        [Chunk(0), PermuteForRope(permute_layer_names=["q"])],
        {"q": (12, 2), "v": (12, 2)},
    ),
    "kernel": ({"a": (2, 3, 1, 2, 2)}, ["a"], ["b"], [Conv3dToLinear(3, (1, 2, 2))], {"b": (2, 12)}),
    "kernel already flat": ({"a": (2, 12)}, ["a"], ["b"], [Conv3dToLinear(3, (1, 2, 2))], {"b": (2, 12)}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_move_as_transformers_moves_them(case: Any) -> None:
    shapes, sources, targets, operations, made = case
    stored, model = values(shapes), Module(made)
    patterns = list(dict.fromkeys(sources))
    found = ours(read_conversion(model, shapes, [WeightConverter(patterns, targets, operations)]), stored, made)
    oracle = theirs(sources, WeightConverter(patterns, targets, operations), stored, model)
    assert found.keys() == oracle.keys()
    for name in oracle:
        assert torch.equal(found[name], oracle[name]), name


class Square(ConversionOps):
    """Arithmetic, which is no movement."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        return input_dict


REFUSED: dict[str, tuple[Shapes, list[str], list[str], list[ConversionOps], Shapes, str]] = {
    "unknown": ({"a": (2,)}, ["a"], ["b"], [Square()], {"b": (2,)}, "makes b with the operation Square, which is not"),
    "vision": (
        {f"{w}.{i}.x": (2, 2) for w in "ab" for i in range(2)},
        ["a.*.x", "b.*.x"],
        ["c", "d"],
        [ErnieFuseAndSplitTextVisionExperts()],
        {"c": (1, 4, 2), "d": (1, 4, 2)},
        "operation ErnieFuseAndSplitTextVisionExperts",
    ),
    "counted": ({"a": (4,)}, ["a"], ["b"], [Chunk(0, "n")], {"b": (4,)}, "Chunk into a number of parts"),
    "fused, cut": (
        {"a": (2, 2), "b": (3, 2)},
        ["a", "b"],
        ["c"],
        [Concatenate(0), Interleave(1), Interleave(0)],
        {"c": (5, 2)},
        "Interleave of 5, an odd number",
    ),
    "fused, then pairs": (
        {"a": (2, 2), "b": (2, 2)},
        ["a", "b"],
        ["c"],
        [Concatenate(0), Interleave(0)],
        {"c": (4, 2)},
        "Interleave after another one",
    ),
    "other shapes": (
        {"a": (2, 2), "b": (2, 3)},
        ["a", "b"],
        ["c"],
        [Concatenate(0)],
        {"c": (4, 2)},
        "Concatenate of tensors whose shapes differ",
    ),
    "heads": ({"a": (6,)}, ["a"], ["b"], [PermuteForRope()], {"b": (6,)}, "PermuteForRope of 6 rows in 2 heads"),
    "too few": ({"a": (2,)}, ["a"], ["b", "c", "d"], [Chunk(0)], {"b": (1,)}, "Chunk of 2 into 3 parts"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_has_no_translation(case: Any) -> None:
    shapes, patterns, targets, operations, made, message = case
    with pytest.raises(UserError, match=message):
        read_conversion(Module(made), shapes, [WeightConverter(patterns, targets, operations)])


def gate_up(shapes: Shapes, made: Shapes) -> Conversion:
    converter = WeightConverter(["exp.*.gate", "exp.*.up"], ["both"], [MergeModulelist(0), Concatenate(1)])
    return read_conversion(Module(made), shapes, [WeightRenaming("old", "new"), converter])


def without(shapes: Shapes, *names: str) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name not in names}


def test_members_that_are_missing_or_too_many() -> None:
    old = {f"old.{name.removeprefix('x.')}": shape for name, shape in EXPERTS.items()}
    made = {"new.both": (11, 6, 2)}
    assert not gate_up(old, made).missing
    assert gate_up(without(old, "old.exp.3.up"), made).missing == ["old.exp.3.up"]
    assert gate_up(without(old, "old.exp.10.up"), made).missing == ["old.exp.10.up"]
    assert gate_up(without(old, "old.exp.10.up", "old.exp.10.gate"), made).missing == [
        "old.exp.10.gate",
        "old.exp.10.up",
    ]
    assert gate_up({**old, "old.exp.11.up": (3, 2)}, made).surplus == ["old.exp.11.up"]
    all_up = [f"old.exp.{i}.up" for i in range(11)]
    assert gate_up(without(old, *all_up), made).missing == all_up
    both = gate_up({**without(old, "old.exp.0.gate"), "old.exp.12.gate": (3, 2)}, made)
    assert (both.missing, both.surplus, both.spoilt) == (["old.exp.0.gate"], ["old.exp.12.gate"], {"new.both"})


def test_a_member_of_another_shape() -> None:
    found = gate_up({**EXPERTS, "x.exp.4.up": (3, 3)}, {"x.both": (11, 6, 2)})
    assert found.unlike == ["x.exp.4.up has the shape [3, 3], not [3, 2]"]
    assert not found.parts


def test_a_tensor_in_both_structures_is_one_too_many() -> None:
    found = gate_up({**EXPERTS, "x.both": (11, 6, 2)}, {"x.both": (11, 6, 2)})
    assert sorted(found.surplus) == sorted(EXPERTS)


def test_what_the_module_has_not_is_left_over() -> None:
    assert sorted(gate_up(EXPERTS, {"y": (2,)}).surplus) == sorted(EXPERTS)


def test_what_is_read_for_one_expert_is_that_expert() -> None:
    made = {"x.both": (11, 6, 2)}
    (part,) = gate_up(EXPERTS, made).parts
    assert str(part.source[0]) == "x.exp.{e}.gate as s0: d0 d1"
    assert str(part.target[0]) == "x.both: e (s0 d0 + s1 d2) d1"
    statement = Statement(tuple((t,) for t in part.source), tuple((t,) for t in part.target))
    specs = {name: TensorSpec(shape) for name, shape in EXPERTS.items()}
    bound = bind(MappingText((statement,)), specs, {"x.both": TensorSpec((11, 6, 2))})
    pieces = [Piece(name, name, Region.full(shape)) for name, shape in EXPERTS.items()]
    copies = plan(bound, pieces, [Piece("here", "x.both", Region.parse("[4:6 0:6 0:2]"))])
    assert {copy.source.place for copy in copies.copies if copy.source} == {
        f"x.exp.{i}.{w}" for i in (4, 5) for w in ("gate", "up")
    }
