"""From a model, a cluster and a batch to a ranked list of strategies: what `tangram plan MODEL --cluster C` answers.

    plan(model, cluster, ask) -> Answer

Nothing here trains or needs a device; the inputs know nothing of training either, so that another objective can use
them. Predictions are corrected by what published runs have taught (`planner.cost.calibration`), and carry an interval.

Where nothing fits, of each kind of change the smallest with which something does is found by looking again: more
devices, optimisers with smaller states, what is offloaded to the host, and shorter samples of as many tokens together.
What runs the plan may not know some of them: its rules hold here, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.images import image_words
from tangram.models.outlines.outline import Outline
from tangram.planner.cost.calibration import Learned, published
from tangram.planner.legality.enumerate import Request
from tangram.planner.legality.exclusions import required, without
from tangram.planner.search.branch_and_bound import some_fits
from tangram.planner.search.by_precision import among, ranked, reached
from tangram.planner.search.objectives import Aim
from tangram.planner.search.strategy import Ask, Choice, assumed, families, limit_of, safe, setting_of, unlike
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.optimisers_and_offload import OFFLOADS, OPTIMISERS, kept_words, offloads_of
from tangram.planner.space.setting import precisions_of
from tangram.planner.space.tasks import task_words

UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3, "B": 1024**3}

MOST_TOKENS = 2**40
"""Of a step; the search takes longer the more ways there are to divide its samples."""
MOST_TIMES = 64
"""As many times more devices are tried."""
BETWEEN = 8
"""Into so many steps at most what lies between two doublings is cut: of a node each, or of several."""
LEAST_SEQUENCE = 512
"""Tokens of a sample, below which no shorter ones are tried."""


def count_of(text: str, units: Mapping[str, int]) -> int:
    """A number of tokens as typed. Raises UserError."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in units else (text, "")
    try:
        return int(float(number) * units.get(unit, 1))
    except (ValueError, OverflowError):
        raise UserError(f'"{text}" is no number of tokens: write 4194304, or 4M') from None


