"""Families among real names: numbers, offsets, ranges, wild cards, and everything that can be wrong with them."""

import numpy as np
import pytest

from tangram.layout import Region
from tangram.relayout import Piece, RelayoutError, TensorSpec, bind, execute, inverse, plan, shard
from tests.relayout.moving import Array, numbered, specs

Names = dict[str, Array]


def convert(mapping: str, source: Names, target: dict[str, TensorSpec] | None = None, **sizes: int) -> Names:
    """Every tensor of the target, by real names only: a piece for each tensor on both sides."""
    bound = bind(mapping, specs(source), target, **sizes)
    pieces = [Piece("file", name, Region.full(a.shape)) for name, a in source.items() if name in bound.source]
    out = {name: np.zeros(spec.shape, spec.dtype) for name, spec in bound.target.specs.items()}
    wanted = [Piece("memory", name, Region.full(a.shape)) for name, a in out.items()]
    have = {("file", name): a for name, a in source.items()}
    execute(plan(bound, pieces, wanted), have, {("memory", name): a for name, a in out.items()})
    return out


def same(got: Names, expected: Names) -> None:
    assert got.keys() == expected.keys()
    for name, a in got.items():
        np.testing.assert_array_equal(a, expected[name], name)


def many(text: str, n: int, start: int = 0, first: int = 1) -> Names:
    return {text.format(i + start): numbered(2, 3, start=first + 10 * i) for i in range(n)}


def test_numbers_are_numbers_and_not_text() -> None:
    """Twelve layers: layer 10 comes after layer 9 and not after layer 1, in whatever order the names are given."""
    source = many("layers.{}.w", 12)
    shuffled = {name: source[name] for name in sorted(source)}
    same(convert("layers.{l}.w: o i -> w: l o i", shuffled), {"w": np.stack(list(source.values()))})


def test_numbers_that_are_written_out_part_families() -> None:
    source = {**many("tower.0.{}.w", 2), **many("tower.1.{}.w", 3, first=500), **many("tower.10.{}.w", 1, first=900)}
    text = "\n".join(f"tower.{t}.{{l}}.w: o i -> t{t}: l o i" for t in (0, 1, 10))
    rows = list(source.values())
    same(convert(text, source), {"t0": np.stack(rows[:2]), "t1": np.stack(rows[2:5]), "t10": np.stack(rows[5:])})


def test_two_numbers_in_the_names_in_any_order_on_the_other_side() -> None:
    x = numbered(2, 3, 4, 5)
    source = {f"layers.{i}.experts.{j}.up": x[i, j] for i in range(2) for j in range(3)}
    expected = {f"e{j}.up.{i}": x[i, j].T for j in range(3) for i in range(2)}
    same(convert("layers.{l}.experts.{e}.up as up: f h -> e{e}.up.{l}: h f", source), expected)
    same(convert(str(inverse("layers.{l}.experts.{e}.up as up: f h -> e{e}.up.{l}: h f")), expected), source)


def test_offsets_on_one_side_or_both() -> None:
    source = many("layers.{}.w", 4, start=3)
    same(convert("layers.{l+3}.w: o i -> moe.{l}.w: o i", source), many("moe.{}.w", 4))
    same(convert("layers.{l+3}.w: o i -> moe.{l+1}.w: o i", source), many("moe.{}.w", 4, start=1))
    same(convert("layers.{l+3}.w: o i -> w: l o i", source), {"w": np.stack(list(source.values()))})


def test_ranges_part_one_pattern_into_several_families() -> None:
    source = many("layers.{}.w", 5)
    text = "layers.{l=2}.w: o i -> dense: l o i\nlayers.{m+2}.w: o i -> moe: m o i"
    whole = np.stack(list(source.values()))
    same(convert(text, source), {"dense": whole[:2], "moe": whole[2:]})
    bound = bind(text, specs(source))
    sharding = shard("x=2", {"layers.{l=2}.w": "l/x o i", "layers.{m+2}.w": "m/x o i"}, bound.source)
    assert [str(p.region) for p in sharding.pieces(1)] == ["[1:2 0:2 0:3]", "[2:3 0:2 0:3]"]


