"""Rows sent to the ranks of their groups and back, on real ranks, beside every row looked for among all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.relayout.collectives import grouped_rows
from tangram.relayout.collectives.grouped_rows import RowRoute
from tests.relayout.collecting import World

WIDTH = 3


def cases(k: int) -> Iterator[list[list[int]]]:
    """By rank, the groups of its rows, of 2 groups for each rank: drawn, none, all of one group, of no group at all."""
    draw = random.Random(k)
    groups = 2 * k
    yield [[] for _ in range(k)]
    yield [[groups - 1] * 5 for _ in range(k)]  # all to the last rank, the others get nothing
    yield [[0] * (3 if r == 0 else 0) for r in range(k)]
    yield [sorted([*range(groups), groups, groups + 3]) for _ in range(k)]  # some of no group
    for _ in range(12):
        some = draw.sample(range(groups), draw.randint(1, groups))
        yield [sorted(draw.choice(some) for _ in range(draw.randint(0, 9))) for _ in range(k)]


def _wrong(group: dist.ProcessGroup, drawn: list[list[int]]) -> str:
    """What is wrong with one case on this rank."""
    k, me = dist.get_world_size(group), dist.get_rank(group)
    ids = torch.tensor(drawn[me], dtype=torch.int64)
    values = [
        torch.arange(len(one) * WIDTH, dtype=torch.float64).view(-1, WIDTH) + 100 * r for r, one in enumerate(drawn)
    ]
    x = values[me].clone().requires_grad_()
    route = RowRoute(ids, 2 * k, group)
    rows = route.sent(x)
    rows += 0  # as models do, in place
    back = route.back(rows * (me + 2))  # by whom it was done
    back += 0
    slope = torch.arange(back.numel(), dtype=torch.float64).view_as(back) + me
    (gradient,) = torch.autograd.grad(back, x, slope)
    # All is sent: what follows is of this rank alone.
    mine = sorted((g, r, i) for r, one in enumerate(drawn) for i, g in enumerate(one) if g // 2 == me)
    own = torch.tensor([g // 2 + 2.0 if g < 2 * k else 0.0 for g in drawn[me]], dtype=torch.float64).view(-1, 1)
    checks = {
        "rows": rows.tolist() == [values[r][i].tolist() for _, r, i in mine],
        "ids": route.sent_ids().tolist() == [g % 2 for g, _, _ in mine],
        "ends": route.sent_ends(torch.int32).tolist() == [sum(g % 2 <= e for g, _, _ in mine) for e in range(2)],
        "back": torch.equal(back, values[me] * own),
        "gradient": torch.equal(gradient, slope * own),
    }
    return " ".join(name for name, right in checks.items() if not right)


def every_route(world: World) -> list[str]:
    """On one, two and four ranks, forward and backward."""
    found = [(k, case, _wrong(group, case)) for k, group in world.groups.items() for case in cases(k)]
    return [f"{k} ranks, {case}: {wrong}" for k, case, wrong in found if wrong]


@contextmanager
def _planted(name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    real = getattr(grouped_rows, name)
    setattr(grouped_rows, name, lambda *args: wrong(real, *args))
    try:
        yield
    finally:
        setattr(grouped_rows, name, real)


def _not_sorted(real: Any, x: Tensor, route: RowRoute) -> Tensor:
    sizes = route.sizes
    return grouped_rows._swapped_rows(x[: sum(sizes.to)], sizes.to, sizes.of, route.group)  # pyright: ignore[reportPrivateUsage]


def _not_put_back(real: Any, x: Tensor, route: RowRoute) -> Tensor:
    return real(x[route.sizes.order], route)


def _counts_swapped(real: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    return real(parts, group).flip(1)


MISTAKES = {"_sent": _not_sorted, "_back": _not_put_back, "swapped": _counts_swapped}


def mistakes_in_routes(world: World) -> list[str]:
    """Those that nobody has seen, of rows in another order than their groups and of counts of another group."""
    group, unseen = world.groups[2], list[str]()
    for name, wrong in MISTAKES.items():
        seen = False
        with _planted(name, wrong):
            for case in cases(2):
                mine = [bool(_wrong(group, case))]
                theirs: list[Any] = [None] * 2
                dist.all_gather_object(theirs, mine, group=group)
                seen = seen or any(one[0] for one in theirs)
        unseen += [] if seen else [name]
    return unseen


SCENES = (every_route, mistakes_in_routes)
