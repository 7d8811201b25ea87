"""Kernels of attention on an accelerator: first whether they are right, then how fast, beside torch's own.

    check    each mode's results beside the laboratory's: the largest distance over what a right kernel keeps (1)
    speed    TFLOP/s forward and backward, 128 channels, causal, 8k to 32k tokens
    whole    forward and backward: FP8 forward and BF16 backward over our BF16, in all shapes; both over torch's fastest
    tiles    TFLOP/s forward of other tiles, to choose by; not run unless asked for

What is not right is not timed: the bench ends with a sentence. Peers: torch's `scaled_dot_product_attention`, by each
of its back ends that takes the shape. Products that a causal mask hides are not counted. All but `tiles` is meant to
end within eight minutes on a Hopper device. Without an accelerator there is nothing to time; `--quick` checks small
shapes there, under Triton's interpreter where TRITON_INTERPRET=1 is set.
"""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench._numerics.cases import Case, Mask, Results
from bench._numerics.criterion import judged, limits
from bench._numerics.inputs import Shape, drawn
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row
from tangram.kernels.flash.modes import MODES, cannot
from tangram.kernels.flash.operator import flash, unable
from tangram.kernels.flash.spans import Spans, by_numbers, in_order

GROUPS = ("check", "speed", "whole", "tiles")
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}
TARGETS: Mapping[tuple[str, str], float] = {
    ("fp8", "forward"): 700, ("fp8", "backward"): 450, ("bf16", "forward"): 600, ("bf16", "backward"): 450,
}  # fmt: skip
CHECKED = (
    Shape(tokens=300, heads=4, groups=2, width=128),
    Shape(tokens=257, heads=2, groups=1, width=64, mask=Mask(window=100)),
    Shape(tokens=200, keys=333, heads=2, groups=2, width=96, mask=Mask(causal=False)),
    Shape(tokens=256, heads=2, groups=2, width=192, value_width=128, mask=Mask(documents=(100, 31, 125)), sinks=True),
    Shape(tokens=200, heads=2, groups=1, width=256),
)
SMALL = (Shape(tokens=40, heads=2, groups=1, width=32),)
AT_LEAST = 0.2
"""Seconds of a measurement."""


