"""The memory executor: any view on either side, every dtype bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch

from tangram.layout import Region
from tangram.relayout import (
    Piece,
    RelayoutError,
    TensorSpec,
    bind,
    execute,
    inverse,
    plan,
)
from tests.relayout.moving import CARRIERS, as_torch, counted, numbered, opposite, run, whole

X = numbered(6, 4)


# ---------------------------------------------------------------- views


def views(a: np.ndarray) -> dict[str, Any]:
    """The same values behind all kinds of views."""
    n, h = a.shape
    big = np.full((2 * n + 1, 3 * h), 55, a.dtype)
    big[1::2, ::3] = a
    fortran = np.asfortranarray(a)
    return {
        "contiguous": a.copy(),
        "flat": a.ravel().copy(),
        "strided flat": np.repeat(a.ravel(), 2)[::2],
        "fortran": fortran,
        "strided": big[1::2, ::3],
        "torch transposed": torch.from_numpy(a.T.copy()).T,
        "torch strided": torch.from_numpy(big)[1::2, ::3],
        "torch narrowed": torch.from_numpy(np.pad(a, ((1, 2), (3, 0)))).narrow(0, 1, n).narrow(1, 3, h),
        "parameter": torch.nn.Parameter(torch.from_numpy(a.copy())),
    }


@pytest.mark.parametrize("kind", views(X))
@pytest.mark.parametrize("text", ["x: n h -> y: n h", "x: n h -> y: h n", "x: (a b) h -> y: (b h) a"])
def test_sources_may_be_any_view(kind: str, text: str) -> None:
    copies = whole(text, X.shape, a=2)
    expected = {"y: n h": X, "y: h n": X.T, "y: (b h) a": X.reshape(2, 3, 4).transpose(1, 2, 0).reshape(12, 2)}
    want = expected[text.split("-> ")[1]]
    np.testing.assert_array_equal(run(copies, views(X)[kind], np.zeros(want.shape, np.float32)), want)


@pytest.mark.parametrize("kind", views(X.T))
def test_targets_may_be_any_view_and_nothing_else_is_written(kind: str) -> None:
    copies = whole("x: n h -> y: h n", X.shape)
    blank = np.full((4, 6), -1, np.float32)
    target = views(blank)[kind]
    base = target
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(target, torch.Tensor):
        base = torch.as_strided(target.detach(), (target.untyped_storage().nbytes() // 4,), (1,), 0).numpy()
    before = np.sort(np.asarray(base).ravel())
    with counted(24):
        run(copies, X, target)
    got = target.detach().numpy() if isinstance(target, torch.Tensor) else target
    np.testing.assert_array_equal(got.reshape(4, 6), X.T)
    outside = before[before != -1]
    after = np.asarray(base).ravel()
    np.testing.assert_array_equal(
        np.sort(after), np.sort(np.concatenate([outside, X.ravel(), before[before == -1][24:]]))
    )


def test_negative_strides_of_numpy_are_refused_or_right() -> None:
    copies = whole("x: n h -> y: h n", X.shape)
    for source in (X[::-1], X[:, ::-1], X[::-1, ::-1]):
        out = np.zeros((4, 6), np.float32)
        try:
            run(copies, source, out)
        except RelayoutError as error:
            assert "x at 0: " in str(error)  # noqa: PT017 - either is fine, silence is not
            assert not out.any()
        else:
            np.testing.assert_array_equal(out, source.T)
    target = np.zeros((4, 6), np.float32)
    with pytest.raises(RelayoutError, match="y at 0"):
        run(copies, X, target[::-1])


def test_regions_that_are_no_grid_have_flat_buffers() -> None:
    bound = bind("x: n h -> y: h n", {"x": TensorSpec(X.shape)})
    region = Region.parse("[0:1 1:6] + [1:3 0:6] + [3:4 0:2]")
    rows = Region.parse("[0:2 0:4]"), Region.parse("[2:6 0:4]")
    copies = plan(bound, [Piece(i, "x", r) for i, r in enumerate(rows)], [Piece(0, "y", region)])
    out = np.zeros(region.size, np.float32)
    execute(copies, {(0, "x"): X[:2], (1, "x"): torch.from_numpy(X[2:])}, {(0, "y"): out})
    np.testing.assert_array_equal(out, X.T.ravel()[1:20])
    strided = torch.zeros(2 * region.size)
    execute(copies, {(0, "x"): X[:2], (1, "x"): X[2:]}, {(0, "y"): strided[::2]})
    np.testing.assert_array_equal(strided[::2].numpy(), X.T.ravel()[1:20])
    assert not strided[1::2].any()


@pytest.mark.parametrize("seed", range(20))
def test_any_rows_of_a_fused_tensor(seed: int) -> None:
    """Which rows of k are wanted moves the rows of q in the buffer: no stride serves a whole block."""
    rng = np.random.default_rng(seed)
    groups, b, c = 6, 2, 3
    q, k = numbered(groups, b, 2), numbered(groups, c, 2, start=500)
    fused = np.concatenate([q, k], 1).reshape(-1, 2)
    bound = bind(
        "q: (a b) h, k: (a c) h -> qk: (a (q b + k c)) h",
        {"q": TensorSpec((groups * b, 2)), "k": TensorSpec((groups * c, 2))},
        a=groups,
    )
    rows = np.flatnonzero((rng.random(len(fused)) < 0.5) | (np.arange(len(fused)) % (b + c) == 0))
    region = Region.of([(((int(i), int(i) + 1),), ((0, 2),)) for i in rows])
    held = [Piece(0, "q", Region.full((groups * b, 2))), Piece(0, "k", Region.full((groups * c, 2)))]
    out = np.zeros((len(rows), 2), np.float32)
    copies = plan(bound, held, [Piece(0, "qk", region)])
    with counted(out.size):
        execute(copies, {(0, "q"): q.reshape(-1, 2), (0, "k"): k.reshape(-1, 2)}, {(0, "qk"): out})
    np.testing.assert_array_equal(out, fused[rows])
    back = bind(inverse(bound.mapping), bound.target.specs, a=groups, b=b)
    pieces = [Piece("these", "qk", region), Piece("those", "qk", Region.full(fused.shape) - region)]
    others = np.delete(fused, rows, 0)
    got = {(0, "q"): np.zeros((groups * b, 2), np.float32), (0, "k"): np.zeros((groups * c, 2), np.float32)}
    execute(plan(back, pieces, held), {("these", "qk"): out, ("those", "qk"): others}, got)
    np.testing.assert_array_equal(got[0, "q"], q.reshape(-1, 2))
    np.testing.assert_array_equal(got[0, "k"], k.reshape(-1, 2))


@pytest.mark.parametrize("seed", range(10))
def test_tied_copies_are_compared_wherever_their_elements_lie(seed: int) -> None:
    """The second copy has padding between its rows, and lies in two pieces that part at any row of it."""
    rng = np.random.default_rng(seed)
    x = numbered(8, 2, 2)
    padded = np.concatenate([x, -numbered(8, 3, 2)], 1).reshape(-1, 2)
    specs = {"x": TensorSpec((16, 2)), "y": TensorSpec(padded.shape)}
    bound = bind("x: (a b) h = y: (a (b + _)) h -> z: (a b) h", specs, b=2)
    mine = (np.arange(40) % 5 < 2) | (rng.random(40) < 0.5)
    mine[:2] = rng.random(2) < 0.5
    regions = [Region.of([(((int(i), int(i) + 1),), ((0, 2),)) for i in np.flatnonzero(m)]) for m in (mine, ~mine)]
    held = [Piece(0, "x", Region.full((16, 2)))] + [Piece(i, "y", region) for i, region in enumerate(regions)]
    copies = plan(bound, held, [Piece(0, "z", Region.full((16, 2)))])
    for at in (None, *np.flatnonzero(np.arange(40) % 5 < 2)):
        y = padded.copy()
        if at is not None:
            y[at, 1] += 0.5
        have = {(0, "x"): x.reshape(-1, 2), (0, "y"): y[mine], (1, "y"): y[~mine]}
        out = np.zeros((16, 2), np.float32)
        if at is None:
            execute(copies, have, {(0, "z"): out})
            np.testing.assert_array_equal(out, x.reshape(-1, 2))
        else:
            with pytest.raises(RelayoutError, match="are tied, but 1 of the"):
                execute(copies, have, {(0, "z"): out})


def test_numpy_and_torch_mixed_and_buffers_as_a_function() -> None:
    copies = whole("x: n h -> y: h n = z: n h", X.shape)
    y, z = torch.zeros(4, 6), np.zeros((6, 4), np.float32)
    asked: list[tuple[Any, str]] = []

    def source(place: Any, name: str) -> Any:
        asked.append((place, name))
        return X

    execute(copies, source, lambda _, name: {"y": y, "z": z}[name])
    np.testing.assert_array_equal(y.numpy(), X.T)
    np.testing.assert_array_equal(z, X)
    assert set(asked) == {(0, "x")}


def test_conjugate_and_negative_views_of_torch() -> None:
    c = torch.from_numpy((X + 1j * X).astype(np.complex64))
    out = run(whole("x: n h -> y: h n", (6, 4), "complex64"), c.conj(), torch.zeros(4, 6, dtype=torch.complex64))
    np.testing.assert_array_equal(out.numpy(), (X - 1j * X).T)
    out = run(whole("x: n h -> y: h n", (6, 4)), c.conj().imag, torch.zeros(4, 6))
    np.testing.assert_array_equal(out.numpy(), -X.T)
    target = torch.zeros(4, 6, dtype=torch.complex64)
    run(whole("x: n h -> y: h n", (6, 4), "complex64"), c, target.conj())
    np.testing.assert_array_equal(target.conj().resolve_conj().numpy(), c.numpy().T)


def test_conjugate_views_are_compared_by_what_they_mean() -> None:
    c = torch.from_numpy((X + 1j * X).astype(np.complex64))
    for dtype, a, b in (("complex64", c.conj(), c.conj().resolve_conj()), ("float32", c.conj().imag, -c.imag)):
        bound = bind("x: n h = z: n h -> y: h n", {"x": TensorSpec((6, 4), dtype), "z": TensorSpec((6, 4), dtype)})
        held = [Piece(0, name, Region.full((6, 4))) for name in "xz"]
        copies = plan(bound, held, [Piece(0, "y", Region.full((4, 6)))])
        out = torch.zeros(4, 6, dtype=a.dtype)
        execute(copies, {(0, "x"): a, (0, "z"): b}, {(0, "y"): out})
        assert torch.equal(out, b.T)


# ---------------------------------------------------------------- dtypes

NUMPY = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
NUMPY += ["float16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", [*NUMPY, *CARRIERS])
def test_every_dtype_bit_for_bit(dtype: str) -> None:
    """Random bits: among them NaNs with payloads, infinities, subnormal numbers and -0.0."""
    rng = np.random.default_rng(1)
    carrier = np.dtype(CARRIERS.get(dtype, dtype))
    raw = rng.integers(0, 2 if dtype == "bool" else 256, (6, 4 * carrier.itemsize), np.uint8).view(carrier)
    raw = np.where(np.arange(24).reshape(6, 4) % 5 == 0, np.array(0, carrier), raw)
    copies = whole("x: (a b) h -> y: (h a) b", (6, 4), dtype, a=2)
    want = np.ascontiguousarray(raw.reshape(2, 3, 4).transpose(2, 0, 1)).reshape(8, 3)
    got = opposite(want)
    odd = dtype if dtype in CARRIERS else None
    run(copies, as_torch(raw, odd), as_torch(got, odd))
    assert got.tobytes() == want.tobytes()
    if dtype not in CARRIERS:
        assert run(copies, raw, opposite(want)).tobytes() == want.tobytes()


def test_payloads_of_nan_and_minus_zero() -> None:
    bits = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32).reshape(2, 3)
    out = run(whole("x: a b -> y: b a", (2, 3)), bits.view(np.float32), np.zeros((3, 2), np.float32))
    np.testing.assert_array_equal(out.view(np.uint32), bits.T)
    half = torch.from_numpy(np.array([0x7FC1, 0x7F81, 0x8000, 0xFFFF], np.uint16)).view(torch.bfloat16).view(2, 2)
    out = run(whole("x: a b -> y: b a", (2, 2), "bfloat16"), half, torch.zeros(2, 2, dtype=torch.bfloat16))
    assert torch.equal(out.view(torch.int16), half.T.contiguous().view(torch.int16))


# ---------------------------------------------------------------- what is created


def test_fill() -> None:
    copies = whole("x: n h -> y: (_=2 + n + _=1) h; fill=-3.5", (6, 4))
    got = run(copies, X, np.zeros((9, 4), np.float32))
    np.testing.assert_array_equal(got, np.pad(X, ((2, 1), (0, 0)), constant_values=-3.5))
    zeros = run(whole("x: n h -> y: (n + _=2) h", (6, 4)), X, np.full((8, 4), 9, np.float32))
    np.testing.assert_array_equal(zeros, np.pad(X, ((0, 2), (0, 0))))


def test_whole_tensors_created_and_dropped() -> None:
    specs = {"x": TensorSpec((2,)), "old": TensorSpec((3,))}
    bound = bind("x -> y\nold -> _\n_ -> bias: (n=3); fill=0.5\n_ -> steps.{l=2}: n=1; fill=inf", specs)
    held = [Piece(0, "x", Region.full((2,)))]
    names = bound.target.specs
    assert set(names) == {"y", "bias", "steps.0", "steps.1"}
    out = {(0, name): np.zeros(spec.shape, np.float32) for name, spec in names.items()}
    wanted = [Piece(0, name, Region.full(spec.shape)) for name, spec in names.items()]
    execute(plan(bound, held, wanted), {(0, "x"): numbered(2)}, out)
    np.testing.assert_array_equal(out[0, "bias"], [0.5] * 3)
    assert np.isinf(out[0, "steps.1"]).all()
