"""Kernels under Triton's interpreter against the laboratory: every recipe, mask and width, forward and backward."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from bench._numerics.cases import Case, Mask
from bench._numerics.criterion import judged, limits
from bench._numerics.inputs import Shape, drawn
from tangram.kernels.attention import Heads, Partial
from tangram.kernels.flash import launch
from tangram.kernels.flash.launch import Call, Tile, choose
from tangram.kernels.flash.modes import MODES, cannot, fp8
from tangram.kernels.flash.spans import Spans, in_order, with_blocks
from tangram.kernels.lab.formats import E2M1, E4M3
from tangram.kernels.lab.quant import Operand, Scaling
from tangram.kernels.lab.recipes import RECIPES, TWO_LEVEL, Forward, Recipe
from tests.kernels.flash.cases import by_emulation, by_kernels, heads_of, spans_of

SMALL = fp8(block=32, tile=32)
"""Blocks as small as the tiles here, so that there are some."""
TILE = Tile(32, 32)
UNSCALED = Operand(E4M3, Scaling("static", factor=1.0))
OURS = tuple(mode for mode, recipe in MODES.items() if not cannot(recipe))
RIGHT: dict[str, Recipe] = {
    "bf16": MODES["bf16"],
    "fp8-fwd": replace(MODES["fp8-fwd"], forward=SMALL.forward),
    "fp8-fwd, delta high": replace(MODES["fp8-fwd"], forward=SMALL.forward, delta="high"),
    "fp8": SMALL,
    "fp8, Hadamard": replace(SMALL, smooth_k=False, hadamard=True),
    "fp8, both": replace(SMALL, hadamard=True),
    "nvfp4": MODES["nvfp4-emulated"],
    "mxfp4": RECIPES["mxfp4 forward, bf16 backward, delta high"],
}
SHAPES: dict[str, Shape] = {
    "causal, groups": Shape(tokens=72, heads=4, groups=2, width=32),
    "all": Shape(tokens=64, heads=2, groups=2, width=32, mask=Mask(causal=False)),
    "cross, window": Shape(tokens=40, keys=75, heads=2, groups=1, width=32, mask=Mask(window=20)),
    "packed, sinks": Shape(tokens=70, heads=2, groups=1, width=32, mask=Mask(documents=(9, 40, 21)), sinks=True),
    "odd widths": Shape(tokens=37, heads=2, groups=2, width=24, value_width=40, batch=2),
}


def accepted(case: Case, recipe: Recipe, spans: Spans | None = None, tile: Tile = TILE) -> None:
    spans = spans_of(case) if spans is None else spans
    results, of_sinks, _ = by_kernels(case, recipe, spans, tile)
    verdict = judged(results, limits(recipe, case))
    assert verdict.accepted, verdict
    _, expected, _ = by_emulation(case, recipe, spans)
    torch.testing.assert_close(of_sinks, expected, rtol=2e-2, atol=1e-2 * float(expected.abs().max()) + 1e-6)


def _pairs() -> Iterator[object]:
    """Of each recipe two shapes, other ones; the rest is slow."""
    for i, (name, shape) in enumerate(product(RIGHT, SHAPES)):
        often = (i + i // len(SHAPES)) % len(SHAPES) < 2
        yield pytest.param(name, shape, marks=() if often else pytest.mark.slow)


@pytest.mark.parametrize(("name", "shape"), [*_pairs()])
def test_recipes_and_masks(name: str, shape: str) -> None:
    accepted(drawn("channels" if "smooth" in name or name == "fp8" else "gaussian", SHAPES[shape]), RIGHT[name])


@pytest.mark.parametrize(("width", "values"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_widths(name: str, width: int, values: int) -> None:
    accepted(drawn("outliers", Shape(tokens=45, heads=2, groups=1, width=width, value_width=values)), RIGHT[name])


@pytest.mark.parametrize("mode", OURS)
def test_modes_as_they_are(mode: str) -> None:
    """Blocks of 128 tokens; tiles as a device would have them."""
    accepted(drawn("outliers", Shape(tokens=150, heads=2, groups=1, width=64)), MODES[mode], tile=None)  # pyright: ignore


@pytest.mark.parametrize("tile", [Tile(16, 32), Tile(64, 16), Tile(128, 64)])
def test_tiles(tile: Tile) -> None:
    accepted(
        drawn("gaussian", Shape(tokens=70, heads=2, groups=1, width=32, mask=Mask(window=30))), RIGHT["bf16"], tile=tile
    )


def test_a_block_that_sees_all_of_itself() -> None:
    """As a picture between words, or a prefix, is seen."""
    case = drawn("gaussian", Shape(tokens=72, heads=2, groups=1, width=32))
    numbers = torch.tensor([[0] * 20 + [-1] * 10 + [1] * 25 + [-1] * 17])
    spans = with_blocks(spans_of(case), numbers)
    accepted(case.with_mask(spans.visible()[0]), RIGHT["fp8"], spans)


def test_tokens_in_another_order() -> None:
    case = drawn("gaussian", Shape(tokens=72, heads=2, groups=1, width=32))
    order = torch.randperm(72, generator=torch.Generator().manual_seed(0))
    spans = Spans(*(x[:, order] for x in spans_of(case)))
    moved = replace(
        case, **{name: getattr(case, name)[:, :, order] for name in ("q", "k", "v", "grad")}, visible=spans.visible()[0]
    )
    accepted(moved, RIGHT["bf16"], spans)


def test_numbers_that_do_not_lie_in_a_row() -> None:
    """Of all rows alike, and every second place of a larger tensor."""
    case = drawn("gaussian", Shape(tokens=40, heads=2, groups=1, width=32, batch=2, mask=Mask(window=9)))
    right = by_kernels(case, RIGHT["bf16"], spans_of(case), TILE)[0]
    apart = Spans(*(torch.stack([x[:1], x[:1] + 1], -1)[..., 0] for x in spans_of(case)))
    assert not apart.since.is_contiguous()
    for one, other in zip(by_kernels(case, RIGHT["bf16"], apart, TILE)[0], right, strict=True):
        assert torch.equal(one, other)


def test_queries_that_see_nothing() -> None:
    case = drawn("gaussian", Shape(tokens=40, heads=2, groups=1, width=32))
    spans = spans_of(case)
    spans.reach[:, 5:9] = -1
    for recipe in (RIGHT[name] for name in ("bf16", "fp8", "mxfp4")):
        results, _, whole = by_kernels(case, recipe, spans, TILE)
        assert (results.o[:, :, 5:9] == 0).all()
        assert (results.dq[:, :, 5:9] == 0).all()
        assert (whole.sums[:, :, 5:9] == -torch.inf).all()
        assert all(bool(x.isfinite().all()) for x in results)


@pytest.mark.parametrize("name", ["bf16", "fp8, both", "nvfp4"])
def test_the_same_bits_every_time(name: str) -> None:
    case = drawn("outliers", Shape(tokens=40, heads=2, groups=1, width=32))
    first, second = (by_kernels(case, RIGHT[name], spans_of(case), TILE)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_tokens() -> None:
    call = Call(MODES["fp8"], in_order(0, 5, batch=2), 1.0)
    heads = Heads(*(torch.zeros(2, heads, tokens, 16).bfloat16() for heads, tokens in ((4, 0), (2, 5), (2, 5))))
    whole = launch.forward(heads, call)
    assert whole.out.shape == (2, 4, 0, 16)
    found, _ = launch.backward(torch.zeros(2, 4, 0, 16), heads, Partial(*whole), call)
    assert [x.shape for x in found] == [x.shape for x in heads]
    assert not any(bool(x.any()) for x in found)


@pytest.mark.parametrize("name", ["bf16", "fp8", "nvfp4"])
def test_tokens_that_lie_far_apart(name: str) -> None:
    """As in a long sequence of many heads: their places do not fit in 32 bits. Of 4 GiB next to nothing is touched."""
    case = drawn("gaussian", Shape(tokens=4, heads=1, groups=1, width=16))

    def far(x: torch.Tensor) -> torch.Tensor:
        found = torch.empty_strided(x.shape, (2**32, 2**32, 2**30, 1), dtype=torch.bfloat16)
        return found.copy_(x)

    near = by_kernels(case, RIGHT[name], spans_of(case), TILE)[0]
    call = Call(RIGHT[name], spans_of(case), case.scale, None, TILE)
    heads = Heads(far(case.q), far(case.k), far(case.v))
    whole = launch.forward(heads, call)
    found, _ = launch.backward(far(case.grad), heads, whole, call)
    for one, other in zip((whole.out, *found), near, strict=True):
        assert torch.equal(one.double(), other)


# ---------------------------------------------------------------- what the comparison would find


def _late(case: Case) -> Spans:
    spans = spans_of(case)
    return spans._replace(reach=spans.reach + 1)


def _without_the_last_key_of_tiles(case: Case) -> Spans:
    spans = spans_of(case)
    return spans._replace(places=torch.where(spans.places % 32 == 31, 10**6, spans.places))


@pytest.mark.parametrize("wrong", [_late, _without_the_last_key_of_tiles])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_wrong_mask_is_refused(name: str, wrong) -> None:
    case = drawn("gaussian", SHAPES["causal, groups"])
    assert not judged(by_kernels(case, RIGHT[name], wrong(case), TILE)[0], limits(RIGHT[name], case)).accepted


@pytest.mark.parametrize("name", ["nvfp4", "fp8, both"])
def test_another_recipe_is_refused(name: str) -> None:
    case = drawn("channels", SHAPES["causal, groups"])
    wrong = replace(RIGHT[name], smooth_k=False)
    assert not judged(by_kernels(case, wrong, spans_of(case), TILE)[0], limits(RIGHT[name], case)).accepted


def test_a_scale_that_is_not_of_its_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn("outliers", SHAPES["causal, groups"])
    real = launch.e4m3_blocks

    def off(*args, **more):
        codes = real(*args, **more)
        return replace(codes, scales=codes.scales.roll(1, -1))

    monkeypatch.setattr(launch, "e4m3_blocks", off)
    assert not judged(by_kernels(case, RIGHT["fp8"], spans_of(case), TILE)[0], limits(RIGHT["fp8"], case)).accepted


# ---------------------------------------------------------------- what is refused


def _of_groups(scaling: Scaling) -> Recipe:
    return replace(MODES["nvfp4-emulated"], forward=Forward(*(Operand(E2M1, scaling),) * 4))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (RECIPES["fp8 per tensor"], "none of bf16"),
        (RECIPES["fp8 per block, Q and K smoothed"], "queries are not smoothed"),
        (RECIPES["fp8 forward, bf16 backward, not matched"], "takes the scores of its forward"),
        (RECIPES["fp8 per tensor, dice for gradients"], "stochastically"),
        (RECIPES["nvfp4"], "none of bf16"),
        (replace(MODES["nvfp4-emulated"], backward=SMALL.backward), "follows a forward in E4M3"),
        (RECIPES["int8, K smoothed, dP in bf16"], "none of bf16"),
        (replace(MODES["nvfp4-emulated"], hadamard=True), "turned queries and keys are cast to E4M3"),
        (replace(SMALL, forward=replace(SMALL.forward, p=UNSCALED)), "none of bf16"),
        (_of_groups(Scaling("group", 32, "e8m0-up")), "none of bf16"),
        (_of_groups(Scaling("group", 16, "e4m3")), "none of bf16"),
        (_of_groups(Scaling("group", 16, "e8m0")), "none of bf16"),
        (replace(SMALL, accumulate=TWO_LEVEL), "sums, registers and results"),
        (replace(SMALL, stored=None), "sums, registers and results"),
        (fp8(48, 24), "a power of two"),
        (fp8(32, 64), "not so many tiles"),
    ],
)
def test_refused(recipe: Recipe, said: str) -> None:
    assert said in cannot(recipe)
    case = drawn("gaussian", Shape(tokens=8, heads=1, groups=1, width=16))
    with pytest.raises(ValueError, match="the kernels have no recipe"):
        launch.forward(heads_of(case), Call(recipe, spans_of(case), 1.0))


def test_a_tile_lies_within_a_block() -> None:
    case = drawn("gaussian", Shape(tokens=8, heads=1, groups=1, width=16))
    with pytest.raises(ValueError, match="tiles of 64 x 32 do not divide blocks of 32 tokens"):
        launch.forward(heads_of(case), Call(SMALL, spans_of(case), 1.0, None, Tile(64, 32)))
    for kernel in ("forward", "queries", "keys"):
        tile = choose(SMALL, 64, kernel)
        assert max(tile.rows, tile.columns) <= 32


def test_numbers_whose_scale_vanishes() -> None:
    """Gradients of scores smaller than 448 times the smallest number: they are nothing, and no NaN."""
    case = drawn("gaussian", Shape(tokens=40, heads=2, groups=1, width=16))
    tiny = replace(case, v=case.v * 1e-4, grad=case.grad * 1e-40)
    for way in (by_kernels, by_emulation):
        results, _, _ = way(tiny, SMALL, spans_of(tiny))
        assert all(bool(x.isfinite().all()) for x in results)


def test_every_mode_has_a_kernel_and_tiles() -> None:
    assert MODES.keys() - OURS == {"fp8-e5m2-emulated", "nvfp4-dropin-emulated"}, "those that are studied only"
    for recipe in (MODES[mode] for mode in OURS):
        for width in (16, 64, 128, 256):
            for kernel in ("forward", "queries", "keys"):
                tile = choose(recipe, width, kernel)
                for size in (tile.rows, tile.columns):
                    assert (recipe.forward.q.scaling.size or 128) % size == 0 or recipe.forward.q.scaling.per == "group"
