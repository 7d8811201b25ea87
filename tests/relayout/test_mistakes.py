"""Mistakes in what is passed to relayout: refused in a sentence before a byte moves, whatever it would have done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tangram.layout import Layout, LayoutError, Mesh, Region
from tangram.relayout import BoundMapping, Piece, RelayoutError, TensorSpec, bind, execute, plan, shard
from tangram.relayout.mapping.states import ADAMW, COLUMN, ROW, StateSpec, state_layout, with_states
from tests.counting import lines_run

THREE = TensorSpec((3,))


def specs(*names: str, shape: tuple[int, ...] = (3,)) -> dict[str, TensorSpec]:
    return dict.fromkeys(names, TensorSpec(shape))


# ---------------------------------------------------------------- binding


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a.{l}: o -> b.{l}: o\nc: o -> b.0: o", ("a.0", "a.1", "c")),
        ("c: o -> b.0: o\na.{l}: o -> b.{l}: o", ("a.0", "a.1", "c")),
        ("a.{l=3}: o -> b.{l}: o\nc.{m}: o -> b.{m+2}: o", ("a.0", "a.1", "a.2", "c.0")),
    ],
)
def test_made_names_stand_once(text: str, names: tuple[str, ...]) -> None:
    with pytest.raises(RelayoutError, match=r"b\.[02] stands twice, here and in"):
        bind(text, specs(*names))


def test_a_tensor_beside_its_whole_family_stands_once() -> None:
    with pytest.raises(RelayoutError, match=r"a\.1 stands twice"):
        bind("a.{l}: o -> b.{l}: o\na.1: o -> c: o", {"a.{l}": TensorSpec((2, 3)), "a.1": THREE})


@pytest.mark.parametrize("option", ["fil=1", "mul=3", "fill=1 add=2", "cast=float32:bfloat16"])
def test_what_is_created_or_dropped_has_no_arithmetic(option: str) -> None:
    for text in ("w -> v\n_ -> b: h", "w -> v\nb: h -> _"):
        given = specs("w", "b") if text.endswith("_") else specs("w")
        with pytest.raises(RelayoutError, match=r"there is nothing to work on; .*fill="):
            bind(f"{text}; {option}", given, h=3)


def test_one_fill() -> None:
    with pytest.raises(RelayoutError, match="fill is given twice"):
        bind("_ -> b: h=3; fill=1 fill=2", {})


def test_specs_are_read_as_written() -> None:
    shape: Any = [np.int64(8), 2]
    dtype: Any = torch.bfloat16
    assert TensorSpec(shape, dtype) == TensorSpec((8, 2), "bfloat16")
    for bad in (8, (8.0, 2), ("8",)):
        with pytest.raises(RelayoutError, match="a shape is a tuple of whole numbers"):
            TensorSpec(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2.0, "2", None])
def test_sizes_are_whole_numbers(size: Any) -> None:
    with pytest.raises(LayoutError, match="a size is a whole number"):
        bind("a: (g d) -> b: (d g)", specs("a", shape=(8,)), g=size)


def test_thousands_of_statements_and_wild_families_cost_no_square() -> None:
    def work(n: int, tag: str) -> None:
        bind("\n".join(f"{tag}{i}x -> b{i}x" for i in range(10 * n)), specs(*[f"{tag}{i}x" for i in range(10 * n)]))
        bind("{x*}.e.{e}.w -> y.{x*}.e.{e}.w", specs(*[f"b.{i}.e.{e}.w" for i in range(n) for e in range(20)]))

    work(400, "a")
    assert lines_run(lambda: work(40, "c")) < 6 * lines_run(lambda: work(10, "d"))  # a square would be 16 times


# ---------------------------------------------------------------- pieces and buffers


def rename() -> BoundMapping:
    return bind("w -> v", specs("w"))


def layers() -> BoundMapping:
    return bind("w.{l} -> v.{l}", specs("w.0", "w.1", shape=(4, 2)))


def tied() -> BoundMapping:
    return bind("a.{l}: h -> b.{l}: h = c.{l}: h", specs("a.0", "a.1"))


def test_a_piece_below_zero_is_outside() -> None:
    below = Region.of([(((-2, 3),),)])
    with pytest.raises(RelayoutError, match=r"w has shape \[3\]; the region \[-2:3\] is outside it"):
        plan(rename(), [Piece(0, "w", below)], [Piece(0, "v", Region.full((3,)))])


def test_one_buffer_is_one_piece() -> None:
    family = Piece(0, "w.{l}", Region.parse("[0:2 0:2 0:2]"))
    member = Piece(0, "w.0", Region.parse("[2:4 0:2]"))
    wanted = [Piece(0, "v.0", Region.full((4, 2)))]
    for pieces in ([family, member], [member, family]):
        with pytest.raises(RelayoutError, match=r"two pieces of w\.(0|\{l\}) have the same place 0"):
            plan(layers(), pieces, wanted)
    other = Piece(1, "w.0", Region.parse("[2:4 0:2]"))
    assert plan(layers(), [family, other], wanted).size == 8


def run(wanted: list[Piece], out: dict[tuple[Any, str], torch.Tensor]) -> None:
    have = {(0, "a.0"): torch.ones(3), (0, "a.1"): torch.ones(3) * 2}
    execute(plan(tied(), [Piece(0, "a.{l}", Region.full((2, 3)))], wanted), have, out)


def test_only_the_same_elements_of_a_tie_share_memory() -> None:
    one, row, both = torch.zeros(3), Region.full((3,)), Region.full((2, 3))
    with pytest.raises(RelayoutError, match="share memory"):
        run([Piece(0, "b.{l}", both)], {(0, "b.0"): one, (0, "b.1"): one})
    with pytest.raises(RelayoutError, match="share memory"):
        run([Piece(0, "b.0", row), Piece(0, "c.1", row)], {(0, "b.0"): one, (0, "c.1"): one})
    halves = [Piece(0, "b.0", Region.box([0], [2])), Piece(1, "c.0", Region.box([1], [2]))]
    with pytest.raises(RelayoutError, match="share memory"):
        run(halves, {(0, "b.0"): one[:2], (1, "c.0"): one[:2]})
    assert not one.any()
    run([Piece(0, "b.1", row), Piece(0, "c.1", row)], {(0, "b.1"): one, (0, "c.1"): one})
    assert (one == 2).all()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("uint8", 300), ("uint8", -1), ("int8", 200), ("float16", 1e6), ("float8_e4m3fn", "inf")],
)
def test_a_fill_that_does_not_fit_is_refused_before_a_byte_moves(dtype: str, value: object) -> None:
    bound = bind(f"w -> v\n_ -> b: h; fill={value}", specs("w"), {"v": THREE, "b": TensorSpec((2,), dtype)})
    out = {(0, "v"): torch.zeros(3), (0, "b"): torch.zeros(2, dtype=getattr(torch, dtype))}
    wanted = [Piece(0, "v", Region.full((3,))), Piece(0, "b", Region.full((2,)))]
    with pytest.raises(RelayoutError, match=rf"b at 0: fill=.* is no value of {dtype}"):
        execute(plan(bound, [Piece(0, "w", Region.full((3,)))], wanted), {(0, "w"): torch.ones(3)}, out)
    assert not out[0, "v"].any()


def test_a_fill_beyond_what_its_text_can_say() -> None:
    with pytest.raises(RelayoutError, match="is no value of a tensor of int64"):
        bind("_ -> b: h; fill=9007199254740993", {}, {"b": TensorSpec((2,), "int64")})


def test_sparse_tensors_are_refused() -> None:
    copies = plan(rename(), [Piece(0, "w", Region.full((3,)))], [Piece(0, "v", Region.full((3,)))])
    with pytest.raises(RelayoutError, match="w at 0 is a sparse_coo tensor"):
        execute(copies, {(0, "w"): torch.ones(3).to_sparse()}, {(0, "v"): torch.zeros(3)})


def test_a_sharding_of_another_side_is_refused() -> None:
    turned = bind("w: o i -> w: i o\nx: o i -> z: o i", specs("w", "x", shape=(4, 6)))
    target = shard("tp=2", {"w": "i/tp o", "z": "o i"}, turned.target)
    with pytest.raises(RelayoutError, match=r"w has shape \[4, 6\], but in the sharding \[6, 4\]; make it"):
        plan(turned, target, target.pieces(0))
    square = bind("x: o i -> z: i o", specs("x", shape=(4, 4)))
    other = shard("tp=2", {"z": "i/tp o"}, square.target)
    for ask in (lambda: plan(square, other, other.pieces(0)), lambda: other.piece("x", 0)):
        with pytest.raises(RelayoutError, match="the sharding has no tensor x"):
            ask()


# ---------------------------------------------------------------- states


def test_a_step_stays_with_a_parameter_that_keeps_its_name() -> None:
    given = specs("w", "w.exp_avg", shape=(4, 6)) | {"w.step": TensorSpec(())}
    text = with_states("w: o i -> w: i o", given, ADAMW)
    assert str(text).splitlines()[-1] == "w.step -> w.step"
    assert bind(text, given).target.specs["w.step"] == TensorSpec(())


def test_steps_follow_members_that_change_places() -> None:
    names = [f"w.{i}" for i in range(4)]
    given = specs(*names) | {f"{n}.step": TensorSpec(()) for n in names}
    text = with_states("w.{(a b)}: o -> w.{(b a)}: o", given, ADAMW, a=2)
    steps = {line for line in str(text).splitlines() if "step" in line}
    assert steps == {f"w.{i}.step -> w.{j}.step" for i, j in enumerate([0, 2, 1, 3])}


def test_a_step_that_is_missing_is_not_made_up() -> None:
    given = specs("e.0", "e.1") | {"e.0.step": TensorSpec(())}
    with pytest.raises(RelayoutError, match=r"the state step does not follow: no source of w\.1 has it"):
        with_states("e.{(a b)}: o -> w.{(b a)}: o", given, ADAMW, a=1)


def test_two_states_that_could_be_meant() -> None:
    table = {"rmax": ROW, "rmin": ROW, "cmax": COLUMN, "cmin": COLUMN}
    with pytest.raises(RelayoutError, match="rmin does not follow: cmax and cmin of the target both reduce over"):
        with_states("a: o i -> b: i o", specs("a", shape=(4, 6)) | specs("a.rmin", shape=(4,)), table)
    assert "b.rmin" in str(with_states("a: o i -> b: o i", specs("a", shape=(4, 6)) | specs("a.rmin"), table))


@pytest.mark.parametrize("name", ["opt.{state}", "{param}", "{param}.{param}.{state}"])
def test_names_of_states(name: str) -> None:
    with pytest.raises(RelayoutError, match=r"has \{param\} and \{state\} once"):
        with_states("a -> b", specs("a"), ADAMW, name=name)


@pytest.mark.parametrize(
    ("layout", "shape", "spec"),
    [
        ("o (a/tp + b/tp)", (3, 4), StateSpec("blocks", block=4)),  # a block is half on either rank
        ("i/dp/tp", (56,), StateSpec("blocks", block=2)),  # 12 rows each, but 8 on the last, cut into 3, 3, 2
    ],
)
def test_cuts_through_blocks_are_seen(layout: str, shape: tuple[int, ...], spec: StateSpec) -> None:
    with pytest.raises(RelayoutError, match="goes through blocks"):
        state_layout(Layout.parse(layout).bind(shape, a=2), Mesh.parse("dp=5 tp=3"), spec)


def test_a_reduction_over_a_dim_that_is_not_there() -> None:
    with pytest.raises(RelayoutError, match="has no dim -2 to reduce"):
        state_layout(Layout.parse("i/dp").bind((56,)), Mesh.parse("dp=2"), COLUMN)
