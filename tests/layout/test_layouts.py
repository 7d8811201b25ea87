"""Layouts against numpy: every case that the notation was made for, and what must be refused."""

from collections.abc import Callable

import numpy as np
import pytest

from tangram.layout import Layout, LayoutError, Mesh, Region, region, validate
from tests.layout.oracle import chunk, flat_elements, zigzag

Array = np.ndarray
Expect = Callable[..., Array]


def holds(text: str, shape: tuple[int, ...], mesh_text: str, expect: Expect, **known: int | tuple[int, ...]) -> None:
    """Every rank holds, in the order of its buffer, the elements that `expect(x, **coordinates)` cuts out of `x`."""
    mesh = Mesh.parse(mesh_text)
    layout = Layout.parse(text).bind(shape, **known)
    assert Layout.parse(str(layout)).bind(shape) == layout
    x = np.arange(int(np.prod(shape))).reshape(shape)
    for rank in range(mesh.size):
        want = expect(x, **mesh.coords(rank)).ravel()
        np.testing.assert_array_equal(flat_elements(region(layout, mesh, rank), shape), np.sort(want), f"rank {rank}")
        np.testing.assert_array_equal(want, np.sort(want), "the expectation itself is in the order of the buffer")


@pytest.mark.parametrize("n", [0, 1, 3, 7, 9, 16])
def test_fsdp_inside_and_outside_tp(n: int) -> None:
    mesh = "dp=3 tp=2"
    holds("out/tp/dp in", (n, 2), mesh, lambda x, dp, tp: chunk(chunk(x, 2, tp), 3, dp))
    holds("out/dp/tp in", (n, 2), mesh, lambda x, dp, tp: chunk(chunk(x, 3, dp), 2, tp))
    holds("out in/tp/dp", (2, n), mesh, lambda x, dp, tp: chunk(chunk(x, 2, tp, 1), 3, dp, 1))


@pytest.mark.parametrize(("heads", "f"), [(5, 7), (4, 8), (1, 1), (2, 3)])
def test_a_cut_bracket_is_a_cut_of_the_local_block(heads: int, f: int) -> None:
    mesh, d = "dp=4 tp=2", 3
    holds(
        "(heads/tp d)/dp h",
        (heads * d, 2),
        mesh,
        lambda x, dp, tp: chunk(chunk(x.reshape(heads, d, 2), 2, tp).reshape(-1, 2), 4, dp),
        d=d,
    )
    holds(
        "(2 f/tp)/dp h",
        (2 * f, 2),
        mesh,
        lambda x, dp, tp: chunk(chunk(x.reshape(2, f, 2), 2, tp, 1).reshape(-1, 2), 4, dp),
    )
    holds(
        "(2 f/tp/dp) h",
        (2 * f, 2),
        mesh,
        lambda x, dp, tp: chunk(chunk(x.reshape(2, f, 2), 2, tp, 1), 4, dp, 1).reshape(-1, 2),
    )


def test_the_same_words_in_another_place_are_another_layout() -> None:
    """Pitfalls 1 and 2 of the notation: 15 rows, and gate/up where everything divides."""
    mesh = Mesh.parse("dp=2 tp=2")

    def rows(text: str, n: int, **known: int) -> list[int]:
        layout = Layout.parse(text).bind((n,), **known)
        return [region(layout, mesh, r).size for r in range(4)]

    assert rows("(heads/tp d)", 15, d=3) == [9, 6, 9, 6]
    assert rows("o/tp", 15) == [8, 7, 8, 7]
    assert rows("(heads/tp d)/dp", 15, d=3) == [5, 3, 4, 3]
    assert rows("(heads/tp/dp d)", 15, d=3) == [6, 3, 3, 3]
    assert str(region(Layout.parse("(2 f/tp)/dp").bind((16,)), mesh, 0)) == "[0:4]"
    assert str(region(Layout.parse("(2 f/tp/dp)").bind((16,)), mesh, 0)) == "[0:2,8:10]"


def test_fused_qkv() -> None:
    def want(x: Array, dp: int, tp: int) -> Array:
        return chunk(chunk(x.reshape(4, 4, 5, 6), 2, tp).reshape(-1, 6), 3, dp, 1)

    holds("(g/tp (r + 1 + 1) d) h/dp", (4 * 4 * 5, 6), "dp=3 tp=2", want, g=4, d=5)


