"""The catalogue of devices: what each can do at best, as its maker says; unknown figures are None, never guessed.

`devices.toml` has the figures with their sources. A device is found by its key there, by its label, or by what tables
of published runs call it. Loads no torch.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, cast

from tangram.errors import UserError
from tangram.text import packaged


@dataclass(frozen=True)
class Figures:
    """One device. Rates per second, dense, one direction; None: not known."""

    name: str
    """Its key in the catalogue."""
    label: str
    bf16: float | None = None
    """Operations of products in this type; so with the next ones."""
    fp16: float | None = None
    tf32: float | None = None
    fp8: float | None = None
    fp4: float | None = None
    fp32: float | None = None
    best_matmul: float | None = None
    """The most that anyone measured of matmuls in 16 bits, where no table of matmuls is published."""
    memory_bytes: float | None = None
    usable_bytes: float | None = None
    """What of it the driver gives to programs, where that is known."""
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None
    """Bytes that a device receives from others near it."""
    link_domain: int | None = None
    """How many devices are near each other."""
    nic_bandwidth: float | None = None
    """Bytes that a device receives from farther ones."""
    pcie_bandwidth: float | None = None
    power_watts: float | None = None
    figures: str = ""
    """Where they are from."""
    curves: Mapping[str, Mapping[str, Mapping[str, float]]] = field(
        default_factory=dict[str, Mapping[str, Mapping[str, float]]], hash=False
    )
    """Of its own (`hardware.catalogue.curves`), by kind and type, where a cluster's file has some."""

    def peak(self, kind: str) -> float:
        """Operations per second of products in a type; where a device has no units for it, in the next wider one.

        An eighth of the rate in 16 bits for 32 bits of which nothing is known. Raises UserError where not even 16 bits
        are known, and for a type that is none.
        """
        for one in wider(kind):
            rate: float | None = getattr(self, one)
            if rate is not None:
                return rate / (8 if kind in ("fp32", "tf32") and one in ("bf16", "fp16") else 1)
        raise UserError(f"the catalogue has no rate of products of {self.label}: give one in the cluster file")

    def runs_in(self, kind: str) -> str:
        """The type that products of a type run in: the narrowest from it on that has units; 16 bits where as quick.

        The type itself for 32 bits, and where none has units.
        """
        known = [one for one in wider(kind) if getattr(self, one) is not None]
        if not known or kind in ("fp32", "tf32"):
            return kind
        return "bf16" if kind in ("fp4", "fp8") and self.peak(kind) <= (self.bf16 or 0) else known[0]

    @property
    def usable(self) -> float | None:
        """Bytes that programs may have: what drivers report, else the maker's figure."""
        return self.usable_bytes or self.memory_bytes

    @property
    def domain(self) -> int:
        """How many devices are near each other; one where that is unknown."""
        return self.link_domain or 1


WIDER = {
    "fp4": ("fp4", "fp8", "bf16", "fp16"),
    "fp8": ("fp8", "bf16", "fp16"),
    "bf16": ("bf16", "fp16"),
    "fp16": ("fp16", "bf16"),
    "tf32": ("tf32", "fp32", "bf16", "fp16"),
    "fp32": ("fp32", "tf32", "bf16", "fp16"),
}
"""In which types products of a type may run, the best first."""


def wider(kind: str) -> tuple[str, ...]:
    """A row of `WIDER`; UserError for what is no type."""
    if kind not in WIDER:
        raise UserError(f'there is no type "{kind}" of products: there are {", ".join(WIDER)}')
    return WIDER[kind]


@cache
def tables() -> Mapping[str, Mapping[str, Any]]:
    """The file as it is."""
    return tomllib.loads(packaged("tangram.hardware", "devices.toml"))


@cache
def devices() -> Mapping[str, Figures]:
    """All devices by key."""
    known = {one.name for one in fields(Figures)} - {"name"}
    return {
        key: Figures(**cast(Any, {"name": key, "label": key, **{name: table[name] for name in known & set(table)}}))
        for key, table in tables().items()
    }


@cache
def device(name: str) -> Figures:
    """A device by its key, its label, or what tables of runs call it, with a remark in parentheses maybe: whole, so
    that "V100-16+T4" is none. Raises UserError with the nearest names."""
    said = name.strip().lower()
    for key, table in tables().items():
        if said in (key, str(table.get("label", key)).lower()):
            return devices()[key]
    for key, table in tables().items():
        if any(re.fullmatch(rf"{re.escape(one.lower())}( ?\(.*\))?", said) for one in table.get("called", ())):
            return devices()[key]
    near = difflib.get_close_matches(said, list(devices()), 3, 0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(devices())}"
    raise UserError(f'there is no device "{name}" in the catalogue: {hint}')