def devices_of(text: str) -> tuple[int, int]:
    """Of "64" 0 and 64, of the range "8-64" its ends, of "" 0 and 0, which is all. Raises UserError."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)", text.strip() or "0", re.ASCII)
    if found is None:
        raise UserError(f'"{text}" is no number of devices: write --gpus 64, or a range as in --gpus 8-64')
    fewest, most = int(found[1] or 0), int(found[2])
    if found[1] is not None and not 1 <= fewest <= most:
        raise UserError(f"--gpus {text} is no range of devices: give the fewest first, from 1, as in 8-64")
    return fewest, most


def ask_of(tokens: str, sequence: int, precision: str, framework: str, devices: str, memory: float, most: int) -> Ask:
    """As typed: "4M" tokens (of 1,024 x 1,024), "bf16,fp8", "8-64" devices, memory in GB. Raises UserError."""
    count = count_of(tokens, UNITS)
    kinds = precisions_of(precision)
    if not memory >= 0 or math.isinf(memory):
        raise UserError("--memory is a number of GB from 0, which is all that a device has")
    least, several = devices_of(devices)
    return Ask(count, sequence, kinds[0], framework, several, memory * 1e9, most, others=kinds[1:], fewest=least)


@dataclass(frozen=True)
class Change:
    """Of what is asked."""

    kind: str
    to: int | str
    said: str
    """In words, so that "... would do" can follow."""


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
    otherwise: Mapping[str, Choice | None]
    """The best if something were otherwise, by what; None where nothing fits."""
    would: tuple[Change, ...] = ()
    """Where nothing fits, of each kind of change the smallest with which something does."""
    aim: Aim | None = None
    """What choices are ranked by; None: by their steps."""
    missed: str = ""
    """Why there are no choices although some fit."""
    quickest: Choice | None = None
    """Of those that fit, then."""

    @property
    def enough(self) -> int:
        """Where nothing fits, devices on which something does; 0 where none were found."""
        return next((int(one.to) for one in self.would if one.kind == "devices"), 0)

    @property
    def several(self) -> bool:
        """Whether choices may be of several numbers of devices."""
        return self.ask.fewest > 0 or (self.aim is not None and self.aim.objective.sizes)

    @property
    def instead(self) -> dict[str, float]:
        """Seconds of the best step if something were otherwise, by what; nan where nothing fits."""
        return {name: one.step if one else float("nan") for name, one in self.otherwise.items()}


AMONG = 48
"""So many for each row that is shown are looked at for rows that differ: most of the quickest are one layout, of which
virtual stages or micro-batches vary."""


def plan(outline: Outline, cluster: Cluster, ask: Ask, *, what_if: bool = True) -> Answer:
    """The best strategies on one number of devices; `what_if`: and what they would be otherwise.

    Raises UserError where numbers cannot be; for a range of devices, too, which is `across.best`'s.
    """
    request, limit, learned = requested(cluster, ask), limit_of(cluster, ask), published()
    found = ranked(outline, cluster, ask, request, limit, AMONG * ask.most, learned)
    choices = found.choices
    otherwise = _otherwise(outline, request, limit, ask, learned, cluster, choices) if choices and what_if else {}
    would = () if choices or not what_if else would_fit(outline, cluster, ask, request, limit)
    return Answer(
        outline, cluster.name, ask, limit, families(unlike(choices), ask.most), found.smallest, found.looked,
        (*assumed(cluster, ask), *kept_words(outline, ask.base), *image_words(outline),
         *task_words(ask.rows, ask.beside), *([ask.documents.words] if ask.documents else ())), otherwise, would,
    )  # fmt: skip


def requested(cluster: Cluster, ask: Ask) -> Request:
    """The space's numbers. Raises UserError for those that cannot be."""
    devices, able = ask.devices or cluster.ranks, without(ask.able, ask.without)
    able = required(able, ask.in_backward, ask.rows)
    if ask.fewest:
        raise UserError("one strategy is of one number of devices: give --gpus a number, and no range")
    if devices > cluster.ranks:
        raise UserError(f"{cluster.name} has {cluster.ranks} devices, and {devices} are asked for: ask for fewer")
    if ask.tokens > MOST_TOKENS:
        raise UserError(f"a step has at most {MOST_TOKENS:,} tokens: ask for fewer")
    if ask.sequence < 1 or ask.tokens < ask.sequence:
        raise UserError(f"a step of {ask.tokens} tokens has no sample of {ask.sequence}: give more tokens")
    if ask.tokens % ask.sequence:
        below, above = ask.tokens // ask.sequence * ask.sequence, -(-ask.tokens // ask.sequence) * ask.sequence
        raise UserError(
            f"{ask.tokens} tokens are not samples of {ask.sequence}: the nearest batches are {below} and {above}"
        )
    schedules = tuple(one for one in framework(ask.framework).schedules if one in able.schedules)
    return Request(
        devices, ask.tokens // ask.sequence, ask.sequence, schedules=schedules, able=able,
        node=cluster.links[0].ranks if len(cluster.links) > 1 else 0,
        islands=tuple(link.ranks for link in cluster.links[1:-1]), optimisers=ask.optimisers, offloads=ask.offloads,
    )  # fmt: skip