@dataclass(frozen=True)
class Timed:
    """One call to be timed: its tensors with their gradient, and what is counted."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    spans: Spans
    flops: float
    """Of the forward; the backward has five products for two."""


def rows(quick: bool, only: tuple[str, ...] = ()) -> Iterable[Row]:
    """The figures."""
    if unknown := [name for name in only if name not in GROUPS]:
        raise UserError(f"there is no group {unknown[0]!r} of figures here; known are {', '.join(GROUPS)}")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cpu" and not quick:
        raise UserError("kernels are timed on an accelerator, and torch sees none here: --quick checks small shapes")
    wanted = only or GROUPS[:3]
    if "check" in wanted:
        yield from _checks(device, SMALL if quick else CHECKED)
    if device.type == "cpu":
        return
    tokens = (2048,) if quick else (8192, 16384, 32768)
    if "speed" in wanted:
        yield from _speeds(device, tokens)
    if "whole" in wanted:
        yield from _wholes(device, tokens[-1])
    if "tiles" in wanted:
        yield from _tiles(device, tokens[0])


# ---------------------------------------------------------------- right


def _checks(device: torch.device, shapes: Iterable[Shape]) -> Iterator[Row]:
    for shape, mode in product(shapes, [mode for mode, recipe in MODES.items() if not cannot(recipe)]):
        if why := unable(mode, device, torch.bfloat16, max(shape.width, shape.value_width)):
            raise UserError(why)
        case = drawn("outliers", shape)
        verdict = judged(_results(case, mode, device), limits(MODES[mode], case))
        if not verdict.accepted:
            raise UserError(
                f'attention "{mode}" is wrong on {shape}: {verdict.where} is {verdict.worst:.3g} of its limit'
            )
        yield Row(f"{mode}: {shape.width} channels, {shape}", "of the limit", verdict.worst, target=1.0)


def _results(case: Case, mode: str, device: torch.device) -> Results:
    q, k, v = (x.bfloat16().to(device).requires_grad_() for x in (case.q, case.k, case.v))
    sinks = None if case.sinks is None else case.sinks.float().to(device)
    out, _ = flash(q, k, v, *_spans(case).to(device), sinks, case.scale, mode)
    found = torch.autograd.grad(out, (q, k, v), case.grad.bfloat16().to(device))
    return Results(*(x.detach().double().cpu() for x in (out, *found)))


def _spans(case: Case) -> Spans:
    S, T = case.visible.shape
    if not case.mask.documents:
        return in_order(S, T, case.mask.causal, case.mask.window)
    return _packed(case.mask.documents)


def _packed(lengths: Iterable[int]) -> Spans:
    sizes = torch.tensor([*lengths])
    begins = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    numbers = torch.stack([begins, torch.arange(len(begins))], -1)[None]
    return by_numbers(numbers, numbers)


# ---------------------------------------------------------------- fast


def timed(tokens: int, heads: int, groups: int, width: int, values: int, documents: int, device: torch.device) -> Timed:
    """Causal, of one row; `documents`: packed, of equal length."""
    draw = partial(torch.randn, dtype=torch.bfloat16, device=device)
    q, k, v = draw(1, heads, tokens, width), draw(1, groups, tokens, width), draw(1, groups, tokens, values)
    lengths = [tokens // documents] * documents
    flops = sum(2.0 * heads * length**2 * (width + values) / 2 for length in lengths)
    name = f"{tokens} tokens, {heads} heads over {groups}, {width} channels"
    name += f" ({values} of values)" if values != width else ""
    name += f", {documents} documents" if documents > 1 else ""
    q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    return Timed(name, q, k, v, draw(1, heads, tokens, values), _packed(lengths).to(device), flops)


def _speeds(device: torch.device, lengths: Iterable[int]) -> Iterator[Row]:
    for tokens in lengths:
        call = timed(tokens, 16, 16, 128, 128, 1, device)
        peers = {name: found for name, kind in PEERS.items() if (found := _peer(call, kind)) is not None}
        for mode, way in product(("bf16", "fp8-fwd", "fp8"), (0, 1)):
            what, factor = ("forward", "backward")[way], (1.0, 2.5)[way]
            rate = call.flops * factor / _seconds(call, mode)[way] / 1e12
            others = {name: call.flops * factor / found[way] / 1e12 for name, found in peers.items()}
            yield Row(
                f"{mode} {what}, {call.name}",
                "TFLOP/s",
                rate,
                others,
                target=TARGETS.get((mode, what)),
                better="higher",
            )


def _wholes(device: torch.device, longest: int) -> Iterator[Row]:
    shapes = [
        (16, 16, 128, 128, 1),
        (64, 8, 128, 128, 1),
        (32, 32, 64, 64, 1),
        (16, 16, 192, 128, 1),
        (16, 16, 128, 128, 8),
    ]
    for shape in shapes:
        call = timed(longest, *shape, device)
        ours, mixed, eight = (sum(_seconds(call, mode)) for mode in ("bf16", "fp8-fwd", "fp8"))
        others = [sum(found) for kind in PEERS.values() if (found := _peer(call, kind)) is not None]
        fastest = min([ours, *others])
        yield Row(f"fp8-fwd over our bf16, {call.name}", "times as fast", ours / mixed, target=1.08, better="higher")
        yield Row(
            f"fp8-fwd over the fastest bf16, {call.name}", "times as fast", fastest / mixed, target=1.0, better="higher"
        )
        yield Row(
            f"fp8 over the fastest bf16, {call.name}", "times as fast", fastest / eight, target=1.0, better="higher"
        )


def _tiles(device: torch.device, tokens: int) -> Iterator[Row]:
    from tangram.kernels.attention import Heads
    from tangram.kernels.flash import launch

    for width, mode in product((64, 128, 256), ("bf16", "fp8")):
        call = timed(tokens, 16, 16, width, width, 1, device)
        heads = Heads(call.q.detach(), call.k.detach(), call.v.detach())
        for size, columns, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
            tile = launch.Tile(size, columns, warps, stages)
            one = launch.Call(MODES[mode], call.spans, width**-0.5, None, tile)
            try:
                seconds = _of(partial(launch.forward, heads, one))
            except RuntimeError:  # it does not fit the device's shared memory
                continue
            yield Row(f"{mode} forward, {call.name}, {tile}", "TFLOP/s", call.flops / seconds / 1e12, better="higher")


def _seconds(call: Timed, mode: str) -> tuple[float, float]:
    """Forward and backward."""
    return _both(call, lambda: flash(call.q, call.k, call.v, *call.spans, None, call.q.shape[-1] ** -0.5, mode)[0])


def _peer(call: Timed, kind: SDPBackend) -> tuple[float, float] | None:
    """None where this back end does not take the shape, packed documents for one."""
    if bool((call.spans.since != 0).any()):
        return None
    grouped = call.q.shape[1] != call.k.shape[1]

    def attend() -> Tensor:
        with sdpa_kernel(kind):
            return scaled_dot_product_attention(call.q, call.k, call.v, is_causal=True, enable_gqa=grouped)

    try:
        return _both(call, attend)
    except RuntimeError:
        return None


def _both(call: Timed, attend: Callable[[], Tensor]) -> tuple[float, float]:
    out = attend()
    owed = lambda: torch.autograd.grad(out, (call.q, call.k, call.v), call.grad, retain_graph=True)  # noqa: E731
    with torch.no_grad():
        forward = _of(attend)
    return forward, _of(owed)


def _of(run: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of one, the median of some measurements of so many that they take a while."""
    run()
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    run()
    torch.accelerator.synchronize()
    times = max(1, int(AT_LEAST / repeats / max(1e-6, time.perf_counter() - begin)))
    found: list[float] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(times):
            run()
        torch.accelerator.synchronize()
        found.append((time.perf_counter() - begin) / times)
    return statistics.median(found)
