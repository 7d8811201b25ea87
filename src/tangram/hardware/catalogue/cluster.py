"""A cluster from its file: devices, links by level, and what work and collectives cost there.

A file names so many ranks, what one device can do, and the links that ranks meet at, from the nearest to the farthest:
64 ranks of which 8 that follow each other have NVLink, and all a network. The axis of a mesh costs what the nearest
link costs that all its ranks meet at. Collectives are rings: latency, so much for each other rank, bytes by the rate.

The trade-off: two numbers for a link are wrong by tens of percent in the middle of its range, where kernels change from
one protocol to another; they are right about what matters here, which of two layouts is cheaper.
"""

from __future__ import annotations

import difflib
import itertools
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from tangram.errors import UserError
from tangram.hardware.catalogue import uniform
from tangram.hardware.catalogue.devices import tables as catalogue
from tangram.text import nearest_hint, packaged

if TYPE_CHECKING:
    from tangram.hardware.catalogue.owncurves import Curves
    from tangram.layout import Mesh

T = TypeVar("T")
VERSION = 1
TYPES = ("bf16", "fp32")
MOST_RANKS = 10_000_000
SMALLEST, LARGEST = 1e-30, 1e30
"""Of rates, sizes and times: beyond these a figure is a mistake, and products of several would overflow."""
HOST = ("rate", "bandwidth", "memory_bytes")
"""Bytes per second to and from a device; that its part of the processors moves; bytes of memory for each device."""
SHARES = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0, "all-to-all": 1.0, "permute": 1.0}
"""How often a rank receives (k - 1) / k of a collective's tensor: for an all-to-all that is what it has of it."""


@dataclass(frozen=True)
class Device:
    """What one rank computes with. Rates per second at best; `reaches` the share that programs reach."""

    name: str
    flops: Mapping[str, float]
    """Of products, by type: "bf16", "fp32"."""
    memory_bytes: float
    memory_bandwidth: float
    reaches: float = 1.0
    memory_reaches: float = 1.0


@dataclass(frozen=True)
class Link:
    """What ranks that follow each other meet at."""

    name: str
    ranks: int
    """How many: those of which the first is a multiple of it."""
    rate: float
    """Bytes per second that a rank receives at best."""
    reaches: float
    latency: float
    """Seconds of a collective for nothing."""
    hop: float
    """Seconds more for each other rank in it."""

    @property
    def reached(self) -> float:
        """Bytes per second that a rank receives."""
        return self.rate * self.reaches


class AxisLink(NamedTuple):
    """What an axis is linked by."""

    latency: float
    """Seconds of a collective, however small."""
    rate: float
    """Bytes per second that a rank receives."""


@dataclass(frozen=True)
class Cluster:
    """So many ranks, one device each, and their links from the nearest to the farthest."""

    name: str
    ranks: int
    device: Device
    links: tuple[Link, ...]
    curves: Mapping[str, Mapping[str, Mapping[str, float]]] = field(
        default_factory=dict[str, Mapping[str, Mapping[str, float]]]
    )
    """Of its device, where the file has some: by kind and type the values of `hardware.catalogue.curves`."""
    host: Mapping[str, float] = field(default_factory=dict[str, float])
    """What a device has of its host, as far as the file says: `HOST`."""

    def link(self, k: int, stride: int = 1) -> Link:
        """What `k` ranks of which each is `stride` after the one before meet at.

        Raises UserError where the cluster is smaller than that.
        """
        for link in self.links:
            if k * stride <= link.ranks:
                return link
        raise UserError(f"{self.name} has {self.ranks} ranks, and an axis spans {k * stride}: take a smaller mesh")


# ---------------------------------------------------------------- what things cost


def collective_seconds(cluster: Cluster, what: str, nbytes: float, k: int, stride: int = 1) -> float:
    """Seconds of one collective over an axis of `k` ranks, each `stride` after the one before.

    `nbytes`: of the tensor that the ranks have together, for an all-to-all or permute of what each has. What sends
    nothing ("slice", "zero", "") takes no time. Raises UserError for an axis that is larger than the cluster.
    """
    times = SHARES.get(what, 0.0)
    if k == 1 or not times:
        return 0.0
    link = cluster.link(k, stride)
    return link.latency + times * link.hop * (k - 1) + times * nbytes * (k - 1) / k / link.reached


def axis_links(cluster: Cluster, mesh: Mesh) -> dict[str, AxisLink]:
    """For each axis of a mesh its link, as sequences of collectives are chosen by.

    Raises UserError where the mesh has more ranks than the cluster.
    """
    found: dict[str, AxisLink] = {}
    for axis, (k, stride) in mesh.axes.items():
        link = cluster.link(k, stride)
        found[axis] = AxisLink(link.latency + link.hop * (k - 1), link.reached)
    return found


def product_seconds(cluster: Cluster, flops: float, kind: str = "bf16") -> float:
    """Seconds of a matmul of so many operations on one device.

    Raises UserError for a type that the device has no rate of.
    """
    return flops / (_flops(cluster, kind) * cluster.device.reaches)


