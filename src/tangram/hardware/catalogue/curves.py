"""Seconds of operators and collectives on a device of the catalogue, by curves fitted to published measurements.

Vectorised: sizes are arrays that go together, and what comes back is an array of seconds. The forms:

    product      start + max(2 m n k / (peak reach fill(m) fill(n) fill(k)), bytes / (memory reach))
    attention    start + operations / (peak reach fill(keys) fill(head dim)); the backward has 2.5 times the operations,
                 each slower by a factor (FlashAttention-2, Dao 2023, 3.1.2)
    moved        start + bytes / (memory reach)
    collective   start + hop (ranks - 1) + share bytes (ranks - 1) / ranks / (link reach (2 / near)^crowd), near, where
                 crowd says how much devices share: nothing of links of their own, all of a host; between nodes each
                 device of a group brings its own NIC, so that so many of them carry a node's traffic

with fill(x) = x / (x + half): half of the rate at so many. `curves.toml` has the values by device and type, each with
the spread that is left (standard deviation of the logarithm); a device without measurements of its own has the median
of the others, as shares of its own best rates, and a wider spread. A cluster's file may have curves of its own, which
count before (`hardware.measuring.measured`).

The trade-off: smooth curves miss the steps of tiles and waves, some percent for shapes that do not fill them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError
from tangram.hardware.catalogue.devices import Figures
from tangram.text import packaged

Array = NDArray[Any]
Values = Mapping[str, float]

PRODUCT: Values = {"start": 4e-6, "reach": 0.8, "m": 100.0, "n": 100.0, "k": 200.0, "memory": 0.8}
ATTENTION: Values = {"start": 8e-6, "reach": 0.6, "keys": 500.0, "width": 30.0}
COLLECTIVE: Values = {"start": 8e-6, "hop": 1e-6, "reach": 0.75}
"""Where fits start, and the names of the values."""
BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}
SHARES = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0, "all-to-all": 1.0, "p2p": 1.0}
"""How often a rank receives (k - 1) / k of a collective's tensor: for an all-to-all that is what it has of it."""
PCIE, NIC = 32e9, 12.5e9
"""Bytes per second where the catalogue knows no link: PCIe 4.0 x16 by its standard, and a network of 100 Gb/s."""
HOST = "l40s"
"""Whose curve devices without links of their own have: over PCIe and the host."""
MOVED: Values = {"start": 2e-6, "reach": 0.8}
"""Of streaming kernels: most tables that there are have only products, so this is one for all devices."""
FAR: Values = {"start": 20e-6, "hop": 4e-6, "reach": 0.9}
"""Between nodes: 0.9 to 0.96 of the NICs' rate for a gigabyte on up to 64 devices; on 512 and 1,024 what is missing is
3.6 and 5.2 us for each rank (aliyun/SimAI@cef83f9d, inputs/ratio/nic_ratio.csv, as of 8 NICs of 50 GB/s)."""
NEWEST = "newest"
KERNELS = (NEWEST, "flash-2")
"""Of attention: what the tables measured, each device's newest; FlashAttention-2, whose instructions are Ampere's."""
HOPPER = ("h100", "h100-96", "h100-pcie", "h100-nvl", "h200", "h800")
SLOWER: Mapping[str, Mapping[str, float]] = {name: {"flash-2": 1.6} for name in HOPPER}
"""How much longer a kernel takes than the newest. FlashAttention-2 on an H100: 335 forward and 322 TFLOP/s backward at
16k tokens and heads of 128 (Shah et al. 2024, figures 5 and 6), where the curve has 528 and 465."""

LIKE = {"h100-96": "h100", "a800": "a100", "h800": "h100"}
"""Whose curves a device has that is the same chip, with other memory, power or links; where it has less power its
matmuls reach its `best_matmul`."""


@cache
def _file() -> Mapping[str, Any]:
    return tomllib.loads(packaged("tangram.hardware", "curves.toml"))


@cache
def _values(kind: str, key: str, of: str) -> Values:
    known = _file()[kind]
    own: Values | None = known.get(LIKE.get(key, key), {}).get(of)
    return own if own is not None else known["*"][of]


def _own(device: Figures, kind: str, of: str) -> Values | None:
    """What was measured on this very device, where its cluster's file says so."""
    return device.curves.get(kind, {}).get(of)


