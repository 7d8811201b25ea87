"""From a model, a cluster and a batch to a ranked list of strategies: what `tangram plan MODEL --cluster C` answers.

    plan(model, cluster, ask) -> Answer

Nothing here trains or needs a device; the inputs know nothing of training either, so that another objective can use
them. Predictions are corrected by what published runs have taught (`planner.learn`), and carry an interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tangram.errors import UserError
from tangram.hardware import curves
from tangram.hardware.cluster import Cluster
from tangram.hardware.devices import Figures, device
from tangram.models.outline import Outline
from tangram.planner.framework import framework
from tangram.planner.grid import Grid
from tangram.planner.learn import Learned, Run, published
from tangram.planner.memory import Memory, memory
from tangram.planner.search import Found, search
from tangram.planner.setting import Precision, Setting
from tangram.planner.space import RECOMPUTED, Request, meshes
from tangram.planner.time import seconds

__all__ = ["Answer", "Ask", "Choice", "asked_of", "plan"]

SURE = 1.6449
"""Standard deviations to each side of the middle 90 of 100 of a normal."""
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


UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3, "B": 1024**3}
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "fp4", "fp32")


def asked_of(tokens: str, sequence: int, precision: str, framework: str, devices: int, memory: float, most: int) -> Ask:
    """As typed: "4M" tokens (of 1,024 x 1,024), memory in GB. Raises UserError."""
    number, unit = (tokens[:-1], tokens[-1].upper()) if tokens[-1:].upper() in UNITS else (tokens, "")
    try:
        count = int(float(number) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        raise UserError(f'"{tokens}" is no number of tokens: write 4194304, or 4M') from None
    types: dict[str, Precision] = {one: one for one in PRECISIONS}
    if precision not in types:
        raise UserError(f'there is no precision "{precision}": give one of {", ".join(PRECISIONS)}')
    if devices < 0 or not memory >= 0 or math.isinf(memory):
        raise UserError("--gpus and --memory are numbers from 0")
    return Ask(count, sequence, types[precision], framework, devices, memory * 1e9, most)


@dataclass(frozen=True)
class Choice:
    """One strategy, with what it is predicted to need."""

    mesh: str
    """As everywhere: pipeline, data, context, tensor ranks."""
    micro: int
    micros: int
    virtual: int
    expert: int
    expert_tensor: int
    zero: int
    again: str
    """What is computed again in the backward."""
    step: float
    """Seconds."""
    low: float
    high: float
    """90 of 100 like it lie between these."""
    tokens_per_device: float
    """In a second."""
    utilisation: float
    """Of the device's best rate (MFU)."""
    memory: float
    """Bytes of the rank that needs most, as the device shows them."""
    fits: float
    """How likely it is not to run out."""
    parts: Mapping[str, float]
    """Seconds of the step, by what they are spent on."""
    held: Mapping[str, float]
    """Bytes of that rank, by what they are of."""


@dataclass(frozen=True)
class Answer:
    """What was found, the fastest first."""

    outline: Outline
    cluster: str
    ask: Ask
    limit: float
    choices: tuple[Choice, ...]
    smallest: Choice
    """What needs least memory, whether it fits or not."""
    looked: int
    assumed: tuple[str, ...]
    """What the catalogue does not know, and what was taken in its place."""
    instead: Mapping[str, float]
    """Seconds of the best step if something were otherwise, by what."""
    enough: int = 0
    """Where nothing fits, twice, four times ... as many devices on which something does; 0 where none was found."""


def plan(outline: Outline, cluster: Cluster, ask: Ask) -> Answer:
    """The best strategies. Raises UserError where the numbers cannot be."""
    of = figures(cluster)
    request, limit = requested(cluster, ask, of), ask.memory or of.memory_bytes or 0.0
    if not limit:
        raise UserError(f"the catalogue knows no memory of {of.label}: give one with --memory")
    setting = Setting(of, framework(ask.framework), ask.precision, node(cluster), cluster.links[-1].rate)
    learned = published()
    found = search(outline, request, setting, safe(limit), 4 * ask.most, learned.scales(of.name, setting))
    choices = described(outline, found.grid, setting, ask, limit, learned)
    smallest = described(outline, found.smallest, setting, ask, limit, learned)[0]
    instead = _instead(outline, request, setting, limit, ask, learned, cluster) if choices else {}
    return Answer(
        outline, cluster.name, ask, limit, _unlike(choices)[: ask.most], smallest, found.looked,
        tuple(curves.assumed(of)), instead, 0 if choices else _enough(outline, request, setting, limit),
    )  # fmt: skip


MOST_TIMES = 64
"""As many times more devices are tried where nothing fits."""


def _enough(outline: Outline, request: Request, setting: Setting, limit: float) -> int:
    times = 2
    while times <= MOST_TIMES:
        more = replace(request, devices=times * request.devices)
        if any(True for _ in meshes(outline, more)) and len(search(outline, more, setting, safe(limit), 1).step):
            return more.devices
        times *= 2
    return 0