def test_kv_heads_fewer_than_tp() -> None:
    def want(x: Array, dp: int, tp: int, kv: int, rep: int) -> Array:
        x = x.reshape(2, 6, 4, 3)[kv]
        return np.concatenate([x[2 * rep : 2 * rep + 2], x[4:]])

    holds("(g/kv (r/rep + 1 + 1) d) h", (48, 3), "dp=2 tp=4 | dp=2 kv=2 rep=2", want, g=2, d=4)


def test_hsdp_size_one_axes_pending_and_places() -> None:
    holds("out/shard in", (5, 2), "rep=2 shard=3", lambda x, rep, shard: chunk(x, 3, shard))
    holds("out/one/tp in/two", (5, 3), "one=1 tp=2 two=1", lambda x, one, tp, two: chunk(x, 2, tp))
    holds("b/dp h sum:tp max:cp", (4, 2), "dp=2 tp=2 cp=2", lambda x, dp, tp, cp: chunk(x, 2, dp))
    holds("v/tp h @pp=0,3", (5, 2), "pp=4 tp=2", lambda x, pp, tp: chunk(x, 2, tp) if pp in (0, 3) else x[:0])
    holds("v @pp=3 @tp=1", (5,), "pp=4 tp=2", lambda x, pp, tp: x if (pp, tp) == (3, 1) else x[:0])


def test_experts_beside_dense_layers() -> None:
    mesh = "dp=4 tp=2 | edp=2 ep=2 etp=2"
    holds("o/tp i/dp", (5, 6), mesh, lambda x, dp, tp, **_: chunk(chunk(x, 2, tp), 4, dp, 1))

    def want(x: Array, ep: int, etp: int, edp: int, **_: int) -> Array:
        return chunk(chunk(chunk(x.reshape(3, 4, 2, 5), 2, ep), 2, edp, 1), 2, etp, 3)

    holds("e/ep h/edp (2 f/etp)", (3, 4, 10), mesh, want)


def test_stages_interleaved_and_uneven() -> None:
    holds("(c p/pp k) o", (8, 2), "pp=2", lambda x, pp: x.reshape(2, 2, 2, 2)[:, pp], p=2, c=2)
    holds("l/pp:[3 5] o", (8, 2), "pp=2", lambda x, pp: np.split(x, [3])[pp])
    holds("l/pp:[3 0 5] o", (8, 2), "pp=3", lambda x, pp: np.split(x, [3, 3])[pp])