def test_a_size_from_outside_claims_only_so_many() -> None:
    source = many("layers.{}.w", 5)
    got = convert("layers.{l}.w: o i -> a: l o i\nlayers.{m+3}.w: o i -> b: m o i", source, l=3)
    same(got, {"a": np.stack([*source.values()][:3]), "b": np.stack([*source.values()][3:])})


def test_one_number_is_several_factors() -> None:
    source = many("layers.{}.w", 8)
    got = convert("layers.{(c p k)}.w: o i -> stage{p}.{c}.{k}.w: o i", source, c=2, p=2)
    layer = {(c, p, k): source[f"layers.{4 * c + 2 * p + k}.w"] for c in range(2) for p in range(2) for k in range(2)}
    same(got, {f"stage{p}.{c}.{k}.w": layer[c, p, k] for p in range(2) for c in range(2) for k in range(2)})


def test_one_number_is_a_sum_of_two_stacks() -> None:
    """Three dense layers and then two of experts, from two stacks into one sequence of names and back."""
    dense, moe = numbered(3, 2), numbered(2, 2, start=90)
    text = "dense: a h, moe: b h -> layers.{(dense a + moe b)+1}.w: h"
    expected = {f"layers.{i + 1}.w": row for i, row in enumerate([*dense, *moe])}
    same(convert(text, {"dense": dense, "moe": moe}), expected)
    same(convert(str(inverse(text)), expected, a=3), {"dense": dense, "moe": moe})


def test_wild_cards_take_what_nothing_else_names() -> None:
    source = {
        **many("layers.{}.w", 2),
        "layers.0.norm": numbered(4),
        "layers.1.norm": numbered(4, start=50),
        "head": numbered(3, 2),
        "model.bias": numbered(4, start=90),
    }
    text = """
        {x*} -> {x*}
        layers.{l}.norm: h -> layers.{l}.ln: h; add=-1
        head: v h -> lm_head: h v
        layers.{l}.w: o i -> w: l o i
    """
    bound = bind(text, specs(source) | {"bias": TensorSpec((2,))})
    assert set(bound.target.specs) >= {"layers.0.ln", "layers.1.ln", "model.bias", "lm_head", "w", "bias"}
    assert not set(bound.target.specs) & {"layers.0.norm", "head", "layers.0.w"}


def test_two_wild_cards_for_one_name_are_refused() -> None:
    source = {"a.norm": numbered(4), "b.w": numbered(2, 2)}
    first = "{x*}.norm: h -> {x*}.ln: h; add=-1"
    rest = "{x*} -> new.{x*}"
    with pytest.raises(RelayoutError, match="stands twice"):
        bind(f"{first}\n{rest}", specs(source))
    got = convert(f"{first}\nb.w -> new.b.w", source)
    same(got, {"a.ln": source["a.norm"] - 1, "new.b.w": source["b.w"]})


def test_a_plain_statement_goes_before_a_wild_card_wherever_it_stands() -> None:
    source = {
        "a.w": numbered(2, 3),
        "b.w": numbered(2, 3, start=50),
        "layers.0.w": numbered(1),
        "layers.1.w": numbered(1),
    }
    text = "{x*}.w -> {x*}.weight\nb.w: o i -> b.t: i o\nlayers.{l}.w: o -> all: l o"
    expected = {"a.weight": source["a.w"], "b.t": source["b.w"].T, "all": np.ones((2, 1), np.float32)}
    same(convert(text, source), expected)


def test_wild_cards_may_stand_for_families() -> None:
    source = {f"{tower}.{i}.w": numbered(2, start=100 * t + 10 * i) for t, tower in enumerate("ab") for i in range(3)}
    got = convert("{x*}.{l}.w: o -> stack.{x*}: l o", source)
    same(got, {f"stack.{x}": np.stack([source[f"{x}.{i}.w"] for i in range(3)]) for x in "ab"})