def figures(cluster: Cluster) -> Figures:
    """Of the cluster's device, its own rates where the catalogue has not all."""
    try:
        return device(cluster.device.name)
    except UserError:
        own = cluster.device
        return Figures(
            own.name, own.name, bf16=own.flops.get("bf16"), fp32=own.flops.get("fp32"), memory_bytes=own.memory_bytes,
            memory_bandwidth=own.memory_bandwidth, link_bandwidth=cluster.links[0].rate,
            link_domain=cluster.links[0].ranks, nic_bandwidth=cluster.links[-1].rate,
        )  # fmt: skip


def node(cluster: Cluster) -> int:
    """Devices that meet at the nearest link."""
    return cluster.links[0].ranks


def requested(cluster: Cluster, ask: Ask, of: Figures) -> Request:
    """The space's numbers. Raises UserError for those that cannot be."""
    devices = ask.devices or cluster.ranks
    if devices > cluster.ranks:
        raise UserError(f"{cluster.name} has {cluster.ranks} devices, and {devices} are asked for: ask for fewer")
    if ask.sequence < 1 or ask.tokens < ask.sequence:
        raise UserError(f"a step of {ask.tokens} tokens has no sample of {ask.sequence}: give more tokens")
    if ask.tokens % ask.sequence:
        below, above = ask.tokens // ask.sequence * ask.sequence, -(-ask.tokens // ask.sequence) * ask.sequence
        raise UserError(
            f"{ask.tokens} tokens are not samples of {ask.sequence}: the nearest batches are {below} and {above}"
        )
    return Request(devices, ask.tokens // ask.sequence, ask.sequence)


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
    parts, needs = seconds(outline, g, setting).parts(), memory(outline, g, setting)
    scales = learned.scales(setting.device.name, setting)
    parts = {name: np.broadcast_to(values, len(g)) * scales[name] for name, values in parts.items()}
    held = needs.worst.parts()
    runs = [
        Run(
            {name: float(values[i]) for name, values in parts.items()},
            setting.device.name, setting.framework.name, setting.precision, "",
        )
        for i in range(len(g))
    ]  # fmt: skip
    spread = learned.spread(runs)
    return tuple(
        _choice(outline, g, i, runs[i], float(spread[i]), needs, {n: float(v[i]) for n, v in held.items()}, setting,
                ask, limit)
        for i in range(len(g))
    )  # fmt: skip


def _choice(
    outline: Outline, g: Grid, i: int, run: Run, spread: float, needs: Memory, held: dict[str, float],
    setting: Setting, ask: Ask, limit: float,
) -> Choice:  # fmt: skip
    at = {name: int(values[i]) for name, values in vars(g).items()}
    ranks, step = float(g.ranks[i]), run.predicted
    flops = 3 * outline.flops(ask.sequence) * at["batch"] * ask.sequence
    need = float(np.broadcast_to(needs.device, len(g))[i])
    again = next(
        name for name, group, share in RECOMPUTED if int(group) == at["recompute"] and share == g.recomputed[i]
    )
    return Choice(
        mesh=f"pp={at['pipeline']} dp={at['data']} cp={at['context']} tp={at['tensor']}",
        micro=at["micro"],
        micros=int(g.micros[i]),
        virtual=at["virtual"],
        expert=at["expert"],
        expert_tensor=at["expert_tensor"],
        zero=at["zero"],
        again=again,
        step=step,
        low=step * math.exp(-SURE * spread),
        high=step * math.exp(SURE * spread),
        tokens_per_device=at["batch"] * ask.sequence / step / ranks,
        utilisation=flops / step / ranks / setting.device.peak(ask.precision),
        memory=need,
        fits=probability(need, limit),
        parts=run.parts,
        held={**held, "reserve": sum(held.values()) * needs.reserve, "context": needs.context},
    )


def _unlike(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Of choices that take the same time in the same layout the one that needs least."""
    found: dict[object, Choice] = {}
    for one in choices:
        key = (one.mesh, one.micro, one.virtual, one.expert, one.expert_tensor, one.again, round(one.step, 6))
        if key not in found or one.memory < found[key].memory:
            found[key] = one
    return tuple(found.values())


def _instead(
    outline: Outline, request: Request, setting: Setting, limit: float, ask: Ask, learned: Learned, cluster: Cluster
) -> dict[str, float]:
    """The best step if memory, network or the sequence were otherwise; nan where nothing fits."""
    scales = learned.scales(setting.device.name, setting)
    half = replace(setting, nic=cluster.links[-1].rate / 2)
    longer = Request(request.devices, max(request.batch // 2, 1), request.sequence * 2)
    cases = {
        "with 5 GB more memory": (request, setting, limit + 5e9),
        "with 5 GB less memory": (request, setting, limit - 5e9),
        "with half of the network": (request, half, limit),
        "at twice the sequence, the same tokens": (longer, setting, limit),
    }
    found: dict[str, float] = {}
    for name, (other, of, most) in cases.items():
        try:
            best: Found = search(outline, other, of, safe(most), 1, scales)
        except UserError:
            found[name] = float("nan")
            continue
        found[name] = float(best.step[0]) if len(best.step) else float("nan")
    return found
