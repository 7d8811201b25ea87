"""The machine at hand as a cluster's file: its best rates, its links, and curves fitted to what was measured on it.

What comes out is read as any other cluster, so `tangram plan JOB --cluster here.toml` plans with this machine's own
kernels and collectives. Best rates are the highest that were measured; of an accelerator of the catalogue its maker's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError
from tangram.hardware.catalogue.curves import (
    ATTENTION,
    COLLECTIVE,
    MOVED,
    PRODUCT,
    AttentionSizes,
    attention,
    collective,
    moved,
    product,
)
from tangram.hardware.catalogue.devices import Figures
from tangram.hardware.catalogue.owncurves import Call, Fit, fit, text_of
from tangram.hardware.host.machine import accelerators
from tangram.hardware.measuring import sweep
from tangram.hardware.measuring.rates import rates
from tangram.hardware.measuring.sweep import Point

Floats = NDArray[np.float64]
Tell = Callable[[str], None]
BYTES = 4.0
"""Of a number of what moves."""
LEAST = 1 << 20
"""Operations of a product, bytes that move: what is smaller is a call and no rate."""


@dataclass(frozen=True)
class Measured:
    """One machine."""

    name: str
    ranks: int
    figures: Figures
    fits: tuple[Fit, ...]
    link: str
    latency: float
    """Seconds of the smallest collective of two."""

    def text(self) -> str:
        """As a cluster's file."""
        own = self.figures
        lines = [
            f"# {self.name}, as one of {self.ranks} ranks of it sees it: measured by tangram doctor --measure.",
            "# Best rates are the highest that were measured; the curves are shares of them.",
            "", "version = 1", f"ranks = {self.ranks}", "", "[device]", f"bf16 = {own.bf16:.4g}",
            f"fp32 = {own.fp32:.4g}", f"memory_bytes = {own.memory_bytes:.4g}",
            f"memory_bandwidth = {own.memory_bandwidth:.4g}", "reaches = 1.0", "memory_reaches = 1.0", "",
            "[[links]]", f'name = "{self.link}"', f"ranks = {self.ranks}", f"rate = {own.link_bandwidth:.4g}",
            "reaches = 1.0", f"latency = {self.latency:.3g}", "hop = 0.0", "",
        ]  # fmt: skip
        return "\n".join(lines) + "\n" + text_of(self.fits)


def measured(device: str, ranks: int, tell: Tell = lambda what: None) -> Measured:
    """Measure, and fit. Raises UserError for more ranks than accelerators, where ranks cannot meet, without scipy.

    One rank has no collectives: then its link is the catalogue's, or what gloo reaches here.
    """
    there = sum(one.kind == device for one in accelerators())
    if device != "cpu" and ranks > there:
        raise UserError(f"{ranks} ranks cannot be measured: there are {there} accelerators")
    known = rates(device, ranks)
    tell("matmuls")
    products = {kind: sweep.products(device, kind, ranks) for kind in sweep.TYPES}
    tell("attention")
    scores = {
        kind: tuple(sweep.attention(device, kind, ranks, backward=way) for way in (False, True)) for kind in sweep.TYPES
    }
    tell("what moves through memory")
    streams = sweep.moved(device, ranks)
    tell(f"collectives of up to {ranks} ranks")
    together = sweep.collectives(device, ranks)
    best = {kind: max(_flops(one) / one.seconds for one in points) for kind, points in products.items()}
    figures = Figures(
        "here", known.name, bf16=best["bf16"], fp32=best["fp32"], memory_bytes=known.memory,
        memory_bandwidth=max(one.sizes["nbytes"] / one.seconds for one in streams[-2:]),
        link_bandwidth=max((_received(one) / one.seconds for one in together["all-gather"]), default=known.links.peak),
        link_domain=ranks,
    )  # fmt: skip
    fits = [_product(figures, kind, points) for kind, points in products.items()]
    fits += [_attention(figures, kind, *points) for kind, points in scores.items()]
    fits += [_moved(figures, streams), *(_collective(figures, name, of) for name, of in together.items() if of)]
    latency = min((one.seconds for one in together["all-reduce"]), default=known.latency)
    return Measured(known.name, ranks, figures, tuple(fits), "gloo" if device == "cpu" else "links", latency)


def _flops(one: Point) -> float:
    return 2.0 * one.sizes["m"] * one.sizes["n"] * one.sizes["k"]


def _received(one: Point) -> float:
    return one.sizes["nbytes"] * (one.sizes["ranks"] - 1) / one.sizes["ranks"]


def _columns(points: Sequence[Point]) -> tuple[dict[str, Floats], Floats]:
    names = points[0].sizes
    x = {name: np.array([one.sizes[name] for one in points]) for name in names}
    return x, np.array([one.seconds for one in points])


def _fit(kind: str, of: str, start: Mapping[str, float], call: Call, points: Sequence[Point]) -> Fit:
    x, t = _columns(points)
    return fit(kind, "here", of, start, call, x, t)


def _product(figures: Figures, kind: str, points: Sequence[Point]) -> Fit:
    def call(p: Mapping[str, float], x: Any) -> Floats:
        return product(p, figures, kind, x["m"], x["n"], x["k"], 1.0)

    return _fit("product", kind, PRODUCT, call, [one for one in points if _flops(one) >= LEAST])


def _attention(figures: Figures, kind: str, ahead: Sequence[Point], back: Sequence[Point]) -> Fit:
    """The forward's curve, and by how much an operation of the backward is slower: the median of the same shapes."""

    def call(p: Mapping[str, float], x: Any, *, backward: bool = False) -> Floats:
        of = AttentionSizes(x["batch"], x["queries"], x["keys"], x["heads"], x["heads"], x["width"])
        return attention(p, figures, kind, of, backward=backward)

    found = _fit("attention", kind, ATTENTION, call, ahead)
    x, t = _columns(back)
    slower = float(np.median(t / call({**found.values, "backward": 1.0}, x, backward=True)))
    return Fit(
        found.kind, found.device, found.of, {**found.values, "backward": slower}, found.rows + len(back), found.median,
        found.worst, found.held_out, found.spread,
    )  # fmt: skip


def _moved(figures: Figures, points: Sequence[Point]) -> Fit:
    def call(p: Mapping[str, float], x: Any) -> Floats:
        return moved(p, figures, x["nbytes"])

    return _fit("moved", "any", MOVED, call, points)


def _collective(figures: Figures, name: str, points: Sequence[Point]) -> Fit:
    def call(p: Mapping[str, float], x: Any) -> Floats:
        return collective(p, figures, name, x["nbytes"], x["ranks"])

    return _fit("collective", name, {**COLLECTIVE, "crowd": 0.3}, call, points)
