"""What of a job's state is gone when some of its ranks are, by the layouts alone: nothing is run.

    tangram launch plan.toml --what-if-lost rank:3      or node:1/8, the second of nodes with 8 ranks each

An element that a rank holds is on other ranks too, or there alone; what a snapshot has of it is as old as that.
"""

import math
import re
from dataclasses import dataclass

from tangram.errors import UserError
from tangram.layout import Layout, Mesh, Region, owners, ranks_of
from tangram.models.building.build import build_on_meta
from tangram.planner.legality.check_plan import bound_layout
from tangram.planner.local.estimate import megabytes
from tangram.resilience.carrier import survives
from tangram.schema.plan import Plan
from tangram.training.data import tokens_of
from tangram.training.parallel.apply import freeze
from tangram.training.state.build_model import source_of

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Lost:
    """Bytes of parameters and of the optimiser's states; what several ranks hold counts once."""

    ranks: tuple[int, ...]
    of: int
    """Ranks in all."""
    state: int
    nbytes: int
    """That the lost ranks hold."""
    only: int
    """That no other rank holds."""
    first: str
    """The first parameter of which that is so; "" where there is none."""
    survives: bool | None = None
    """Where nodes are gone with what lay in their memory: whether each share of a snapshot is on one that is left."""

    def sentences(self) -> list[str]:
        """For people."""
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))} of {self.of}"
        told = [f"lost         {who}: {megabytes(self.nbytes)} of {megabytes(self.state)} of state lie there"]
        if self.only:
            told.append(f"other ranks  have all but {megabytes(self.only)} of it, as of {self.first}")
        else:
            told.append("other ranks  have all of it, as it is at that moment")
        if self.survives:
            told.append("memory       the last snapshot that was copied is on the nodes that are left (--copies)")
        elif self.survives is not None:
            told.append("memory       parts of each snapshot were on these nodes alone (--copies): it is gone")
        else:
            told.append(
                "memory       the newest snapshot has all of it, while this machine runs; the run goes on from there"
            )
        told.append("disk         the newest checkpoint of the run's folder, or of its store, has all of it")
        return told


def ranks_named(text: str, plan: Plan) -> tuple[int, ...]:
    """The ranks that `rank:3`, `rank:3,5` or `node:1/8`, the second of nodes with 8 ranks each, says. Raises UserError
    for others than the plan has."""
    asked = re.fullmatch(r"rank:([0-9]+(?:,[0-9]+)*)|node:([0-9]+(?:,[0-9]+)*)/([1-9][0-9]*)", text, re.ASCII)
    if asked is None:
        raise UserError(
            f"--what-if-lost {text}: give rank:N, or several as rank:N,M, or node:N/K where each node has K ranks"
        )
    numbers, size = {int(part) for part in (asked[1] or asked[2]).split(",")}, int(asked[3] or 1)
    if (max(numbers) + 1) * size > plan.ranks:
        raise UserError(f"--what-if-lost {text}: the plan's ranks are 0 to {plan.ranks - 1}")
    return tuple(sorted(number * size + at for number in numbers for at in range(size)))


def survives_on(text: str, plan: Plan, copies: int) -> bool | None:
    """Whether snapshots outlive nodes that `ranks_named` read, with so many copies of each share; None of ranks."""
    if not text.startswith("node:"):
        return None
    size = int(text.rpartition("/")[2])
    gone = frozenset(rank // size for rank in ranks_named(text, plan))
    return survives(-(-plan.ranks // size), copies, gone)


def lost(plan: Plan, ranks: tuple[int, ...], *, survives: bool | None = None) -> Lost:
    """What goes with these ranks. Raises UserError for a plan whose layouts do not say it."""
    if plan.lora is not None and plan.lora.base != "parameters":
        raise UserError("--what-if-lost counts parameters, and this base is quantised: leave lora.base out to ask")
    mesh, gone = Mesh.parse(plan.mesh), frozenset(ranks)
    model = build_on_meta(source_of(plan, tokens_of(plan)).config)
    freeze(model, plan)
    known: dict[tuple[Layout, tuple[int, ...]], tuple[int, int]] = {}
    state = held = only = 0
    first = ""
    for name, parameter in model.named_parameters():
        shape, each = tuple(parameter.shape), _bytes_of(plan, trained=parameter.requires_grad)
        layout = bound_layout(plan, name, shape)
        if (layout, shape) not in known:
            known[layout, shape] = _elements(layout, shape, mesh, gone)
        there, alone = known[layout, shape]
        state, held, only = state + each * math.prod(shape), held + each * there, only + each * alone
        first = first or (name if alone else "")
    return Lost(ranks, plan.ranks, state, held, only, first, survives)


def _elements(layout: Layout, shape: tuple[int, ...], mesh: Mesh, gone: frozenset[int]) -> tuple[int, int]:
    """How many elements lie on the ranks that are gone, and how many on no other."""
    here, others = Region(()), Region(())
    for owner in owners(layout, mesh, Region.full(shape)):
        on, boxes = set(ranks_of(layout, mesh, owner)), Region.of(list(owner.boxes))
        if on & gone:
            here = here | boxes
        if on - gone:
            others = others | boxes
    return here.size, (here - others).size


def _bytes_of(plan: Plan, *, trained: bool) -> int:
    """Of a parameter, with the optimiser's states where it has them."""
    kinds = plan.precision
    if not trained:
        return BYTES[kinds.parameters]
    own = kinds.parameters == kinds.masters
    return BYTES[kinds.parameters] + BYTES[kinds.masters] * (2 if own else 3)