def _otherwise(
    outline: Outline, request: Request, limit: float, ask: Ask, learned: Learned, cluster: Cluster,
    known: tuple[Choice, ...],
) -> dict[str, Choice | None]:  # fmt: skip
    """The best if memory, network or the sequence were otherwise; None where nothing fits. `known`: the best as it is,
    of which one may be as quick then, so that nothing slower is looked for."""
    near = cluster.links[: len(cluster.links) > 1]  # one link alone is all the network there is
    half = replace(cluster, links=(*near, *(replace(far, rate=far.rate / 2) for far in cluster.links[len(near) :])))
    cases = {
        "with 5 GB more memory": (request, cluster, limit + 5e9),
        "with 5 GB less memory": (request, cluster, limit - 5e9),
        "with half of the network": (request, half, limit),
    }
    if request.batch % 2 == 0:
        longer = replace(request, batch=request.batch // 2, sequence=request.sequence * 2)
        cases["at twice the sequence, the same tokens"] = (longer, cluster, limit)
    found: dict[str, Choice | None] = {}
    for name, (other, where, most) in cases.items():
        # What it says of FLOPs and tokens is of its own sequence.
        asked = replace(ask, sequence=other.sequence)
        try:
            within = reached(outline, where, asked, other, most, learned, known) if most > 0 else 0.0
            if other is request and most <= limit and (within < known[-1].step or len(known) < AMONG * ask.most):
                shown = among(outline, where, asked, other, most, learned, known)  # with less nothing is quicker
            else:
                shown = ranked(outline, where, asked, other, most, 1, learned, within).choices if most > 0 else ()
        except UserError:
            shown = ()
        found[name] = shown[0] if shown else None
    return found


Try = tuple[Change, Request]
Fits = Callable[[Request], bool]


def would_fit(outline: Outline, cluster: Cluster, ask: Ask, request: Request, limit: float) -> tuple[Change, ...]:
    """Of each kind the smallest change that fits; those of which none does are left out."""
    settings = [setting_of(cluster, one) for one in ask.each()]

    def fits(other: Request) -> bool:
        return any(some_fits(outline, other, setting, safe(limit)) for setting in settings)

    found = [_devices(request, fits), *(_first(tries(request), fits) for tries in (_optimisers, _offloads, _shorter))]
    return tuple(one for one in found if one is not None)


def _first(tries: Iterable[Try], fits: Fits) -> Change | None:
    return next((change for change, request in tries if fits(request)), None)


def _of_devices(request: Request, counts: Iterable[int]) -> Iterator[Try]:
    return (
        (Change("devices", count, f"{count} of these devices"), replace(request, devices=count)) for count in counts
    )


def _devices(request: Request, fits: Fits) -> Change | None:
    """The first doubling, or less than that in whole nodes."""
    times = range(1, MOST_TIMES.bit_length())
    doubled = _first(_of_devices(request, (request.devices << power for power in times)), fits)
    if doubled is None or not request.node:
        return doubled
    most = int(doubled.to)
    step = request.node * max(1, most // 2 // request.node // BETWEEN)
    between = range((most // 2 // step + 1) * step, most, step)
    return _first(_of_devices(request, between), fits) or doubled


def _optimisers(request: Request) -> Iterator[Try]:
    """Kinds with smaller states, AdamW's first, of each the largest states first."""
    least = min(OPTIMISERS[code].nbytes for code in request.optimisers)
    codes = [code for code, one in enumerate(OPTIMISERS) if one.nbytes < least]
    for code in sorted(codes, key=lambda code: (not _is_adamw(code), -OPTIMISERS[code].nbytes)):
        name = OPTIMISERS[code].name
        yield Change("optimiser", name, f"the optimiser {name}"), replace(request, optimisers=(code,))


def _is_adamw(code: int) -> bool:
    return OPTIMISERS[code].name.startswith("adamw")


def _offloads(request: Request) -> Iterator[Try]:
    """Optimiser's states on the host, then parameters with them, then activations."""
    for name in OFFLOADS:
        away = tuple(sorted({old | new for old in request.offloads for new in offloads_of(name)}))
        if away != request.offloads:
            yield Change("offload", name, f"the {name} on the host"), replace(request, offloads=away)


def _shorter(request: Request) -> Iterator[Try]:
    """Half of the tokens of a sample, a quarter ..., as many together."""
    sequence, batch = request.sequence, request.batch
    while sequence % 2 == 0 and sequence // 2 >= LEAST_SEQUENCE:
        sequence, batch = sequence // 2, batch * 2
        change = Change("sequence", sequence, f"samples of {sequence} tokens")
        yield change, replace(request, sequence=sequence, batch=batch)
