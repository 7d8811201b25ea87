"""A cluster by its name alone: equal nodes of a device of the catalogue, as "h100-8x256" or "b200-8x1".

The device's own figures, the link within a node and a NIC for each device are the catalogue's. What programs reach of
rates, and how long a message takes, is that of a cluster whose file has it with its sources (`LIKE`); who knows better
writes a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from tangram.errors import UserError
from tangram.hardware.catalogue.devices import Figures, device, devices

BRIDGED = 2
"""Cards at a bridge; a node of more of them has its host between, over which a card reaches half of PCIe."""
NODE = 8
"""Devices of a node where only their number is said, and there are more."""
NEAR = 0.1
"""By how much of it a memory that a name says may differ: an "80 GB" device has 85e9 bytes."""
FORM = "DEVICE-8x32 (32 nodes of 8) or DEVICEx4 of a device of the catalogue"
LIKE = "h100-8x8"


def tables_of(name: str, like: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tables of the file that a name stands for; None for a name of another form.

    `like`: those of `LIKE`, with a link within a node and one between nodes. Raises UserError for a device or a node
    that is not known.
    """
    found = _read(name.strip().lower())
    if found is None:
        return None
    given, near, nodes = found
    if near < 1 or nodes < 1:
        raise UserError(f"{name}: there is no cluster of {nodes} nodes of {near} devices: give one of each at least")
    one = _named(given) or _device(name, given)
    within, between = like["links"]
    links: list[dict[str, Any]] = []
    if near > 1:
        domain = one.link_domain or near
        rate = _within(name, one, near, f"{given}-{domain}x{near * nodes // domain}")
        links.append({**within, "ranks": near, "rate": rate})
    if nodes > 1:
        links.append({**between, "ranks": near * nodes, "rate": _between(name, one)})
    if not links:  # of one device, which sends nothing
        links.append({**within, "ranks": 1})
    return {**like, "ranks": near * nodes, "device": {**like["device"], "name": one.name}, "links": links}


def _read(name: str) -> tuple[str, int, int] | None:
    """Device, devices of a node, and nodes: of "h100-8x256", "h100x8" or "8xh100". What is before the last x is a
    device where the catalogue has one, as "a100-40x4"."""
    for pattern, at, count in ((r"(.+?)[- ]?x(\d{1,9})", 1, 2), (r"(\d{1,9})[- ]?x[- ]?(.+)", 2, 1)):
        found = re.fullmatch(pattern, name, re.ASCII)
        if found is not None and _named(found[at]):
            ranks = int(found[count])
            if ranks > NODE and ranks % NODE:
                nodes = f"{found[at]}-4x{-(-ranks // 4)}"
                raise UserError(f"{name}: {ranks} devices are no whole nodes of {NODE}: write {nodes}, say")
            return (found[at], NODE, ranks // NODE) if ranks > NODE else (found[at], ranks, 1)
    found = re.fullmatch(r"(.+)-(\d{1,9})x(\d{1,9})", name, re.ASCII)
    return found and (found[1], int(found[2]), int(found[3]))


def _named(given: str) -> Figures | None:
    """The device that is called so, spaces and dashes apart: "RTX 4090", "rtx4090"."""
    plain = re.sub(r"[-_ ]", "", given)
    if found := next((one for key, one in devices().items() if key.replace("-", "") == plain), None):
        return found
    try:
        found = device(given)
    except UserError:
        return None
    size = re.search(r"-(\d+)$", given)  # of those that are called by their memory, "v100-16" is not the other's
    return None if size and abs(int(size[1]) * 2**30 / (found.memory_bytes or 1) - 1) > NEAR else found


def _device(name: str, given: str) -> Figures:
    if given not in devices():
        close = difflib.get_close_matches(given, tuple(devices()), 3)
        others = f"there are {', '.join(devices())}; of another device write a file of the cluster"
        hint = f"did you mean {' or '.join(close)}?" if close else others
        raise UserError(f'{name}: the catalogue has no device "{given}": {hint}')
    return devices()[given]


def _within(name: str, one: Figures, ranks: int, as_many: str) -> float:
    """Bytes per second from devices of the same node: of more cards than a bridge joins, those between the bridges.

    `as_many`: the name of as many devices in nodes as they are built.
    """
    if one.link_bandwidth is None or one.link_domain is None:
        raise UserError(
            f"{name}: the catalogue knows no link within a node of {one.label}: write a file of the cluster"
        )
    if ranks > one.link_domain == BRIDGED and one.pcie_bandwidth:
        return one.pcie_bandwidth / 2
    if ranks > one.link_domain:
        raise UserError(
            f"{name}: the catalogue knows {one.label} to be linked to {one.link_domain - 1} others at most: give nodes "
            f"of {one.link_domain}, as {as_many}, or write a file"
        )
    return one.link_bandwidth


def _between(name: str, one: Figures) -> float:
    """Bytes per second from devices of other nodes."""
    if one.nic_bandwidth is None:
        raise UserError(
            f"{name}: the catalogue knows no network between nodes of {one.label}: write a file of the cluster"
        )
    return one.nic_bandwidth
