"""One strategy in words and numbers: what a configuration of a grid is predicted to need, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np

from tangram.errors import UserError
from tangram.hardware.catalogue import curves
from tangram.hardware.catalogue.cluster import Cluster
from tangram.hardware.catalogue.devices import Figures, device
from tangram.models.lora.outline import frozen_flops
from tangram.models.outlines.outline import Outline
from tangram.planner.cost.calibration import SURE, Learned, Run
from tangram.planner.cost.memory import Memory, memory
from tangram.planner.cost.step_time import multiplied, seconds
from tangram.planner.legality.enumerate import ALL, Able
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import Grid, grid
from tangram.planner.space.optimisers_and_offload import FULL, OPTIMISERS, Base, offload_words
from tangram.planner.space.recompute import again_name
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.planner.space.setting import Beside, Documents, Host, Precision, Setting

__all__ = [
    "Ask",
    "Choice",
    "assumed",
    "described",
    "families",
    "figures",
    "limit_of",
    "mesh_of",
    "probability",
    "safe",
    "setting_of",
    "unlike",
]

COPIED = 0.8
"""Of a link to the host what copies reach."""
MEMORY_SPREAD = 0.06
"""Standard deviation of the logarithm of memory: of published runs of a billion parameters or more, held out."""


@dataclass(frozen=True)
class Ask:
    """What is to be trained, how, and on what."""

    tokens: int
    """Of a step, over all devices."""
    sequence: int
    """Tokens of a sample."""
    precision: Precision = "bf16"
    framework: str = "tangram"
    devices: int = 0
    """How many; 0: all of the cluster."""
    memory: float = 0.0
    """Bytes that a rank may use; 0: what its device has."""
    most: int = 8
    """How many strategies to name."""
    able: Able = ALL
    """What may be looked at, where not everything can be run."""
    optimisers: tuple[int, ...] = (0,)
    """Codes of kinds that may be used (`planner.space.optimisers_and_offload`)."""
    offloads: tuple[int, ...] = (0,)
    """What may be offloaded to the host (`means.Offload`)."""
    base: Base = FULL
    """What frozen weights are kept in, where an outline has some (`models.lora.outline`)."""
    others: tuple[Precision, ...] = ()
    """What matmuls may be computed in as well."""
    unlike: float = 0.0
    """How unlike experts' loads are: their standard deviation over their mean."""
    documents: Documents | None = None
    """What samples are packed of, with the outline of `document_lengths.packed`; None: each is one document."""
    save_every: int = 0
    """Steps between two checkpoints; 0: none."""
    fewest: int = 0
    """Devices at least, where any number from it up to `devices` will do (`planner.search.by_device_count`); 0: just so
    many."""
    loss: str = ""
    """How it is made of the logits (`planner.space.framework_profiles`); "": as the framework does."""
    away_share: float = 1.0
    """Of the optimiser's states that are offloaded to the host, where they are."""
    without: tuple[str, ...] = ()
    """What of the joint space is not to be used, by names (`planner.legality.exclusions`)."""
    memory_share: float = 1.0
    """Of what its device has, where `memory` is 0: as beside an engine that samples on the same device."""
    compiled: bool = False
    """Whether the framework compiles blocks and loss."""
    in_backward: bool = False
    """Whether parameters are updated in the backward, which one micro-batch a step allows."""
    rows: int = 1
    """Of `sequence` tokens in a sample: of a pair of answers two. `tokens` are those of all rows."""
    beside: Beside | None = None
    """What a step asks beside the model that it trains."""
    filled: float = 1.0
    """Of a sample's tokens those of a step's rows in the mean, of which time is; memory is of the whole sample."""

    @property
    def tokens_met(self) -> int:
        """Of a step those of rows, as long as these are."""
        return round(self.tokens * self.filled)

    def each(self) -> tuple[Ask, ...]:
        """By each type that matmuls may be computed in, alone."""
        return tuple(replace(self, precision=one, others=()) for one in (self.precision, *self.others))

    def on(self, devices: int) -> Ask:
        """Of just so many devices."""
        return replace(self, devices=devices, fewest=0)

    def of(self, choice: Choice) -> Ask:
        """With the type alone that a choice has."""
        return replace(self, precision=choice.precision, others=())


