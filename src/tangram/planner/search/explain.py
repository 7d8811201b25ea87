"""One given strategy: whether it is legal, what it needs, what utilisation to expect, and what it loses to the best.

The answer to "is my MFU right, what should it be?" and "why does it not run?", before anything is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.layout import LayoutError, Mesh
from tangram.models.outlines.outline import Outline
from tangram.planner.cost.calibration import published
from tangram.planner.legality.engine import facts_of, reasons, refusals
from tangram.planner.legality.enumerate import ALL
from tangram.planner.legality.exclusions import training_rules
from tangram.planner.search.query import Answer, plan, requested
from tangram.planner.search.strategy import Ask, Choice, described, limit_of, setting_of
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import Grid, grid
from tangram.planner.space.recompute import NOTHING, again_of
from tangram.planner.space.schedule_formulas import SCHEDULES, code

__all__ = ["Explained", "StrategyRequest", "explain"]

AXES = {"pp": "pipeline", "dp": "data", "cp": "context", "heads": "ulysses", "tp": "tensor"}
"""What axes of a mesh are for, by their names."""
EXPERT_AXES = ("ep", "etp")
"""EP, and the experts' TP: folded over the ranks of the other axes, so they add none."""


@dataclass(frozen=True)
class StrategyRequest:
    """A strategy as a person gives it."""

    mesh: str
    """Of the axes pp, dp, cp, heads, tp, ep and etp; dp, where it is not named, has the devices that are left, another
    axis one rank. Ranks of cp send keys around, those
    of heads exchange heads for tokens (Ulysses)."""
    micro: int = 1
    chunks: int = 1
    schedule: str = "1F1B"
    """Of the pipeline; of several virtual stages 1F1B is Interleaved1F1B."""
    zero: int = 1
    again: str = NOTHING
    experts: str = "1 x 1"
    """EP ranks x the experts' TP ranks."""
    shard: int = 0
    """Over how many of the DP and CP ranks states are divided; 0: all."""
    sequence_parallel: bool | None = None
    """Whether TP ranks divide the tokens of what they do not divide otherwise; None: as the mesh's `sp`, or else the
    framework, has it."""
    uneven: str = "0 0"
    """How many layers fewer the first virtual stage of the model has, and the last one."""


@dataclass(frozen=True)
class Explained:
    """What is to be said of it."""

    refused: tuple[str, ...]
    """Why it cannot run; empty where it can."""
    choice: Choice | None
    best: Answer


def explain(outline: Outline, cluster: Cluster, ask: Ask, given: StrategyRequest) -> Explained:
    """Of a strategy. Raises UserError where it cannot be read."""
    g = laid_out(cluster, ask, given)
    refused = reasons(outline, g)
    refused += [str(one) for one in refusals(facts_of(outline), g, training_rules(ask.in_backward, ask.rows))]
    best = _best(outline, cluster, ask)
    if refused:
        return Explained(tuple(refused), None, best)
    setting, limit = setting_of(cluster, ask), limit_of(cluster, ask)
    return Explained((), described(outline, g, setting, ask, limit, published())[0], best)


def _best(outline: Outline, cluster: Cluster, ask: Ask) -> Answer:
    """Of all that the framework is able to run, or of all where that has no layout: the one that is given may be of
    ranks that its export does not write. Raises UserError where nothing is legal."""
    try:
        return plan(outline, cluster, ask)
    except UserError:
        if ask.able == ALL:
            raise
        return plan(outline, cluster, replace(ask, able=ALL))


def _only(kinds: tuple[int, ...]) -> int:
    """Of the kinds of optimisers that may be used the one."""
    if len(kinds) != 1:
        raise UserError("explain looks at one strategy: give one --optimiser with it")
    return next(iter(kinds))


def ordered(mesh: str, axes: list[str]) -> bool:
    """Whether PP ranks lie within DP ranks. Raises UserError for an order that is not known."""
    orders = {"pp dp cp heads tp": False, "dp pp cp heads tp": True}
    for order, inner in orders.items():
        if axes == [name for name in order.split() if name in axes]:
            return inner
    raise UserError(
        f'the mesh "{mesh}" has axes in an order that is not priced: those farthest apart come first, as in '
        f"{' or '.join(orders)}"
    )