def test_zigzag_documents_cyclic_ragged() -> None:
    for n in (16, 13, 3, 0):
        holds("s/cp:zigzag h", (n, 2), "cp=2", lambda x, cp: zigzag(x, 2, cp))
    docs = (5, 8, 0, 3)

    def packed(x: Array, dp: int, cp: int) -> Array:
        return np.concatenate([zigzag(y.T, 2, cp).T for y in np.split(chunk(x, 2, dp), np.cumsum(docs)[:-1], 1)], 1)

    holds("b/dp s/cp:zigzag[docs]", (4, 16), "dp=2 cp=2", packed, docs=docs)
    holds("s/cp:cyclic[3]", (14,), "cp=2", lambda x, cp: x[np.arange(14) // 3 % 2 == cp])
    holds("s/cp:cyclic", (14,), "cp=2", lambda x, cp: x[cp::2])
    holds("(n c/cp 2)", (12,), "cp=2", lambda x, cp: x.reshape(3, 2, 2)[:, cp], c=2)
    holds("e/ep:[counts] f", (8, 2), "ep=3", lambda x, ep: np.split(x, [5, 5])[ep], counts=(5, 0, 3))
    holds("e/ep:[3 3 2] f", (8, 2), "ep=3", lambda x, ep: np.split(x, [3, 6])[ep])


def test_terms_of_a_sum() -> None:
    def mamba(y: Array, tp: int) -> Array:
        return np.concatenate([chunk(y[:4], 2, tp), chunk(y[4:10], 2, tp), y[10:16], chunk(y[16:], 2, tp)])

    holds("(z/tp + x/tp + B + C + dt/tp) h", (18, 2), "tp=2", mamba, z=4, x=6, B=3, C=3)
    holds("(lo/cp + hi) h", (8, 2), "cp=2", lambda x, cp: np.concatenate([x[2 * cp : 2 * cp + 2], x[4:]]), lo=4)

    def both(x: Array, dp: int, tp: int) -> Array:
        return chunk(np.concatenate([chunk(x[:5], 2, tp), x[5:]]), 2, dp)

    holds("(z/tp + x)/dp", (8,), "dp=2 tp=2", both, z=5)


def test_flat_zero_and_four_bit_blocks() -> None:
    holds("out/tp in //dp", (5, 7), "dp=3 tp=2", lambda x, dp, tp: chunk(chunk(x, 2, tp).ravel(), 3, dp))
    holds("a b c //dp//tp", (3, 2, 5), "dp=3 tp=2", lambda x, dp, tp: chunk(chunk(x.ravel(), 3, dp), 2, tp))
    holds(
        "o/dp (b/tp j)",
        (5, 48),
        "dp=2 tp=2",
        lambda x, dp, tp: chunk(chunk(x.reshape(5, 3, 16), 2, dp), 2, tp, 1),
        j=16,
    )


def test_a_flat_cut_of_a_family_cuts_each_tensor() -> None:
    mesh, layout = Mesh.parse("pp=2 dp=3"), Layout.parse("l/pp o i //dp").bind((4, 5, 2))
    x = np.arange(40).reshape(4, 5, 2)
    for rank in range(mesh.size):
        at = mesh.coords(rank)
        want = np.concatenate([chunk(t.ravel(), 3, at["dp"]) for t in chunk(x, 2, at["pp"])])
        assert flat_elements(region(layout, mesh, rank, family_dims=1), (4, 5, 2)) == want.tolist()


def test_scalars_and_zero_sizes() -> None:
    holds("", (), "dp=2", lambda x, dp: x)
    holds("@dp=1", (), "dp=2", lambda x, dp: x if dp == 1 else x.ravel()[:0])
    holds("a/dp b", (0, 4), "dp=2", lambda x, dp: chunk(x, 2, dp))
    holds("a b/dp", (0, 4), "dp=2", lambda x, dp: chunk(x, 2, dp, 1))
    holds("... h/dp", (5,), "dp=2", lambda x, dp: chunk(x, 2, dp))
    holds("... h/dp", (2, 3, 5), "dp=2", lambda x, dp: chunk(x, 2, dp, 2))
    mesh = Mesh.parse("dp=2")
    assert region(Layout.parse("").bind(()), mesh, 1) == Region.full(())
    assert region(Layout.parse("a/dp").bind((1,)), mesh, 1) == Region()


# ---------------------------------------------------------------- refusals

TWO_VIEWS = "dp=2 tp=4 one=1 | dp=2 kv=2 rep=2"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a/tp b/tp", "axis tp cuts twice"),
        ("(a/tp b)/tp c", "axis tp cuts twice"),
        ("a/tp/tp b", "axis tp cuts twice"),
        ("(a/tp + b)/tp", "axis tp cuts twice"),
        ("a/one b/one", "axis one cuts twice"),
        ("a/tp b //tp", "axis tp cuts twice"),
        ("a b //tp //tp", "axis tp cuts twice"),
        ("a/tp b sum:tp", "axis tp cuts twice"),
        ("a b sum:tp max:tp", "axis tp cuts twice"),
        ("a/tp b @tp=0", "axis tp cuts twice"),
        ("a/tp b/kv", "axes tp and kv are not independent"),
        ("(a/tp b/kv)", "axes tp and kv are not independent"),
        ("(a/tp b)/rep", "axes tp and rep are not independent"),
        ("(a/tp + b/kv)/dp", "axes kv and tp are not independent"),
        ("(a/tp + b/kv) //dp", "axes kv and tp are not independent"),
        ("a/tp b //rep", "axes tp and rep are not independent"),
        ("a/kv b sum:tp", "axes kv and tp are not independent"),
        ("a/kv b @tp=1", "axes kv and tp are not independent"),
        ("a b/xx", "no axis 'xx' in mesh"),
        ("a b sum:xx", "no axis 'xx' in mesh"),
        ("a b @xx=0", "no axis 'xx' in mesh"),
        ("a b @tp=4", "@tp=4 does not name ranks"),
        ("a b @tp=1,1", "@tp=1,1 does not name ranks"),
    ],
)
def test_illegal_axes(text: str, sentence: str) -> None:
    with pytest.raises(LayoutError, match=sentence):
        validate(Layout.parse(text), Mesh.parse(TWO_VIEWS))


@pytest.mark.parametrize("text", ["a/dp/kv/rep", "(a/tp + b/tp)", "(a/tp b + c/tp) h/dp", "a/tp b sum:dp @one=0"])
def test_legal_axes(text: str) -> None:
    layout = Layout.parse(text)
    assert validate(layout, Mesh.parse(TWO_VIEWS)) is layout


