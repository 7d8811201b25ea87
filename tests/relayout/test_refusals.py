"""What must be refused, each with one clear sentence that names the tensor, and before a byte moves."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tangram.layout import LayoutError, NotationError, Region
from tangram.relayout import CopyPlan, CoverageError, Piece, RelayoutError, TensorSpec, bind, execute, plan, shard
from tests.relayout.moving import numbered

SQUARE = TensorSpec((4, 1))


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        # parts that only their order would tell apart
        (
            "q: (g=2 d) h, k: (g d) h, v: (g d) h -> qkv: (g (1 + 1 + 1) d) h",
            {"q": (4, 1), "k": (4, 1), "v": (4, 1)},
            r"parts of q and k look the same .*; mark them by their tensors' names",
        ),
        ("qkv: (g=2 (1 + 1) d) h -> k: (g d) h, v: (g d) h", {"qkv": (8, 1)}, r"two parts of qkv look the same"),
        ("a: n m, b: n m -> c: n m, d: n m", {"a": (4, 1), "b": (4, 1)}, "parts of a and b look the same"),
        # parts without counterpart
        ("q: a h, k: b h -> qk: (q a) h", {"q": (4, 1), "k": (4, 1)}, r"no counterpart for \(b h\)"),
        ("q: a h -> qk: (q a + k b) h", {"q": (4, 1)}, "the size of b, k does not follow"),
        ("x: a b -> y: a", {"x": (4, 3)}, r"no counterpart for \(a b\); \(a\)"),
        # a diagonal
        ("x: a a -> y: a", {"x": (4, 4)}, "a diagonal is no bijection"),
        ("x: a b -> y: (a a) b", {"x": (4, 2)}, "a diagonal is no bijection"),
        # literals
        ("x: (a 2) -> y: a 2", {"x": (4,)}, "the literal 2 in a mapping says what nothing is"),
        # sizes
        ("x: (a b) -> y: b a", {"x": (4,)}, "the size of a, b does not follow from the shapes .*: give a="),
        ("x: (a=3 b) -> y: b a", {"x": (4,)}, "no size of b makes"),
        ("x: a b -> y: b a", {"x": (4,)}, r"x has shape \[4\], but the text gives it 2 dims"),
        ("x: a b -> y: b a", {"x": (4, 2, 3)}, r"x has shape \[4, 2, 3\], but the text gives it 2 dims"),
        ("x.{l}: a b -> y: l b a", {"x.0": (4,)}, r"x\.\{l\} has shape \[4\], but the text gives it 2 dims"),
        ("x: a -> y", {"x": (4,)}, "give dims to all tensors or to none; y has none"),
        ("x as a: a -> y: a", {"x": (4,)}, "both a tensor and one of its factors"),
        # codecs
        ("x -> y; gzip=1", {"x": (4, 1)}, "no codec 'gzip'; there are add, mul, cast, swap_nibbles, fill"),
        ("x -> y; add", {"x": (4, 1)}, "add takes a number, as in add=-1"),
        ("x -> y; cast=float32:int4", {"x": (4, 1)}, "cast knows no dtype 'int4'"),
        ("x -> y; cast=bfloat16", {"x": (4, 1)}, "cast names both dtypes"),
        ("x -> y; cast=float16:float32", {"x": (4, 1)}, "cast=float16:float32 meets a tensor of float32"),
        ("x -> y; swap_nibbles", {"x": (4, 1)}, "swap_nibbles is for 4-bit values packed in uint8, not float32"),
        ("x -> y; fill=lots", {"x": (4, 1)}, "fill takes a number"),
    ],
)
def test_mappings(text: str, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises((RelayoutError, LayoutError), match=message):
        bind(text, {name: TensorSpec(shape) for name, shape in shapes.items()})


def test_the_sentence_names_the_statement() -> None:
    with pytest.raises(RelayoutError, match=r"^b: n n -> d: n"):
        bind("a -> c\nb: n n -> d: n", {"a": SQUARE, "b": TensorSpec((2, 2))})


@pytest.mark.parametrize("text", ["x: a/tp -> y: a", "x: ... -> y: ...", "_ -> _", "x: a y: a", "x -> y; add=-1 ; mul"])
def test_what_is_no_mapping_at_all(text: str) -> None:
    with pytest.raises(NotationError, match=r"\n"):
        bind(text, {"x": SQUARE})


def test_dtypes_change_by_a_named_cast_only() -> None:
    with pytest.raises(RelayoutError, match="it gives float32, but the target has bfloat16: say cast=float32:"):
        bind("x -> y", {"x": SQUARE}, {"y": TensorSpec((4, 1), "bfloat16")})
    with pytest.raises(RelayoutError, match="it gives bfloat16, but the target has float32"):
        bind("x -> y; cast=float32:bfloat16", {"x": SQUARE}, {"y": SQUARE})
    with pytest.raises(RelayoutError, match="the sources have different dtypes: bfloat16, float32"):
        bind("a: f h, b: f h -> w: (a + b) f h", {"a": TensorSpec((2, 2)), "b": TensorSpec((2, 2), "bfloat16")})
    with pytest.raises(RelayoutError, match="add is for floating-point tensors, not int64"):
        bind("x -> y; add=1", {"x": TensorSpec((4,), "int64")})


def test_no_half_fill_and_no_forgotten_transpose() -> None:
    with pytest.raises(LayoutError, match=r"4.*6|6.*4"):
        bind("x: n h -> y: n h", {"x": TensorSpec((4, 2))}, {"y": TensorSpec((6, 2))})
    with pytest.raises(LayoutError, match=r"2.*4|4.*2"):
        bind("x -> y", {"x": TensorSpec((2, 4))}, {"y": TensorSpec((4, 2))})
    with pytest.raises((LayoutError, RelayoutError), match="dims"):
        bind("x -> y", {"x": TensorSpec((2, 4))}, {"y": TensorSpec((8,))})


# ---------------------------------------------------------------- pieces


def square(rows: int = 6) -> Any:
    return bind("x: n h -> y: h n", {"x": TensorSpec((rows, 4))})


def test_a_hole_names_tensor_and_region() -> None:
    held = [Piece("a", "x", Region.parse("[0:2 0:4]")), Piece("b", "x", Region.parse("[3:6 0:4] + [2:3 0:1]"))]
    with pytest.raises(CoverageError, match=r"y at 'here': no source holds \[2:3 2:4\] of x") as error:
        plan(square(), held, [Piece("here", "y", Region.parse("[2:4 1:6]"))])
    assert error.value.tensor == "x"
    assert error.value.region == Region.parse("[2:3 2:4]")


def test_a_hole_in_a_family_names_the_real_tensor() -> None:
    names = {f"layers.{i + 2}.w": TensorSpec((3,)) for i in range(3)}
    bound = bind("layers.{l+2}.w: o -> w: l o", names)
    held = [Piece(0, name, Region.full((3,))) for name in names if "3" not in name]
    held.append(Piece(0, "layers.3.w", Region.parse("[0:1]")))
    with pytest.raises(CoverageError, match=r"no source holds \[1:3\] of layers\.3\.w") as error:
        plan(bound, held, [Piece(0, "w", Region.full((3, 3)))])
    assert (error.value.tensor, error.value.region) == ("layers.3.w", Region.parse("[1:3]"))


def test_nothing_at_all_is_held() -> None:
    with pytest.raises(CoverageError, match=r"no source holds \[0:6 0:4\] of x"):
        plan(square(), [], [Piece(0, "y", Region.full((4, 6)))])


def test_tied_copies_that_are_to_be_compared_must_be_there() -> None:
    bound = bind("a = b -> c", {"a": SQUARE, "b": SQUARE})
    held, want = [Piece(0, "a", Region.full((4, 1)))], [Piece(0, "c", Region.full((4, 1)))]
    with pytest.raises(CoverageError, match="of b"):
        plan(bound, held, want)
    assert plan(bound, held, want, check_tied=False).size == 4


def test_wanted_twice_and_pieces_twice_and_outside() -> None:
    whole = Piece(0, "x", Region.full((6, 4)))
    want = Piece(0, "y", Region.full((4, 6)))
    with pytest.raises(RelayoutError, match="y is wanted twice at 0"):
        plan(square(), [whole], [want, want])
    with pytest.raises(RelayoutError, match="two pieces of x have the same place 0"):
        plan(square(), [whole, whole], [want])
    with pytest.raises(RelayoutError, match=r"y has shape \[4, 6\]; the region \[0:6 0:4\] is outside it"):
        plan(square(), [whole], [Piece(0, "y", Region.full((6, 4)))])
    with pytest.raises(RelayoutError, match=r"x has shape \[6, 4\]; the region .* is outside it"):
        plan(square(), [Piece(0, "x", Region.full((4, 6)))], [want])
    with pytest.raises(RelayoutError, match="the mapping has no tensor z"):
        plan(square(), [Piece(0, "z", Region.full((4, 6)))], [want])


def test_a_rank_that_holds_nothing_because_of_at() -> None:
    """`@` that no rank satisfies is refused when the layout is made, so no element is without a holder."""
    with pytest.raises(RelayoutError, match=r"x: .*@pp=2 does not name ranks of mesh pp=2"):
        shard("pp=2", {"x": "... @pp=2"}, square().source)


# ---------------------------------------------------------------- buffers

Spoil = Callable[[np.ndarray, np.ndarray], tuple[dict[Any, Any], dict[Any, Any]]]


def transposing() -> CopyPlan:
    return plan(square(), [Piece(0, "x", Region.full((6, 4)))], [Piece(0, "y", Region.full((4, 6)))])


class Local:
    """As a DTensor looks from outside."""

    def to_local(self) -> None: ...


def readonly(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a.setflags(write=False)
    return a


BAD = {
    "a missing source": (None, "y", r"there is no buffer for x at 0"),
    "a missing target": ("x", None, r"there is no buffer for y at 0"),
    "a shape": (lambda x: x.T, "y", r"x at 0 has shape \[4, 6\], but its piece holds \[6, 4\]"),
    "a size": (lambda x: x.ravel()[:20], "y", r"x at 0 has shape \[20\], but its piece holds \[6, 4\]"),
    "more dims": (lambda x: x[None], "y", r"x at 0 has shape \[1, 6, 4\]"),
    "a dtype": (lambda x: x.astype("f8"), "y", "x at 0 has dtype torch.float64, but the mapping says float32"),
    "a target's dtype": ("x", lambda y: torch.zeros(4, 6, dtype=torch.bfloat16), "y at 0 has dtype torch.bfloat16"),
    "a target's shape": ("x", lambda y: np.zeros((4, 7), "f4"), r"y at 0 has shape \[4, 7\]"),
    "a read-only target": ("x", readonly, "y at 0 is read-only"),
    "an expanded target": ("x", lambda y: torch.zeros(4, 1).expand(4, 6), "y at 0 is a view in which elements share"),
    "an overlapping target": ("x", lambda y: torch.zeros(20).as_strided((4, 6), (2, 1)), "y at 0 is a view in which"),
    "a broadcast array": ("x", lambda y: np.broadcast_to(np.zeros(6, "f4"), (4, 6)), "y at 0 is read-only"),
    "a meta tensor": ("x", lambda y: torch.zeros(4, 6, device="meta"), "y at 0 is on the meta device"),
    "a meta source": (lambda x: torch.zeros(6, 4, device="meta"), "y", "x at 0 is on the meta device"),
    "a DTensor": (lambda x: Local(), "y", "x at 0 is a DTensor; pass its local tensor"),
    "a list": (lambda x: x.tolist(), "y", "x at 0 is a list, not a torch tensor or a numpy array"),
    "objects": (lambda x: x.astype(object), "y", "x at 0: "),
    "nothing": (lambda x: None, "y", "x at 0 is a NoneType"),
}


@pytest.mark.parametrize("what", BAD)
def test_buffers(what: str) -> None:
    have, want, message = BAD[what]
    x, y = numbered(6, 4), np.full((4, 6), 77, np.float32)
    source = {} if have is None else {(0, "x"): have(x) if callable(have) else x}
    target = {} if want is None else {(0, "y"): want(y) if callable(want) else y}
    with pytest.raises(RelayoutError, match=message):
        execute(transposing(), source, target)
    assert (y == 77).all()


def test_a_numpy_scalar_cannot_be_written() -> None:
    bound = bind("a -> b", {"a": TensorSpec(())})
    copies = plan(bound, [Piece(0, "a", Region.full(()))], [Piece(0, "b", Region.full(()))])
    with pytest.raises(RelayoutError, match="b at 0 is a numpy scalar, which cannot be written"):
        execute(copies, {(0, "a"): np.float32(3)}, {(0, "b"): np.float32(0)})
    out = np.zeros((), np.float32)
    execute(copies, {(0, "a"): np.float32(3)}, {(0, "b"): out})
    assert out == 3


def test_source_and_target_share_memory() -> None:
    x = numbered(6, 4)
    for y in (x.reshape(4, 6), x.T, torch.from_numpy(x).view(4, 6)):
        with pytest.raises(RelayoutError, match=r"(x|y) at 0 and (x|y) at 0 share memory"):
            execute(transposing(), {(0, "x"): x}, {(0, "y"): y})
    pool = np.zeros(40, np.float32)
    with pytest.raises(RelayoutError, match="share memory: copy one of them first"):
        execute(transposing(), {(0, "x"): pool[:24]}, {(0, "y"): pool[16:]})
    np.testing.assert_array_equal(x, numbered(6, 4))


def test_two_targets_share_memory() -> None:
    bound = bind("a -> c\nb -> d", {"a": SQUARE, "b": SQUARE})
    whole = Region.full((4, 1))
    copies = plan(bound, [Piece(0, n, whole) for n in "ab"], [Piece(0, n, whole) for n in "cd"])
    have, pool = {(0, "a"): numbered(4, 1), (0, "b"): numbered(4, 1)}, np.zeros((7, 1), np.float32)
    with pytest.raises(RelayoutError, match=r"[cd] at 0 share memory"):
        execute(copies, have, {(0, "c"): pool[:4], (0, "d"): pool[3:]})
    assert not pool.any()
    both = np.zeros((8, 1), np.float32)
    execute(copies, have, {(0, "c"): both[:4], (0, "d"): both[4:]})
    np.testing.assert_array_equal(both.ravel(), [1, 2, 3, 4, 1, 2, 3, 4])


def test_tied_targets_may_share_memory_with_each_other_only() -> None:
    bound = bind("a -> c = d\nb -> e", {"a": SQUARE, "b": SQUARE})
    whole = Region.full((4, 1))
    copies = plan(bound, [Piece(0, n, whole) for n in "ab"], [Piece(0, n, whole) for n in "cde"])
    have, one = {(0, "a"): numbered(4, 1), (0, "b"): numbered(4, 1)}, np.zeros((4, 1), np.float32)
    execute(copies, have, {(0, "c"): one, (0, "d"): one, (0, "e"): np.zeros((4, 1), np.float32)})
    np.testing.assert_array_equal(one, numbered(4, 1))
    with pytest.raises(RelayoutError, match="share memory"):
        execute(copies, have, {(0, "c"): one, (0, "d"): np.zeros((4, 1), np.float32), (0, "e"): one})


def test_tied_copies_that_differ() -> None:
    bound = bind("a: n h = b: h n -> c: n h", {"a": TensorSpec((3, 2)), "b": TensorSpec((2, 3))})
    copies = plan(
        bound,
        [Piece("p", "a", Region.full((3, 2))), Piece("q", "b", Region.full((2, 3)))],
        [Piece(0, "c", Region.full((3, 2)))],
    )
    a, out = numbered(3, 2), np.full((3, 2), 77, np.float32)
    a[0, 0] = np.nan
    execute(copies, {("p", "a"): a, ("q", "b"): a.T}, {(0, "c"): out})
    np.testing.assert_array_equal(out, a)
    for place, value in (((2, 0), 50), ((0, 1), np.nan)):
        b, out = a.T.copy(), np.full((3, 2), 77, np.float32)
        b[place[::-1]] = value
        with pytest.raises(
            RelayoutError, match="a at 'p' and b at 'q' are tied, but 1 of the 6 elements compared differ"
        ):
            execute(copies, {("p", "a"): a, ("q", "b"): b}, {(0, "c"): out})
        assert (out == 77).all()
    minus = numbered(3, 2) * 0
    with pytest.raises(RelayoutError, match="6 of the 6"):
        execute(copies, {("p", "a"): minus, ("q", "b"): (-minus).T}, {(0, "c"): out})


def test_a_pending_reduction_is_not_copied_as_if_it_were_done() -> None:
    bound = bind("a -> b", {"a": TensorSpec((4,))})
    with pytest.raises(RelayoutError, match="before the sum over tp is done"):
        shard("tp=2", {"a": "h sum:tp"}, bound.source)


def test_a_fill_that_the_dtype_does_not_have() -> None:
    with pytest.raises(RelayoutError, match=r"fill=0.5 is no value of a tensor of int64"):
        bind("a: h -> b: (h + _=2); fill=0.5", {"a": TensorSpec((4,), "int64")})


def test_a_family_and_one_of_its_members_are_not_wanted_together() -> None:
    bound = bind("a.{l}.w: h -> b.{l}.w: h", {f"a.{i}.w": TensorSpec((4,)) for i in range(2)})
    source = [Piece(0, f"a.{i}.w", Region.full((4,))) for i in range(2)]
    whole, member = Piece(0, "b.{l}.w", Region.full((2, 4))), Piece(0, "b.1.w", Region.full((4,)))
    for wanted in ([whole, member], [member, whole], [member, member]):
        with pytest.raises(RelayoutError, match="wanted twice"):
            plan(bound, source, wanted)
    assert plan(bound, source, [member, Piece(0, "b.0.w", Region.full((4,)))]).size == 8
