"""Fits the curves of `hardware/curves.toml` to the published kernel tables, and says how well they fit.

Run as `python -m bench._planner.curves` to write the file anew. Times are fitted in logarithms with a soft loss; half
of the shapes, by their place in the table, are held out to say what the error is on others.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tangram.hardware.catalogue.curves import (
    ATTENTION,
    COLLECTIVE,
    PRODUCT,
    AttentionSizes,
    attention,
    collective,
    product,
)
from tangram.hardware.catalogue.devices import Figures, device
from tangram.hardware.catalogue.owncurves import Fit, fit

Floats = NDArray[np.float64]
ROOT = Path(__file__).parents[2]
TABLES = ROOT / "data" / "published" / "calibration"
KEYS = {
    "a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300",
    "gb200": "gb200", "gb300": "gb300", "l40s": "l40s",
}  # fmt: skip
"""What the tables call the devices of the catalogue, those of which the maker's best rates are known."""
TYPES = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "fp4"}
OPS = {
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
}  # fmt: skip
WITHOUT_LINKS = ("l40s",)
"""Over PCIe and the host: a fifteenth of what the standard says, and no model for devices with links."""


def table(name: str) -> list[dict[str, str]]:
    """The rows of one of the tables."""
    with gzip.open(TABLES / f"{name}.csv.gz", "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def columns(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> dict[str, Floats]:
    """Of a table, as arrays."""
    return {name: np.array([float(row[name]) for row in rows]) for name in names}


def products(only: tuple[str, str] | None = None) -> list[Fit]:
    """Of matmuls above a thousand million operations; `only` of one device and type."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in table("gemm_aic"):
        if row["gpu"] in KEYS and row["dtype"] in TYPES:
            groups[KEYS[row["gpu"]], TYPES[row["dtype"]]].append(row)
    found: list[Fit] = []
    for (key, kind), rows in sorted(groups.items()):
        if only is not None and only != (key, kind):
            continue
        x = columns(rows, ("m", "n", "k"))
        t = columns(rows, ("latency_ms",))["latency_ms"] / 1e3
        big = (2 * x["m"] * x["n"] * x["k"] > 1e9) & (x["m"] >= 64)
        x, t = {name: part[big] for name, part in x.items()}, t[big]
        of = device(key)

        def call(p: Mapping[str, float], x: Mapping[str, Floats], of: Figures = of, kind: str = kind) -> Floats:
            return product(p, of, kind, x["m"], x["n"], x["k"], 1.0)

        found.append(fit("product", key, kind, PRODUCT, call, x, t))
    return found


def attentions() -> list[Fit]:
    """Of causal attention, forward."""
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in table("attention_fwd_aic"):
        if row["gpu"] in KEYS and float(row["seq"]) >= 256 and float(row["latency_ms"]) > 0.02:
            groups[KEYS[row["gpu"]]].append(row)
    found: list[Fit] = []
    for key, rows in sorted(groups.items()):
        x = columns(rows, ("batch", "seq", "heads", "kv_heads", "head_dim"))
        t = columns(rows, ("latency_ms",))["latency_ms"] / 1e3
        of = device(key)

        def call(p: Mapping[str, float], x: Mapping[str, Floats], of: Figures = of) -> Floats:
            sizes = AttentionSizes(x["batch"], x["seq"], x["seq"], x["heads"], x["kv_heads"], x["head_dim"])
            return attention(p, of, "bf16", sizes, backward=False)

        found.append(fit("attention", key, "bf16", ATTENTION, call, x, t))
    return found


def backward_of_attention() -> float:
    """How much slower an operation of the backward is than one of the forward: the median over the same shapes."""
    rows = [row for row in table("kernel_efficiency") if row["op"].startswith("sdp")]
    forward = {(row["gpu"], row["shape"]): float(row["efficiency"]) for row in rows if row["op"] == "sdp_fwd"}
    ratios = [
        forward[row["gpu"], row["shape"]] / float(row["efficiency"])
        for row in rows
        if row["op"] == "sdp_bwd" and (row["gpu"], row["shape"]) in forward
    ]
    return float(np.median(ratios)) if ratios else 1.2


def collectives() -> list[Fit]:
    """Of collectives inside a domain, from 64 KiB, by operation."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    newest: dict[str, str] = {}
    for row in table("nccl_aic"):
        newest[row["gpu"]] = max(newest.get(row["gpu"], ""), row["nccl"])
    for row in table("nccl_aic"):
        if row["gpu"] in KEYS and row["op"] in OPS and row["nccl"] == newest[row["gpu"]]:
            groups[KEYS[row["gpu"]], OPS[row["op"]]].append(row)
    found: list[Fit] = []
    for (key, what), rows in sorted(groups.items()):
        x = columns(rows, ("n", "bytes_if_elements"))
        t = columns(rows, ("latency_ms",))["latency_ms"] / 1e3
        big = (x["bytes_if_elements"] >= 65536) & (t > 0)
        x, t = {name: part[big] for name, part in x.items()}, t[big]
        of = device(key)

        def call(p: Mapping[str, float], x: Mapping[str, Floats], of: Figures = of, what: str = what) -> Floats:
            return collective(p, of, what, x["bytes_if_elements"], x["n"])

        start = {**COLLECTIVE, "reach": 0.5, "crowd": 2.0} if key in WITHOUT_LINKS else COLLECTIVE
        found.append(fit("collective", key, what, start, call, x, t))
    return found


def written(fits: Sequence[Fit], backward: float) -> str:
    """The file: each curve, and under "*" the median of all for devices without measurements."""
    lines = [
        "# Fitted by bench/_planner/curves.py to data/published/calibration: change that, not this.",
        '# What the values mean: hardware/catalogue/curves.py. "*" are devices without measurements of their own.',
        "",
        "[attention_backward]",
        f"times = {backward:.4g}",
        "",
    ]
    for kind in ("product", "attention", "collective"):
        own = [one for one in fits if one.kind == kind]
        for of in sorted({one.of for one in own}):
            alike = [one for one in own if one.of == of and (kind != "collective" or one.device not in WITHOUT_LINKS)]
            usual = {name: float(np.median([one.values[name] for one in alike])) for name in alike[0].values}
            wide = float(np.median([one.spread for one in alike])) + 0.15
            lines += _table(kind, "*", of, usual, wide)
            for one in (one for one in own if one.of == of):
                lines += _table(kind, one.device, of, one.values, one.spread)
    return "\n".join(lines).rstrip() + "\n"


def _table(kind: str, key: str, of: str, values: Mapping[str, float], spread: float) -> list[str]:
    said = [f"{name} = {value:.4g}" for name, value in values.items()]
    return [f'[{kind}."{key}".{of}]', *said, f"spread = {spread:.3g}", ""]


def main() -> None:
    """Write the file and print the errors."""
    fits = [*products(), *attentions(), *collectives()]
    path = ROOT / "src" / "tangram" / "hardware" / "curves.toml"
    path.write_text(written(fits, backward_of_attention()), encoding="utf-8")
    print("| curve | device | of | shapes | median | 90th percentile | median of the held-out half |")
    print("|---|---|---|---|---|---|---|")
    for one in fits:
        errors = f"{one.median:.1%} | {one.worst:.1%} | {one.held_out:.1%}"
        print(f"| {one.kind} | {one.device} | {one.of} | {one.rows} | {errors} |")


if __name__ == "__main__":
    main()
