"""The catalogue of devices: what each can do at best, as its maker says; unknown figures are None, never guessed.

`devices.toml` has the figures with their sources. A device is found by its key there, by its label, or by what tables
of published runs call it. Loads no torch.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any, cast

from tangram.errors import UserError

__all__ = ["Figures", "device", "devices"]


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
    memory_bytes: float | None = None
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

    def peak(self, kind: str) -> float:
        """Operations per second of products in a type; where a device has no units for it, in the next wider one.

        Raises UserError where not even 16 bits are known.
        """
        order = ("fp4", "fp8", "bf16", "fp16") if kind != "fp32" else ("fp32", "tf32")
        wider = order[order.index(kind) :] if kind in order else order
        for one in (*wider, "bf16", "fp16"):
            rate: float | None = getattr(self, one)
            if rate is not None:
                return rate / (8 if kind == "fp32" and one in ("bf16", "fp16") else 1)
        raise UserError(f"the catalogue has no rate of products of {self.label}: give one in the cluster file")

    @property
    def domain(self) -> int:
        """How many devices are near each other; one where that is unknown."""
        return self.link_domain or 1


@cache
def tables() -> Mapping[str, Mapping[str, Any]]:
    """The file as it is."""
    return tomllib.loads(resources.files("tangram.hardware").joinpath("devices.toml").read_text(encoding="utf-8"))


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
    """A device by its key, its label, or what tables of runs call it. Raises UserError with the nearest names."""
    said = name.strip().lower()
    for key, table in tables().items():
        if said in (key, str(table.get("label", key)).lower()):
            return devices()[key]
    for key, table in tables().items():
        if any(said.startswith(one.lower()) for one in table.get("called", ())):
            return devices()[key]
    near = difflib.get_close_matches(said, list(devices()), 3, 0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(devices())}"
    raise UserError(f'there is no device "{name}" in the catalogue: {hint}')
