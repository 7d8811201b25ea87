"""A cluster by its name alone: equal nodes of a device of the catalogue, as "h100-8x256" or "b200-8x1".

The device's own figures, the link within a node and a NIC for each device are the catalogue's. What links reach of
their rates and how long a message takes is what `clusters/h100-8x8.toml` has of H100, with its sources: the planner's
curves of collectives are used beside, where a device has any. Who knows better writes a file.
"""

from __future__ import annotations

import difflib
import re

from tangram.errors import UserError
from tangram.hardware.devices import Figures, devices

__all__ = ["FORM", "text_of"]

FORM = "DEVICE-8x32 (32 nodes of 8) of a device of the catalogue"
LINK = '[[links]]\nname = "{}"\nranks = {}\nrate = {}\nreaches = {}\nlatency = {}\nhop = {}\n'
NEAR, FAR = (0.745, 4.5e-6, 0.75e-6), (0.86, 6.6e-6, 2.7e-6)
"""Share of the rate that is reached, seconds of a collective, and of each other rank in it."""
REACHES = "reaches = 0.85\nmemory_reaches = 0.9"


def text_of(name: str) -> str | None:
    """The file that a name stands for; None for a name of another form.

    Raises UserError for a device or a node that is not known.
    """
    found = re.fullmatch(r"(.+)-(\d{1,9})x(\d{1,9})", name.strip().lower(), re.ASCII)
    if found is None:
        return None
    near, nodes = int(found[2]), int(found[3])
    if near < 1 or nodes < 1:
        raise UserError(f"{name}: there is no cluster of {nodes} nodes of {near} devices: give one of each at least")
    one = _device(name, found[1])
    links: list[str] = []
    if near > 1 or nodes == 1:
        links.append(_link(name, one, "near", near))
    if nodes > 1:
        links.append(_link(name, one, "far", near * nodes))
    head = f'version = 1\nranks = {near * nodes}\n[device]\nname = "{one.name}"\n{REACHES}\n'
    return head + "".join(links)


def _device(name: str, given: str) -> Figures:
    if given not in devices():
        close = difflib.get_close_matches(given, tuple(devices()), 3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(devices())}"
        raise UserError(f'{name}: the catalogue has no device "{given}": {hint}')
    return devices()[given]


def _link(name: str, one: Figures, where: str, ranks: int) -> str:
    """To devices of the same node, or of others."""
    if where == "near" and ranks == 1:  # nothing is ever sent
        return LINK.format("none", 1, one.link_bandwidth or 1e9, *NEAR)
    if where == "near" and one.link_domain is not None and ranks > one.link_domain:
        raise UserError(
            f"{name}: the catalogue knows {one.label} to be linked to {one.link_domain - 1} others at most: give nodes "
            f"of {one.link_domain}, or write a file"
        )
    rate = one.link_bandwidth if where == "near" else one.nic_bandwidth
    if rate is None or (where == "near" and one.link_domain is None):
        what = "link within a node" if where == "near" else "network between nodes"
        raise UserError(f"{name}: the catalogue knows no {what} of {one.label}: write a file of the cluster")
    return LINK.format("node" if where == "near" else "network", ranks, rate, *(NEAR if where == "near" else FAR))