@dataclass(frozen=True)
class Choice:
    """One strategy, with what it is predicted to need."""

    mesh: str
    """As everywhere: PP, DP, CP, TP ranks, those first that are farthest apart; heads: further context
    ranks, which exchange heads."""
    micro: int
    micros: int
    virtual: int
    schedule: str
    """Of the pipeline."""
    ahead: int
    """How many layers fewer the first virtual stage of the model has than an even cut gives it."""
    behind: int
    """The same of the last one."""
    expert: int
    expert_tensor: int
    zero: int
    again: str
    """What is recomputed in the backward."""
    step: float
    """Seconds."""
    low: float
    high: float
    """90 % of runs like it lie between these."""
    tokens_per_device: float
    """In a second."""
    utilisation: float
    """Of the device's best rate (MFU)."""
    memory: float
    """Bytes of the rank that needs most, as the device shows them."""
    memory_low: float
    memory_high: float
    """90 % of runs like it need between these."""
    fits: float
    """How likely it is not to run out."""
    parts: Mapping[str, float]
    """Seconds of the step, by what they are spent on."""
    links: Mapping[str, float]
    """Seconds of it that each link carries something, by name and direction, beside computation or not."""
    held: Mapping[str, float]
    """Bytes of that rank, by what they are of."""
    at: Mapping[str, float]
    """All numbers of the configuration (`planner.space.grid`)."""
    optimiser: str = "adamw"
    offload: str = ""
    """What waits in the host's memory."""
    host: float = 0.0
    """Bytes that do, of the rank that has most there."""
    precision: Precision = "bf16"
    """What matmuls are computed in."""
    device: str = ""
    """Its key in the catalogue."""
    framework: str = ""

    @property
    def family(self) -> str:
        """Which kinds of parallelism it has, whatever their sizes."""
        kinds = {
            "FSDP": self.zero >= 3, "TP": self.at["tensor"] > 1, "PP": self.at["pipeline"] > 1,
            "CP": self.at["context"] > 1, "EP": self.expert > 1,
        }  # fmt: skip
        return " x ".join(name for name, has in kinds.items() if has) or "DP"

    def alike(self, other: Choice, learned: Learned) -> bool:
        """Whether it cannot be told apart from another on the same devices: by the 90 % interval of their ratio."""
        runs = (Run(one.parts, one.device, one.framework, one.precision, "") for one in (self, other))
        return abs(math.log(self.step / other.step)) < SURE * learned.apart(*runs)

    def grid(self) -> Grid:
        """As a grid of one."""
        return grid(**self.at)

    @property
    def stages(self) -> str:
        """The schedule, virtual stages of each rank where they are several, and where they have fewer layers; ""
        without."""
        several = f" x {self.virtual}" if self.virtual > 1 else ""
        fewer = f", {self.ahead} and {self.behind} fewer" if self.ahead or self.behind else ""
        return f"{self.schedule}{several}{fewer}"

    @property
    def devices(self) -> int:
        """All ranks."""
        return int(self.at["pipeline"] * self.at["data"] * self.at["context"] * self.at["tensor"])


def figures(cluster: Cluster) -> Figures:
    """Of the cluster's device and links: what the file says, and for the rest what the catalogue does."""
    own = cluster.device
    said = {
        **{name: own.flops[name] for name in ("bf16", "fp32") if name in own.flops},
        "memory_bytes": own.memory_bytes, "memory_bandwidth": own.memory_bandwidth,
        "link_bandwidth": cluster.links[0].rate, "link_domain": cluster.links[0].ranks,
        "nic_bandwidth": cluster.links[1 if len(cluster.links) > 1 else 0].rate, "curves": cluster.curves,
    }  # fmt: skip
    try:
        known = device(own.name)
        if known.memory_bytes != own.memory_bytes:  # a file that says another number means just that
            known = replace(known, usable_bytes=None)
    except UserError:
        known = Figures(own.name, own.name)
    return replace(known, **cast(Any, said))


def node(cluster: Cluster) -> int:
    """Devices that meet at the nearest link."""
    return cluster.links[0].ranks