@pytest.mark.parametrize(
    ("text", "shape", "known", "sentence"),
    [
        ("(heads d) h", (12, 2), {"d": 5}, r"no size of heads makes \(heads d=5\) equal 12"),
        ("(a + b) h", (3, 2), {"a": 5}, r"no size of b makes \(a=5 \+ b\) equal 3"),
        ("(heads d) h", (12, 2), {}, "size of d, heads does not follow .* give d="),
        ("(a + b)", (12,), {}, "size of a, b does not follow"),
        ("(_ d)", (12,), {}, "size of d does not follow"),
        ("(_ _)", (12,), {}, "an unnamed factor _ does not follow"),
        ("(heads d)", (0,), {"d": 0}, "size of heads does not follow"),
        ("a=3 b", (4, 2), {}, "a=3 has size 3, but the tensor has 4"),
        ("a=3 b", (3, 2), {"a": 4}, "a is 4 in one place and 3 in another"),
        ("a a", (3, 4), {}, "a=3 has size 3, but the tensor has 4"),
        ("a b", (3,), {}, r"'a b' has 2 dims, but the tensor has shape \[3\]"),
        ("a b ...", (3,), {}, r"'a b' has 2 dims|has 2 dims, but the tensor has shape \[3\]"),
        ("a", None, {}, "size of a does not follow"),
        ("a ...", None, {}, r"'\.\.\.' needs the tensor's shape"),
        ("s/cp:zigzag[docs]", (4,), {}, r"give docs=\[\.\.\.\]"),
        ("(a + b)", (4,), {"b": -2}, "b=-2"),
        ("a", (-4,), {}, "-4"),
    ],
)
def test_sizes_without_one_solution_are_refused(
    text: str, shape: tuple[int, ...] | None, known: dict[str, int], sentence: str
) -> None:
    with pytest.raises(LayoutError, match=sentence):
        Layout.parse(text).bind(shape, **known)


@pytest.mark.parametrize(
    ("text", "shape", "known", "bound"),
    [
        ("(heads/tp d)/dp h", (12, 8), {"d": 3}, "(heads=4/tp d=3)/dp h=8"),
        ("(g (r + 1 + 1) d) h", (48, 5), {"g": 3, "d": 4}, "(g=3 (r=2 + 1 + 1) d=4) h=5"),
        ("(2 f/tp) _", (14, 3), {}, "(2 f=7/tp) _=3"),
        ("a (a b)", (3, 12), {}, "a=3 (a=3 b=4)"),
        ("(a b) a", (12, 3), {}, "(a=3 b=4) a=3"),
        ("... h/tp", (2, 3, 4), {}, "_=2 _=3 h=4/tp"),
        ("h ...", (2,), {}, "h=2"),
        ("(heads=2 d)", None, {"d": 3}, "(heads=2 d=3)"),
        ("s/cp:zigzag[docs] //dp:[n]", (4,), {"docs": (1, 3), "n": (2, 2)}, "s=4/cp:zigzag[1 3] //dp:[2 2]"),
        ("(a b)", (0,), {"a": 2}, "(a=2 b=0)"),
    ],
)
def test_a_bound_layout_prints_every_size(
    text: str, shape: tuple[int, ...] | None, known: dict[str, int | tuple[int, ...]], bound: str
) -> None:
    layout = Layout.parse(text).bind(shape, **known)
    assert str(layout) == bound
    assert Layout.parse(bound).bind() == layout
    assert layout.bind() == layout
    assert shape is None or layout.shape == shape


def test_a_layout_without_sizes_has_no_region() -> None:
    with pytest.raises(LayoutError, match="the size of 'a' is not known: give the tensor's shape or a="):
        region(Layout.parse("a/dp"), Mesh.parse("dp=2"), 0)
    with pytest.raises(LayoutError, match="rank 2 is outside mesh"):
        region(Layout.parse("a/dp").bind((4,)), Mesh.parse("dp=2"), 2)


def test_sizes_and_lists_may_be_numpys() -> None:
    layout = Layout.parse("(a/x b) s/y:zigzag[docs]")
    bound = layout.bind((np.int64(6), 4), a=np.int32(2), docs=np.array([3, 1]))  # type: ignore[arg-type]
    assert bound == layout.bind((6, 4), a=2, docs=(3, 1))
    with pytest.raises(LayoutError, match="the list docs is empty"):
        layout.bind((6, 4), a=2, docs=())
