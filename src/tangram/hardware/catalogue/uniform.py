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
UNSAID = r"nvidia|geforce|tesla|amd|instinct|intel|huawei|sxm\d?|hbm\d?e?"
"""Words of a device's name that are left out here."""
NEAR = 0.1
"""By how much of it a memory that a name says may differ: an "80 GB" device has 85e9 bytes."""
FORM = "DEVICE-8x32 (32 nodes of 8) or DEVICEx4 of a device of the catalogue"
LIKE = "h100-8x8"
PORT = 12.5e9
"""Bytes per second of a node's network where the catalogue has none of a device: 100 Gb/s, as nodes of A10G have."""


def tables_of(name: str, like: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tables of the file that a name stands for; None for a name of another form.

    `like`: those of `LIKE`, with a link within a node and one between nodes. Raises UserError for a device or a node
    that is not known.
    """
    found = _read(" ".join(re.sub(r"[*×]", "x", name.lower()).split()))
    if found is None:
        return None
    given, near, nodes = found
    if near < 1 or nodes < 1:
        raise UserError(f"{name}: there is no cluster of {nodes} nodes of {near} devices: give one of each at least")
    one = _named(given) or _device(name, given)
    within, between = like["links"]
    links: list[dict[str, Any]] = []
    if near > 1:
        domain = one.link_domain or NODE
        rate = _within(name, one, near, f"{given}-{domain}x{near * nodes // domain}")
        links.append({**within, "ranks": near, "rate": rate})
    if nodes > 1:
        links.append({**between, "ranks": near * nodes, "rate": _between(one, near)})
    if not links:  # of one device, which sends nothing
        links.append({**within, "ranks": 1})
    return {**like, "ranks": near * nodes, "device": {**like["device"], "name": one.name}, "links": links}


def suggested(name: str) -> str:
    """A name as it is read, of the device that one speaks of which is not, or of that which is called most alike; ""
    where it speaks of none."""
    said = name.lower()
    for key in sorted(devices(), key=len, reverse=True):
        if re.search(rf"(?<![a-z0-9]){key.replace('-', '[-_ ]?')}(?![a-z0-9])", said):
            return f"{key}x8"
    plain = {key.replace("-", "").removeprefix("rtx"): key for key in devices()}
    near = difflib.get_close_matches(re.sub(r"[-_ ]|rtx", "", said), plain, 1, 0.7)
    return f"{plain[near[0]]}x8" if near else ""


def _read(name: str) -> tuple[str, int, int] | None:
    """Device, devices of a node, and nodes: of "h100-8x256", "h100x8", "8xh100" or "gb200-nvl72". What is before the
    last x is a device where the catalogue has one, as "a100-40x4"."""
    counted: list[tuple[str, int]] = []
    # Names of devices have numbers of their own, so what the catalogue knows decides where a name ends.
    for pattern, at, count in ((r"(.+?)[-_ ]?x ?(\d{1,9})", 1, 2), (r"(\d{1,9})[-_ ]?x[-_ ]?(.+)", 2, 1)):
        found = re.fullmatch(pattern, name, re.ASCII)
        if found is not None:
            counted.append((found[at], int(found[count])))
            if one := _named(found[at]):
                return (found[at], *_nodes(name, found[at], int(found[count]), one.domain))
    if found := re.fullmatch(r"(.+?)[-_ ]?nvl(\d{1,9})(?:x(\d{1,9}))?", name, re.ASCII):
        return found[1], int(found[2]), int(found[3] or 1)
    if found := re.fullmatch(r"(.+)[-_](\d{1,9})x(\d{1,9})", name, re.ASCII):
        one = _named(found[1])
        return found[1], *_linked(int(found[2]), int(found[3]), one.domain if one is not None else 0)
    given = max((one for one, _ in counted), key=lambda one: (not one.isdigit(), len(one)), default="")
    return (given, 1, 1) if len(given) > 1 else None  # which no device is called


def _nodes(name: str, given: str, ranks: int, domain: int) -> tuple[int, int]:
    """Devices of a node, and nodes, of so many: as many as are linked, eight of most. Raises UserError."""
    most = max(domain, NODE)
    near = ranks if ranks <= most else next(size for size in range(most, 0, -1) if ranks % size == 0)
    if ranks > most and near < NODE:
        raise UserError(f"{name}: {ranks} devices are no whole nodes of {NODE}: write {given}-4x{-(-ranks // 4)}, say")
    return near, ranks // max(near, 1)


def _linked(near: int, nodes: int, domain: int) -> tuple[int, int]:
    """The same of nodes that a rack links, as 18 trays of 4 GB200 are: as many of them as a rack has are one."""
    if near < 1 or domain <= NODE:
        return near, nodes
    together = next((size for size in range(domain // near, 1, -1) if nodes % size == 0), 1)
    return near * together, nodes // together


def _named(given: str) -> Figures | None:
    """The device that is called so: spaces, dashes, makers and forms apart, with its memory maybe: "RTX 4090",
    "NVIDIA-A100-SXM4-40GB"."""
    words = [one for one in re.split(r"[-_ ]+", given) if not re.fullmatch(UNSAID, one)]
    memory = next((int(one[1]) for word in words if (one := re.fullmatch(r"(\d+)gi?b?", word))), 0)
    plain = "".join(word for word in words if not re.fullmatch(r"\d+gi?b?", word))
    for key, one in devices().items():
        own = key.replace("-", "")
        if own in (plain, f"rtx{plain}", f"{plain}{memory or ''}") and _has(one, memory):
            return one
    try:
        found = device(given)
    except UserError:
        return None
    size = re.search(r"-(\d+)$", given)  # of those that are called by their memory, "v100-16" is not the other's
    return None if size and not _has(found, int(size[1])) else found


def _has(one: Figures, memory: int) -> bool:
    """Whether that is its memory, in thousands or in units of 2^30 bytes; 0: none is said."""
    return not memory or any(abs(memory * unit / (one.memory_bytes or 1) - 1) <= NEAR for unit in (1e9, 2**30))


def _device(name: str, given: str) -> Figures:
    if given not in devices():
        close = difflib.get_close_matches(given, tuple(devices()), 3)
        close = close or difflib.get_close_matches(f"rtx-{given}", tuple(devices()), 3, 0.8)
        close = close or [suggested(given).removesuffix("x8")]
        others = f"there are {', '.join(devices())}; of another device write a file of the cluster"
        hint = f"did you mean {' or '.join(close)}?" if close[0] else others
        raise UserError(f'{name}: the catalogue has no device "{given}": {hint}')
    return devices()[given]


def _within(name: str, one: Figures, ranks: int, as_many: str) -> float:
    """Bytes per second from devices of the same node: of more cards than a bridge joins, those between the bridges.

    `as_many`: the name of as many devices in nodes as they are built.
    """
    over_host = one.link_bandwidth is None or ranks > (one.link_domain or NODE) == BRIDGED
    if over_host and one.pcie_bandwidth and ranks <= NODE:
        return one.pcie_bandwidth / 2
    if one.link_bandwidth is None or one.link_domain is None:
        raise UserError(
            f"{name}: the catalogue knows no link within a node of {one.label}: write a file of the cluster"
        )
    if ranks > one.link_domain:
        raise UserError(
            f"{name}: the catalogue knows {one.label} to be linked to {one.link_domain - 1} others at most: give nodes "
            f"of {one.link_domain}, as {as_many}, or write a file"
        )
    return one.link_bandwidth


def _between(one: Figures, near: int) -> float:
    """Bytes per second from devices of other nodes. Of a card that comes without a network its node has one port,
    as is taken."""
    return one.nic_bandwidth or PORT / near