def _flops(cluster: Cluster, kind: str) -> float:
    if kind not in cluster.device.flops:
        known = ", ".join(cluster.device.flops) or "none"
        raise UserError(
            f"{cluster.name} has no rate of {kind} products: it has {known}; give device.{kind} in its file"
        )
    return cluster.device.flops[kind]


def moved_seconds(cluster: Cluster, nbytes: float) -> float:
    """Seconds in which an operator reads and writes so many bytes together."""
    return nbytes / (cluster.device.memory_bandwidth * cluster.device.memory_reaches)


def rates(cluster: Cluster, axis_size: int, stride: int = 1, kind: str = "bf16") -> tuple[float, float]:
    """What a device does while it receives one byte over an axis: operations of products, bytes that it moves.

    Of the best rates of all three: what programs reach is much the same share of each.
    """
    rate = cluster.link(axis_size, stride).rate
    return _flops(cluster, kind) / rate, cluster.device.memory_bandwidth / rate


# ---------------------------------------------------------------- files


def names() -> tuple[str, ...]:
    """The clusters that come with Tangram."""
    found = resources.files("tangram.hardware").joinpath("clusters").iterdir()
    return tuple(sorted(one.name.removesuffix(".toml") for one in found if one.name.endswith(".toml")))


def builtin(name: str) -> Cluster:
    """A cluster that comes with Tangram, or of equal nodes as "h100-8x256". Raises UserError for another name."""
    if name not in names():
        if (tables := uniform.tables_of(name, tomllib.loads(_text(uniform.LIKE)))) is not None:
            return _of_tables(tables, name)
        device = uniform.suggested(name)
        near = nearest_hint(name, names()) or (f" (did you mean {device!r}?)" if device else "")
        raise UserError(f"there is no cluster {name!r}{near}: there are {', '.join(names())}, and {uniform.FORM}")
    return _cluster(_text(name), name)


def _text(name: str) -> str:
    """The file of a cluster that comes with Tangram."""
    return packaged("tangram.hardware", "clusters", f"{name}.toml")


def load(path: Path | str) -> Cluster:
    """A cluster from a file of one's own, or by name. Raises UserError for any mistake in it."""
    if not str(path).strip():
        raise UserError(f"no cluster is named: there are {', '.join(names())}, and {uniform.FORM}")
    path = Path(path)
    if path.suffix != ".toml" and not path.exists():
        return builtin(str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return _cluster(text, str(path))


def _cluster(text: str, name: str) -> Cluster:
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name}: this is not TOML: {error}") from None
    return _of_tables(tables, name)


class _Mistakes:
    """Of one file: all are told at once."""

    def __init__(self, name: str) -> None:
        self.name, self.found = name, list[str]()

    def add(self, said: str) -> None:
        self.found.append(said.removeprefix(f"{self.name}: "))

    def of(self, check: Callable[..., T], *given: Any, **more: Any) -> T | None:
        """What a check gives; None, and its mistake is kept, where it raises."""
        try:
            return check(self.name, *given, **more)
        except UserError as error:
            self.add(str(error))
            return None

    def end(self) -> None:
        if self.found:
            raise UserError(f"{self.name}: {'; '.join(dict.fromkeys(self.found))}")


def _of_tables(tables: dict[str, Any], name: str) -> Cluster:
    told, needed = _Mistakes(name), ("version", "ranks", "device", "links")
    told.of(_keys, "", tables, needed, (*needed, "curves", "host"))
    if tables.get("version", VERSION) != VERSION:
        told.add(f"version is {tables['version']}; this Tangram reads {VERSION}")
    ranks = told.of(_count, "ranks", tables["ranks"]) if "ranks" in tables else None
    listed = told.of(_list, "links", tables["links"]) if "links" in tables else None
    links = [one for i, at in enumerate(listed or ()) if (one := told.of(_link, i, at)) is not None]
    if links and len(links) == len(listed or ()):
        for near, far in itertools.pairwise(links):
            if far.ranks <= near.ranks or far.ranks % near.ranks:
                told.add(
                    f"{far.name} joins {far.ranks} ranks and {near.name} before it {near.ranks}; write the nearest "
                    "link first, each of a multiple of the ranks before"
                )
        if ranks and links[-1].ranks != ranks:
            told.add(f"there are {ranks} ranks, and the last link joins {links[-1].ranks}; make them equal")
    table = told.of(_table, "device", tables["device"]) if "device" in tables else None
    device = None if table is None else told.of(_device, table)
    host = told.of(_table, "host", tables.get("host", {})) or {}
    told.of(_keys, "host.", host, (), HOST)
    own = {key: told.of(_above, f"host.{key}", value) for key, value in host.items() if key in HOST}
    curves: Curves | None = told.of(_curves, tables["curves"]) if "curves" in tables else {}
    told.end()
    sure = cast("tuple[int, Device, Any]", (ranks, device, curves))  # what is missing was told
    return Cluster(name, *sure[:2], tuple(links), sure[2], {key: one for key, one in own.items() if one})