def setting_of(cluster: Cluster, ask: Ask) -> Setting:
    """What all configurations have in common. Raises UserError for a framework that is not known."""
    own = figures(cluster)
    known = {} if own.pcie_bandwidth is None else {"rate": COPIED * own.pcie_bandwidth}
    islands = tuple((here.ranks, farther.rate) for here, farther in pairwise(cluster.links[1:]))
    runs_it = framework(ask.framework)
    runs_it = runs_it.compiled if ask.compiled else runs_it
    return Setting(
        own, runs_it, ask.precision, node(cluster), own.nic_bandwidth, islands, base=ask.base,
        host=Host(**{**known, **cluster.host}), unlike=ask.unlike, documents=ask.documents, save_every=ask.save_every,
        loss=ask.loss, away_share=ask.away_share, in_backward=ask.in_backward, beside=ask.beside,
        rows=ask.rows, filled=ask.filled,
    )  # fmt: skip


def assumed(cluster: Cluster, ask: Ask) -> tuple[str, ...]:
    """What neither the catalogue nor the cluster's file says, and what was taken in its place."""
    own = figures(cluster)
    found = curves.assumed(own)
    usual = Host()
    if own.usable and ask.memory > own.usable:
        found.append(
            f"{ask.memory / 1e9:g} GB of memory, as --memory says: more than the {own.usable / 1e9:g} GB of {own.label}"
        )
    if ask.save_every and not any(ask.offloads) and own.pcie_bandwidth is None and "rate" not in cluster.host:
        found.append(f"{usual.rate / 1e9:g} GB/s from a device to its host, for checkpoints: give host.rate")
    if any(ask.offloads):
        if own.pcie_bandwidth is None and "rate" not in cluster.host:
            found.append(
                f"{usual.rate / 1e9:g} GB/s between a device and its host: give host.rate in the cluster's file"
            )
        if "bandwidth" not in cluster.host:
            found.append(
                f"{usual.bandwidth / 1e9:g} GB/s that a device's part of its host moves through memory: host.bandwidth"
            )
        if "memory_bytes" not in cluster.host:
            found.append("as much memory of the host as is needed: host.memory_bytes")
        found.append("what is offloaded to the host was never compared with runs: intervals do not know it")
    return tuple(found)


def limit_of(cluster: Cluster, ask: Ask) -> float:
    """Bytes that a rank may use. Raises UserError where nobody says."""
    own = figures(cluster)
    limit = ask.memory or (own.usable or 0.0) * ask.memory_share
    if not limit:
        raise UserError(f"the catalogue knows no memory of {own.label}: give one with --memory")
    return limit


def safe(limit: float) -> float:
    """What may be predicted so that nine of ten such runs stay within a limit."""
    return limit / math.exp(1.2816 * MEMORY_SPREAD)


def probability(need: float, limit: float) -> float:
    """That a predicted need stays within a limit."""
    return 0.5 * (1 + math.erf(math.log(limit / need) / MEMORY_SPREAD / math.sqrt(2)))


def described(
    outline: Outline, g: Grid, setting: Setting, ask: Ask, limit: float, learned: Learned
) -> tuple[Choice, ...]:
    """Each configuration of a grid in words and numbers."""
    if not len(g):
        return ()
    of, needs = seconds(outline, g, setting), memory(outline, g, setting)
    scales = learned.scales(setting.device.name, setting)
    parts = {name: np.broadcast_to(values, len(g)) for name, values in multiplied(of, scales).items()}
    parts["data"] = parts["data"] + np.maximum(of.busiest - sum(parts.values()), 0.0)  # as `scaled` has it
    held = {name: part for name, part in needs.worst.parts().items() if name != "host"}
    kind = "moe" if any(block.experts for block, _ in outline.runs) else "dense"
    kind = f"{kind} adapted" if outline.adapted else kind  # none of the runs that errors are known of had adapters
    runs = [
        Run(
            {name: float(values[i]) for name, values in parts.items()},
            setting.device.name, setting.framework.name, setting.precision, "", kind=kind,
        )
        for i in range(len(g))
    ]  # fmt: skip
    half = learned.half(runs)
    return tuple(
        _choice(outline, g, i, runs[i], float(half[i]), needs, {n: float(v[i]) for n, v in held.items()},
                {n: float(v[i]) for n, v in of.links.items() if v.any()}, setting, ask, limit)
        for i in range(len(g))
    )  # fmt: skip