def _product(device: Figures, kind: str) -> Values:
    own = _own(device, "product", kind)
    if own is None and device.best_matmul:
        return {**_values("product", device.name, _typed(kind)), "reach": device.best_matmul / device.peak("bf16")}
    return own or _values("product", device.name, _typed(kind))


def _attention(device: Figures, kind: str = "bf16") -> Values:
    """Tables have 16 bits alone, a cluster's own curves 32, too."""
    own = _own(device, "attention", "fp32") if kind == "fp32" else None
    return own or _own(device, "attention", "bf16") or _values("attention", device.name, "bf16")


def _moved(device: Figures) -> Values:
    return _own(device, "moved", "any") or MOVED


def _collective(device: Figures, what: str) -> Values:
    key = device.name if device.link_bandwidth else HOST
    return _own(device, "collective", _known(what)) or _values("collective", key, _known(what))


def _typed(kind: str) -> str:
    """The type whose curve counts: no table has others."""
    return kind if kind in ("fp8", "fp4") else "bf16"


def assumed(device: Figures) -> list[str]:
    """What of a device is taken for want of a figure, in words."""
    found = [] if device.link_bandwidth or device.pcie_bandwidth else [f"its link: {PCIE / 1e9:g} GB/s"]
    found += [] if device.nic_bandwidth else [f"its network: {NIC / 1e9:g} GB/s a device"]
    known = measured(device.name) or "product" in device.curves
    return found + ([] if known else ["its kernels: the median of other devices"])


def measured(name: str) -> bool:
    """Whether there are curves of matmuls on a device of the catalogue itself."""
    return LIKE.get(name, name) in _file()["product"]


def spread(device: Figures, kind: str, of: str = "bf16") -> float:
    """Standard deviation of the logarithm of seconds around a curve.

    `kind`: "product", `of` a type; "attention", in any type that of 16 bits; "collective", `of` an operation.
    """
    if kind == "collective":
        if of not in SHARES:
            raise UserError(f'there is no collective "{of}": there are {", ".join(SHARES)}')
        return float(_collective(device, of)["spread"])
    return float((_product(device, device.runs_in(of)) if kind == "product" else _attention(device))["spread"])


def product_seconds(device: Figures, kind: str, m: Any, n: Any, k: Any, count: Any = 1.0) -> Array:
    """Of `count` products in one call, each of m x k by k x n numbers of a type."""
    kind = device.runs_in(kind)
    return product(_product(device, kind), device, kind, m, n, k, count)


def product(p: Values, device: Figures, kind: str, m: Any, n: Any, k: Any, count: Any) -> Array:
    """By given values."""
    flops = 2.0 * m * n * k * count
    fills = m / (m + p["m"]) * (n / (n + p["n"])) * (k / (k + p["k"]))
    nbytes = count * (BYTES[kind] * (m * k + n * k) + 2.0 * m * n)
    moved = nbytes / (_memory(device) * min(p["memory"], 1.0))
    return p["start"] + np.maximum(flops / (device.peak(kind) * min(p["reach"], 1.0) * fills), moved)


@dataclass(frozen=True)
class AttentionSizes:
    """Of one call of fused attention; numbers, or arrays of as many calls."""

    batch: Any
    queries: Any
    keys: Any
    heads: Any
    kv_heads: Any
    width: Any
    """The mean of the heads' dims of keys and of values."""
    causal: Any = True


def attention_seconds(
    device: Figures, kind: str, of: AttentionSizes, *, backward: bool = False, kernel: str = NEWEST
) -> Array:
    """Of one call of fused attention, by a kernel of `KERNELS`."""
    slower = SLOWER.get(device.name, {}).get(kernel, 1.0)
    if device.name in LIKE and device.best_matmul:  # power limits all matmuls
        slower *= _values("product", device.name, "bf16")["reach"] * device.peak("bf16") / device.best_matmul
    return slower * attention(_attention(device, kind), device, kind, of, backward=backward)