def test_a_wild_card_on_the_way_back_and_where_only_the_target_tells() -> None:
    text = "{x*}.w -> {x*}.weight"
    source = {"a.w": numbered(2), "b.w": numbered(3)}
    forward = convert(text, source)
    same(convert(str(inverse(text)), forward), source)
    target = {"c.bias": TensorSpec((2,)), "d.bias": TensorSpec((3,))}
    zeros = convert("_ -> {x*}.bias\n" + text, source, target | bind(text, specs(source)).target.specs)
    assert not zeros["c.bias"].any()
    assert zeros["d.bias"].shape == (3,)
    with pytest.raises(RelayoutError, match="follows only from the target's names; pass them"):
        bind("_ -> {x*}.bias", {})


def test_numbers_with_leading_zeros_are_names_of_their_own() -> None:
    source = many("layers.{}.w", 2) | {"layers.00.w": numbered(2, 3, start=70), "layers.007.w": numbered(1)}
    text = "layers.{l}.w: o i -> w: l o i\nlayers.00.w: o i -> x: o i\nlayers.007.w -> y"
    expected = {
        "w": np.stack([source["layers.0.w"], source["layers.1.w"]]),
        "x": source["layers.00.w"],
        "y": numbered(1),
    }
    same(convert(text, source), expected)
    bound = bind(text, specs(source))
    for name in ("layers.01.w", "layers.2.w", "layers.-1.w", "layers.1.ww", "xlayers.1.w"):
        assert name not in bound.source
    assert {"layers.0.w", "layers.00.w", "layers.1.w"} <= set(bound.source.specs)


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("layers.{l}.w: o i -> w: l o i", ["layers.0.w", "layers.2.w"], r"the first that is missing is layers\.1\.w"),
        ("layers.{l+1}.w: o i -> w: l o i", ["layers.2.w"], r"the first that is missing is layers\.1\.w"),
        ("layers.{l=3}.w: o i -> w: l o i", ["layers.0.w", "layers.1.w"], r"2 of 3 .*missing is layers\.2\.w"),
        ("e.{l}.{e}.w: o i -> w: l e o i", ["e.0.0.w", "e.0.1.w", "e.1.0.w"], r"missing is e\.1\.1\.w"),
        ("w: o i -> x: o i", ["v"], "there is no tensor w"),
        ("layers.{l}.w: o i -> w: l o i", ["v"], r"there is no tensor layers\.\{l\}\.w"),
        ("v -> x", ["v", "w", "u"], "no statement names the source tensor w and 1 more: say where it goes, or drop"),
        ("layers.{l=1}.w: o i -> w: l o i", ["layers.0.w", "layers.1.w"], r"names the source tensor layers\.1\.w"),
        ("v -> x\nv -> y", ["v"], "v stands twice, here and in `v -> x`: tie copies with `=`"),
        ("layers.{l}.w: o i -> w: l o i\nlayers.1.w -> x", ["layers.0.w", "layers.1.w"], r"layers\.1\.w stands twice"),
        ("v -> x\nw -> x", ["v", "w"], "x stands twice"),
        ("a{l}{m}.w: o i -> w: l m o i", ["a00.w"], "an index beside a digit or another index"),
        ("a1{l}.w: o i -> w: l o i", ["a10.w"], "an index beside a digit or another index"),
        ("{x*} -> {y*}", ["v"], r"\{y\*\} is not filled in|every tensor names the same wild cards|'y'"),
    ],
)
def test_what_is_wrong_with_names_is_said(text: str, names: list[str], message: str) -> None:
    with pytest.raises(RelayoutError, match=message):
        bind(text, {name: TensorSpec((2, 3)) for name in names})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            TensorSpec((2, 4)),
            r"0\.w is float32 \[2, 3\] but layers\.1\.w is float32 \[2, 4\]; .*split it by ranges",
        ),
        (TensorSpec((2, 3), "bfloat16"), r"but layers\.1\.w is bfloat16 \[2, 3\]"),
        (TensorSpec((6,)), r"but layers\.1\.w is float32 \[6\]"),
    ],
)
def test_the_members_of_a_family_are_alike(other: TensorSpec, message: str) -> None:
    with pytest.raises(RelayoutError, match=message):
        bind("layers.{l}.w: o i -> w: l o i", {"layers.0.w": TensorSpec((2, 3)), "layers.1.w": other})