def _choice(
    outline: Outline, g: Grid, i: int, run: Run, half: float, needs: Memory, held: dict[str, float],
    links: dict[str, float], setting: Setting, ask: Ask, limit: float,
) -> Choice:  # fmt: skip
    at = {name: int(values[i]) for name, values in g.columns().items()}
    ranks, step = float(g.ranks[i]), run.predicted
    tokens = at["batch"] * ask.sequence * ask.filled
    flops = (3 * outline.flops(round(ask.sequence * ask.filled)) - frozen_flops(outline)) * tokens
    need = float(np.broadcast_to(needs.device, len(g))[i])
    return Choice(
        mesh=mesh_of(at["pipeline"], at["data"], at["context"], at["ulysses"], at["tensor"], inner=at["inner"] > 0),
        micro=at["micro"] // ask.rows,
        micros=int(g.micros[i]),
        virtual=at["virtual"],
        schedule=SCHEDULES[at["schedule"]].name if at["pipeline"] > 1 else "",
        ahead=at["ahead"],
        behind=at["behind"],
        expert=at["expert"],
        expert_tensor=at["expert_tensor"],
        zero=at["zero"],
        again=again_name(at["recompute"], float(g.recomputed[i])),
        step=step,
        low=step * math.exp(-half),
        high=step * math.exp(half),
        tokens_per_device=tokens / step / ranks,
        utilisation=flops / step / ranks / setting.device.peak(ask.precision),
        memory=need,
        memory_low=need * math.exp(-SURE * MEMORY_SPREAD),
        memory_high=need * math.exp(SURE * MEMORY_SPREAD),
        fits=probability(need, limit),
        parts=run.parts,
        links=links,
        held={**held, "reserve": sum(held.values()) * needs.reserve, "context": float(needs.context[i])},
        at={name: float(values[i]) for name, values in g.columns().items()},
        optimiser=OPTIMISERS[at["optimiser"]].name,
        offload=offload_words(at["offload"]),
        host=float(np.broadcast_to(needs.host, len(g))[i]),
        precision=ask.precision,
        device=run.device,
        framework=run.framework,
    )


def mesh_of(pipeline: int, data: int, context: int, ulysses: int, tensor: int, *, inner: bool = False) -> str:
    """As everywhere, the axis first whose ranks are farthest apart; CP ranks that exchange heads have an axis of
    their own, where there are any. `inner`: PP ranks within DP ranks."""
    heads = f" heads={ulysses}" if ulysses > 1 else ""
    outer = f"dp={data} pp={pipeline}" if inner else f"pp={pipeline} dp={data}"
    return f"{outer} cp={context // ulysses}{heads} tp={tensor}"


def unlike(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Of choices that take the same time in the same layout the one that needs least."""
    found: dict[object, Choice] = {}
    for one in choices:
        key = (
            one.mesh, one.micro, one.virtual, one.schedule, one.ahead, one.behind, one.expert, one.expert_tensor,
            one.again, one.optimiser, one.offload, one.precision, round(one.step, 6),
        )  # fmt: skip
        if key not in found or one.memory < found[key].memory:
            found[key] = one
    return tuple(found.values())


def families(choices: tuple[Choice, ...], most: int) -> tuple[Choice, ...]:
    """Of choices in their order so many, the first among them: the one that needs least memory, the first of each
    family (`Choice.family`) and of each mesh, and then others as they come."""
    first = dict[str, int]()
    for name in ("family", "mesh"):
        for i, one in enumerate(choices):
            first.setdefault(getattr(one, name), i)
    least = min(range(len(choices)), key=lambda i: choices[i].memory, default=0)
    order = dict.fromkeys([0, least, *first.values(), *range(len(choices))])
    return tuple(choices[i] for i in sorted([*order][:most]) if i < len(choices))