def _curves(name: str, found: Any) -> Curves:
    from tangram.hardware.catalogue.owncurves import curves_in  # loads numpy, which a mistake need not wait for

    return curves_in(name, found)


_FIGURES = ("memory_bytes", "memory_bandwidth")


def _device(name: str, table: dict[str, Any]) -> Device:
    if "name" in table and not isinstance(table["name"], str):
        raise UserError(f'{name}: device.name is {table["name"]!r}; write a name of devices.toml, as "h100"')
    known: Mapping[str, Any] = {}
    if "name" in table:
        given = table["name"].lower()
        if given not in catalogue():
            near = difflib.get_close_matches(given, tuple(catalogue()), 3)
            hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
            among = "" if near else f"there are {', '.join(catalogue())}; choose one, or "
            raise UserError(
                f"{name}: there is no device {table['name']!r}{hint}; {among}write its figures, "
                f"{', '.join((*TYPES, *_FIGURES))}"
            )
        table, known = {**table, "name": given}, catalogue()[given]
    allowed = ("name", *TYPES, *_FIGURES, "reaches", "memory_reaches")
    # A device of the catalogue may lack products in 32 bits, which training seldom needs; nothing else.
    needed = [key for key in (*(TYPES if not known else ()), *_FIGURES) if key not in known]
    told = _Mistakes(name)
    told.of(_keys, "device.", table, (*needed, "reaches", "memory_reaches"), allowed)
    there = [key for key in (*TYPES, *_FIGURES) if key in table or key in known]
    figures = {key: told.of(_above, f"device.{key}", table.get(key, known.get(key))) or 0.0 for key in there}
    shares = {
        key: told.of(_share, f"device.{key}", table.get(key, 1.0)) or 1.0 for key in ("reaches", "memory_reaches")
    }
    told.end()
    return Device(
        str(table.get("name", name)),
        {kind: figures[kind] for kind in TYPES if kind in figures},
        figures["memory_bytes"],
        figures["memory_bandwidth"],
        shares["reaches"],
        shares["memory_reaches"],
    )


def _link(name: str, i: int, found: Any) -> Link:
    where = f"links.{i}"
    table, told, keys = (
        _table(name, where, found),
        _Mistakes(name),
        ("name", "ranks", "rate", "reaches", "latency", "hop"),
    )
    told.of(_keys, f"{where}.", table, keys)
    checks: dict[str, Callable[[str, str, Any], float]] = {"ranks": _count, "rate": _above, "reaches": _share}
    zero = {"latency", "hop"} & set(table)
    got = {key: told.of(check, f"{where}.{key}", table[key]) for key, check in checks.items() if key in table}
    got |= {key: told.of(_above, f"{where}.{key}", table[key], zero=True) for key in zero}
    told.end()
    sure = {key: one or 0.0 for key, one in got.items()}
    return Link(
        str(table["name"]), int(sure["ranks"]), sure["rate"], sure["reaches"], sure["latency"], sure["hop"]
    )  # fmt: skip


def _keys(
    name: str, where: str, table: Mapping[str, Any], needed: Sequence[str], allowed: Sequence[str] | None = None
) -> None:
    said = [
        f'the key "{where}{key}" is not known{nearest_hint(key, allowed or needed)}'
        for key in table
        if key not in (allowed or needed)
    ]
    said += [f'the key "{where}{key}" is missing' for key in needed if key not in table]
    if said:
        raise UserError(f"{name}: {'; '.join(said)}")


def _table(name: str, where: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UserError(f"{name}: {where} is {found!r}; write it as a table")
    return cast("dict[str, Any]", found)


def _list(name: str, where: str, found: Any) -> list[Any]:
    if not isinstance(found, list) or not found:
        raise UserError(f"{name}: {where} is {found!r}; write at least one table [[{where}]]")
    return cast("list[Any]", found)


def _count(name: str, where: str, found: Any) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise UserError(f"{name}: {where} is {_short(found)}; write a whole number from 1")
    if found > MOST_RANKS:
        raise UserError(f"{name}: {where} is {_short(found)}; write a whole number from 1 to {MOST_RANKS}")
    return found


def _above(name: str, where: str, found: Any, *, zero: bool = False) -> float:
    start = f"{name}: {where} is {_short(found)}; write a number {'from' if zero else 'above'} 0"
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise UserError(start)
    if not found >= 0 or found == math.inf or (found == 0 and not zero):
        raise UserError(start)
    if found > LARGEST:
        raise UserError(f"{start}, not beyond {LARGEST:g}")
    if 0 < found < SMALLEST and not zero:
        raise UserError(f"{start}, not below {SMALLEST:g}")
    return float(found)


def _short(found: Any) -> str:
    """As written, but for whole numbers of very many digits."""
    if isinstance(found, int) and not -(10**30) < found < 10**30:
        digits = str(found)
        return f"{digits[:8]}... ({len(digits)} digits)"
    return repr(found)


def _share(name: str, where: str, found: Any) -> float:
    share = _above(name, where, found)
    if share > 1:
        raise UserError(f"{name}: {where} is {found!r}; write what share is reached, above 0 and at most 1")
    return share