def test_target_names_are_checked_like_source_names() -> None:
    source = specs(many("layers.{}.w", 2))
    text = "layers.{l}.w: o i -> w.{l}: o i"
    with pytest.raises(RelayoutError, match="no statement names the target tensor extra: say what it is made of"):
        bind(text, source, {"w.0": TensorSpec((2, 3)), "w.1": TensorSpec((2, 3)), "extra": TensorSpec((1,))})
    with pytest.raises(ValueError, match="3"):
        bind(text, source, {f"w.{i}": TensorSpec((2, 3)) for i in range(3)})


def test_names_that_are_not_needed_may_be_left() -> None:
    source = {"v": numbered(2), "w": numbered(3)}
    bound = bind("v -> x", specs(source), partial=True)
    assert bound.target.specs == {"x": TensorSpec((2,))}
    dropped = bind("v -> x\nw -> _", specs(source))
    assert dropped.dropped == (("w", 3),)
    assert "w" not in dropped.target
    with pytest.raises(RelayoutError, match="the mapping has no tensor y"):
        plan(bound, [], [Piece(0, "y", Region.full((2,)))])


def test_a_layout_for_every_tensor_and_no_other() -> None:
    tensors = bind("{x*} -> new.{x*}", specs({"a.norm": numbered(4), "b.norm": numbered(4), "w": numbered(4)})).source
    by_rule = shard("x=2", {"{x*}.norm": "...", "w": "o/x"}, tensors)
    assert {p.tensor: str(p.region) for p in by_rule.pieces(1)} == {"a.norm": "[0:4]", "b.norm": "[0:4]", "w": "[2:4]"}
    with pytest.raises(RelayoutError, match=r"there is no layout for w; to keep it whole .* give it '\.\.\.'"):
        shard("x=2", {"{x*}.norm": "..."}, tensors)
    with pytest.raises(RelayoutError, match="there is a layout for v, but no such tensor"):
        shard("x=2", {"{x*}": "...", "v": "..."}, tensors)
    with pytest.raises(RelayoutError, match="w: "):
        shard("x=2", {"{x*}.norm": "...", "w": "o/y"}, tensors)


@pytest.mark.parametrize(("index", "sizes"), [("{l=2}", {}), ("{l}", {"l": 2}), ("{(a b)}", {"a": 2, "b": 1})])
def test_a_range_leaves_the_other_numbers_to_the_wild_card(index: str, sizes: dict[str, int]) -> None:
    source = many("layers.{}.w", 4)
    bound = bind(f"layers.{index}.w: o i -> first.{index}.w: i o\n{{x*}} -> rest.{{x*}}", specs(source), sizes=sizes)
    assert set(bound.target.specs) == {"first.0.w", "first.1.w", "rest.layers.2.w", "rest.layers.3.w"}


def test_numbers_with_leading_zeros_are_text() -> None:
    source = {"h00.0.w": numbered(2, 3), "h00.1.w": numbered(2, 3, start=50), "h0.0.w": numbered(3)}
    bound = bind("h00.{l}.w: o i -> w: l i o\nh0.0.w -> v", specs(source))
    assert bound.target.specs == {"w": TensorSpec((2, 3, 2)), "v": TensorSpec((3,))}
    assert bound.source.lift("h00.1.w", Region.full((2, 3)))[1] == Region.parse("[1:2 0:2 0:3]")


@pytest.mark.parametrize("n", [1, 2])
def test_parts_look_alike_or_not_whatever_their_sizes(n: int) -> None:
    source = {"a": numbered(n, 2), "b": numbered(n, 2, start=50)}
    bound = bind("a: n h, b: m h -> c: (n + m) h", specs(source))
    assert bound.target.specs == {"c": TensorSpec((2 * n, 2))}
    with pytest.raises(RelayoutError, match="no counterpart"):
        bind("a: n h -> c: h", {"a": TensorSpec((1, 2))})
