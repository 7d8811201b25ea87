"""Where nothing fits: of each kind of change the smallest with which something does, found by looking again.

More DP ranks that divide states, recomputing and all else of the space were tried already. What is tried here
beside are more devices, kinds of optimisers with smaller states, what is offloaded to the host, and shorter samples of
as many tokens together. What runs the plan may not know some of them: its rules hold here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Outline
from tangram.planner.legality.enumerate import Request
from tangram.planner.search.branch_and_bound import some_fits
from tangram.planner.search.strategy import Ask, safe, setting_of
from tangram.planner.space.optimisers_and_offload import OFFLOADS, OPTIMISERS, offloads_of

__all__ = ["Change", "would_fit"]

MOST_TIMES = 64
"""As many times more devices are tried."""
BETWEEN = 8
"""Into so many steps at most what lies between two doublings is cut: of a node each, or of several."""
LEAST_SEQUENCE = 512
"""Tokens of a sample, below which no shorter ones are tried."""


@dataclass(frozen=True)
class Change:
    """Of what is asked."""

    kind: str
    to: int | str
    said: str
    """In words, so that "... would do" can follow."""


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