def attention(p: Values, device: Figures, kind: str, of: AttentionSizes, *, backward: bool) -> Array:
    """By given values."""
    batch, queries, keys, heads, width = of.batch, of.queries, of.keys, of.heads, of.width
    flops = 4.0 * batch * heads * queries * keys * width * np.where(of.causal, 0.5, 1.0)
    fills = keys / (keys + p["keys"]) * (width / (width + p["width"]))
    peak = device.peak("fp32" if kind == "fp32" else "bf16")
    nbytes = 2.0 * batch * width * (2.0 * heads * queries + 2.0 * of.kv_heads * keys)
    slower = float(p.get("backward", _file()["attention_backward"]["times"]))
    times = 2.5 * slower if backward else 1.0
    bound = nbytes * (3.0 if backward else 1.0) / (_memory(device) * min(_moved(device)["reach"], 1.0))
    return p["start"] + np.maximum(times * flops / (peak * min(p["reach"], 1.0) * fills), bound)


def moved_seconds(device: Figures, nbytes: Any) -> Array:
    """Of one operator that reads and writes so many bytes together."""
    return moved(_moved(device), device, nbytes)


def moved(p: Values, device: Figures, nbytes: Any) -> Array:
    """By given values."""
    return p["start"] + nbytes / (_memory(device) * min(p["reach"], 1.0))


def collective_seconds(
    device: Figures, what: str, nbytes: Any, ranks: Any, near: Any, nic: float | None = None
) -> Array:
    """Of one collective over `ranks`, of which `near` (at most all) are at each fast link; 0 for one rank.

    `nbytes`: of the tensor that the ranks have together, for an all-to-all or p2p of what each has. `nic`: bytes per
    second of a device from other nodes, the catalogue's where None.
    Where neither knows it, `PCIE` and `NIC` are taken (`assumed` says so).
    """
    return link_seconds(device, what, nbytes, ranks, near, nic).max(axis=0)


def link_seconds(device: Figures, what: str, nbytes: Any, ranks: Any, near: Any, nic: float | None = None) -> Array:
    """The same by link, shape (2, ...): for how long the fast one and the NIC are busy, both at the same time.

    Of ranks of several fast links each gets over its own all that comes round in a ring, of an all-to-all what those at
    it have.
    """
    ranks, near = np.asarray(ranks, float), np.minimum(near, ranks)
    links = np.zeros((2, *np.broadcast(nbytes, ranks, near).shape))
    if not (ranks > 1).any():
        return links
    far, several = near < ranks, near > 1
    inside = collective(_collective(device, what), device, what, nbytes, ranks, near)
    if far.any():
        if what == "all-to-all":
            inside = inside * np.where(far, (near - 1) / np.maximum(ranks - 1, 1), 1.0)
        links[1] = np.where(far, far_seconds(device, what, nbytes, ranks, near, nic), 0.0)
    links[0] = np.where(several, inside, 0.0)
    return links


def _known(what: str) -> str:
    return "all-gather" if what == "p2p" else what


def collective(p: Values, device: Figures, what: str, nbytes: Any, ranks: Any, near: Any = None) -> Array:
    """Inside a domain, by given values; `near`: how many share what they meet at, by default all."""
    rate = device.link_bandwidth or device.pcie_bandwidth or PCIE
    # Beyond two, ranks that meet at a host share what it carries; with links of their own `crowd` is 0.
    crowded = (2 / np.maximum(ranks if near is None else near, 2.0)) ** p.get("crowd", 0.0)
    part = 1.0 if what == "p2p" else (ranks - 1) / np.maximum(ranks, 1)
    return p["start"] + p["hop"] * (ranks - 1) + SHARES[what] * nbytes * part / (rate * p["reach"] * crowded)


def far_seconds(device: Figures, what: str, nbytes: Any, ranks: Array, near: Array, nic: float | None) -> Array:
    """Over a network alone, of which each device brings its own part: of a ring through groups of `near` ranks each,
    these carry together what goes from group to group."""
    rate = nic or device.nic_bandwidth or NIC
    if what == "p2p":
        return FAR["start"] + nbytes / (rate * FAR["reach"])
    if what == "all-to-all":
        return FAR["start"] + FAR["hop"] * ranks / near + nbytes * (ranks - near) / ranks / (rate * FAR["reach"])
    each = SHARES[what] * nbytes * (ranks - 1) / np.maximum(ranks, 1) / (rate * near * FAR["reach"])
    return FAR["start"] + FAR["hop"] * ranks * SHARES[what] + each


def _memory(device: Figures) -> float:
    if device.memory_bandwidth is None:
        raise UserError(f"the catalogue knows no memory bandwidth of {device.label}: give it in the cluster file")
    return device.memory_bandwidth