def _sequence_parallel(given: StrategyRequest, ask: Ask, axes: dict[str, tuple[int, int]]) -> bool:
    """Takes `sp` out of the axes, which is 1 or as large as TP. Raises UserError for another size."""
    tensor = axes.get("tp", (1, 1))[0]
    if (sp := axes.pop("sp", (0, 0))[0]) not in (0, 1, tensor):
        raise UserError(
            f'the mesh "{given.mesh}" has sp={sp}: sequence parallelism is over the TP ranks, {tensor}, or 1'
        )
    usual = framework(ask.framework).sequence_parallel if given.sequence_parallel is None else given.sequence_parallel
    return sp > 1 if sp else usual


def _sharded(
    given: StrategyRequest, axes: dict[str, tuple[int, int]]
) -> tuple[StrategyRequest, dict[str, tuple[int, int]]]:
    """With `fsdp` as DP ranks of ZeRO stage 3; beside `dp` (HSDP) states are divided over the ranks of `fsdp` alone."""
    if "fsdp" not in axes:
        return given, axes
    fsdp, dp, cp = (axes.get(name, (1, 1))[0] for name in ("fsdp", "dp", "cp"))
    mesh = " ".join(
        f"{'dp' if name == 'fsdp' else name}={dp * fsdp if name == 'fsdp' else size}"
        for name, (size, _) in axes.items()
        if name != "dp"
    )
    return replace(given, mesh=mesh, zero=3, shard=fsdp * cp if dp > 1 else 0), dict(Mesh.parse(mesh).axes)


def laid_out(cluster: Cluster, ask: Ask, given: StrategyRequest) -> Grid:
    """As a grid of one."""
    if ask.others:
        raise UserError("explain looks at one strategy: give one --precision with it")
    request = requested(cluster, ask)
    try:
        axes = dict(Mesh.parse(given.mesh).axes)
    except LayoutError as error:
        raise UserError(f'"{given.mesh}" is no mesh: {error}') from None
    if unknown := [name for name in axes if name not in (*AXES, *EXPERT_AXES, "sp", "fsdp")]:
        names = ", ".join((*AXES, *EXPERT_AXES, "sp", "fsdp"))
        raise UserError(f'the mesh "{given.mesh}" has the axis {unknown[0]}: axes are named {names}')
    given, axes = _sharded(given, axes)
    own_sequence = _sequence_parallel(given, ask, axes)
    folded = [axes.pop(name)[0] if name in axes else 1 for name in EXPERT_AXES]
    sizes = {AXES[name]: size for name, (size, _) in axes.items()}
    ranks = 1
    for size in sizes.values():
        ranks *= size
    if "dp" not in axes and request.devices % ranks == 0:
        sizes["data"] = request.devices // ranks
        ranks = request.devices
    if ranks != request.devices:
        raise UserError(f'the mesh "{given.mesh}" has {ranks} ranks, and there are {request.devices} devices')
    inner = ordered(given.mesh, [name for name, (size, _) in axes.items() if size > 1])
    sizes["context"] = sizes.get("context", 1) * sizes.get("ulysses", 1)
    group, share = again_of(framework(ask.framework).selective if given.again == "selective" else given.again)
    try:
        expert, expert_tensor = folded if max(folded) > 1 else (int(part) for part in given.experts.split("x"))
    except ValueError:
        raise UserError(f'"{given.experts}" are no EP ranks: write 8 x 1') from None
    try:
        ahead, behind = (int(part) for part in given.uneven.split())
    except ValueError:
        ahead = behind = -1
    if min(ahead, behind) < 0:
        raise UserError(
            f'"{given.uneven}" are no numbers of layers fewer of the first and the last virtual stage: write 1 1'
        )
    schedule = code("Interleaved1F1B" if given.schedule == "1F1B" and given.chunks > 1 else given.schedule)
    if schedule < 0:
        names = ", ".join(one.name for one in SCHEDULES)
        raise UserError(f'the search knows no schedule "{given.schedule}": give one of {names}')
    return grid(
        batch=request.batch, sequence=request.sequence, micro=given.micro * ask.rows, virtual=given.chunks,
        schedule=schedule, zero=given.zero, ahead=ahead, behind=behind,
        recompute=int(group), recomputed=share, expert=expert, expert_tensor=expert_tensor,
        sequence_parallel=float(own_sequence and sizes.get("tensor", 1) > 1),
        shard=given.shard or sizes.get("data", 1) * sizes.get("context", 1),
        optimiser=_only(ask.optimisers), offload=max(ask.offloads), inner=float(inner), **sizes,
    )  # fmt: skip
