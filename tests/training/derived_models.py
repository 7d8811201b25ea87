"""Models run as derived on some ranks, beside the same models whole: loss and every gradient."""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import MistralConfig, MistralForCausalLM

from tangram.layout import Mesh
from tangram.layout.intervals import elements
from tangram.layout.intervals import rank as rank_of
from tangram.models.building.twin import without_memory
from tangram.sharding.derive.explain.show import total
from tangram.sharding.derive.marking.marks import Mark, marks_of, read_marks
from tangram.sharding.derive.marking.published import published
from tangram.sharding.derive.of_model import fitting, graph_of
from tangram.sharding.derive.problem.states import SAME, SEVERAL
from tangram.sharding.derive.transitions import Change
from tangram.sharding.ops.rank_part import stands
from tangram.sharding.propagation.halo import needed
from tangram.sharding.runtime.operators import Operators
from tangram.sharding.runtime.program import Program
from tangram.training.data import IGNORE
from tangram.training.mesh.tensor_parallel import DerivedModel, parallel
from tangram.training.objective.expert_loads import Loads
from tangram.training.objective.loss import LOGITS, token_loss
from tangram.training.run.launch import Rank
from tests.sharding.derive.test_marks_files import MODELS, tiny
from tests.training.own_models import Another, Convolved, Diffusion, Two, Written


@dataclass(frozen=True)
class Work:
    """A model on a mesh, by the marks that come with it and others; with a mistake planted or without."""

    kind: str
    mesh: str
    marks: tuple[str, ...] = ()
    mistake: str = ""
    plans: str = ""
    """"tp": transformers' `tp_plan` as marks, experts by it, too; "ep": its `ep_plan`; "tp ep": both, over two axes or
    one; "none": no marks but the work's own; "": the marks that come with it."""
    leaves: bool = False
    """Logits stay in parts, as `tangram train` leaves them."""


@dataclass(frozen=True)
class Ran:
    """What came of it on one rank."""

    loss: float
    """Relative to that of the whole model."""
    worst: float
    """The gradient that is furthest off, relative to its norm."""
    where: str
    borders: int
    inside: int
    """Functions that are not called as they are."""
    miscounted: tuple[str, ...] = ()
    """Modules of experts of which the ranks count other tokens by expert than one process."""
    received: float = 0.0
    """Bytes that a rank received, as derived."""


OWN: Mapping[str, Callable[[], nn.Module]] = {
    "own": Two, "written": Written, "another": Another, "dit": Diffusion, "conv": Convolved
}  # fmt: skip
MARKS = Path(__file__).parent / "marks"
"""Of modules that no library knows, by their kind."""


def marks_for(kind: str) -> list[Mark]:
    """Those that come with a kind of model, or with the module."""
    own = MARKS / f"{kind}.marks"
    return read_marks(own) if own.exists() else marks_of(kind) or []


def marks_by(work: Work, model: nn.Module) -> list[Mark]:
    """Of a work."""
    if not work.plans:
        return marks_for(work.kind)
    mesh = Mesh.parse(work.mesh)
    experts = ("ep" if "ep" in mesh.axes else "tp") if "ep" in work.plans else None
    graph = graph_of(without_memory(model), inputs_of(work.kind), torch.float32)
    return fitting(graph, published(model, "tp" if "tp" in work.plans else "none", experts), mesh)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in OWN:
        return OWN[kind]()
    if kind == "windowed":  # its window is longer than a part of the inputs, and shorter than the whole
        return MistralForCausalLM(MistralConfig(**MODELS["llama"], sliding_window=12)).train()
    return tiny(kind).train()


def inputs_of(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    if kind == "vit":
        return {"pixel_values": torch.randn(4, 3, 32, 32, generator=generator)}
    if kind == "dit":
        noisy = torch.randn(4, 4, 8, 8, generator=generator)
        return {"noisy_BCXY": noisy, "time_B": 100 * torch.arange(4), "class_B": torch.arange(4)}
    ids = torch.randint(32, (4, 24 if kind == "conv" else 16), generator=generator)
    return {"ids_BS": ids} if kind in OWN else {"input_ids": ids, "use_cache": False}


def loss_of(model: nn.Module, kind: str) -> Tensor:
    inputs = inputs_of(kind)
    given = next(iter(inputs.values()))
    found: Any = model(given) if "ids_BS" in inputs else model(**inputs)
    if kind == "dit":
        return F.mse_loss(found, given.flip(0))
    if kind == "vit":
        return F.cross_entropy(found.logits, torch.arange(4))
    logits: Tensor = found if kind in OWN else found.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), given[:, 1:].flatten())


def loss_of_parts(model: nn.Module, held: DerivedModel, kind: str) -> Tensor:
    """The same of a language model whose logits lie in parts."""
    inputs = inputs_of(kind)
    labels_BS = F.pad(inputs["input_ids"][:, 1:], (0, 1), value=IGNORE)
    logits_BSV: Tensor = model(**inputs).logits
    return token_loss(logits_BSV, labels_BS, held.placement_of(LOGITS)) / (labels_BS != IGNORE).sum()


def run_all(rank: Rank, works: Sequence[Work]) -> list[Ran]:
    """The task of the ranks."""
    return [run(work) for work in works]


def run(work: Work) -> Ran:
    whole, model = model_of(work.kind), model_of(work.kind)
    chosen, watched = _chosen(whole)
    want = loss_of(whole, work.kind)
    for handle in watched:
        handle.remove()
    want.backward()
    axes = {name: n for name, (n, _) in Mesh.parse(work.mesh).axes.items()}
    devices = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    marks = [*marks_by(work, whole), *map(Mark.parse, work.marks)]
    held = parallel(model, marks, devices, inputs_of(work.kind))
    with held.leaving() if work.leaves else nullcontext():
        held.prepare(inputs_of(work.kind))
        if work.mistake:
            MISTAKES[work.mistake](held)
        loads = Loads([model], torch.device("cpu"), 1)
        loss = loss_of_parts(model, held, work.kind) if work.leaves else loss_of(model, work.kind)
    loss.backward()
    counted = _counted(loads, work.kind) if chosen else {}
    loads.close()
    program = held.programs[0]
    assert len(held.programs) == 1
    off = float((loss - want).detach().abs() / want.detach().abs())
    worst, where = _furthest(model, dict(whole.named_parameters()))
    wrong = tuple(name for name in {**chosen, **counted} if chosen.get(name) != counted.get(name))
    return Ran(off, worst, where, len(program.borders), program.inside, wrong, total(program.derived))


def _chosen(whole: nn.Module) -> tuple[dict[str, tuple[int, ...]], list[Any]]:
    """By module of experts, how often each is chosen: filled in while the model runs."""
    found: dict[str, tuple[int, ...]] = {}
    handles: list[Any] = []

    def note(name: str, module: Any, args: tuple[Any, ...]) -> None:
        found[name] = tuple(torch.bincount(args[1].flatten(), minlength=module.num_experts).tolist())

    for name, module in cast("Iterable[tuple[str, Any]]", whole.named_modules()):
        if hasattr(module, "num_experts") and name.endswith("experts"):
            handles.append(module.register_forward_pre_hook(partial(note, name)))
            found[name] = ()
    return found, handles


def _counted(loads: Loads, kind: str) -> Mapping[str, tuple[int, ...]]:
    """The same as ranks count, which all have the same tokens."""
    batch = SimpleNamespace(inputs_BS=inputs_of(kind)["input_ids"])
    group = dist.group.WORLD
    world = SimpleNamespace(size=dist.get_world_size(), data_size=1, group=group, index=0)
    counted = loads.after(1, [cast(Any, batch)], cast(Any, world))
    assert counted is not None
    return counted.layers


def _furthest(model: nn.Module, whole: Mapping[str, nn.Parameter]) -> tuple[float, str]:
    """One that is nothing but rounding (of a bias of keys, which softmax takes out) against the others' norm."""
    found = [(0.0, "")]
    least = 1e-4 * float(torch.stack([p.grad.norm() for p in whole.values() if p.grad is not None]).norm())
    for name, parameter in model.named_parameters():
        grad, want = parameter.grad, whole[name].grad
        if want is None or grad is None:
            assert want is None or not want.any(), f"{name} has no gradient"
            continue
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found.append((float((full - want).norm() / want.norm().clamp(min=least)), name))
    return max(found)


def _unsummed(held: DerivedModel) -> None:
    held.programs[0].summed = {}


def _changed(held: DerivedModel, act: Callable[[Change], Change]) -> None:
    program: Program = held.programs[0]
    for border in program.borders.values():
        for side in (border.takes, border.gives):
            side.update({leaf: act(change) for leaf, change in side.items()})


def _same_for_several(held: DerivedModel) -> None:
    """Gathered as if all ranks computed the same with it: the gradient is not summed."""
    _changed(held, lambda change: tuple(s._replace(target=SAME if s.target == SEVERAL else s.target) for s in change))


def _several_for_same(held: DerivedModel) -> None:
    """What is alike on all ranks is summed on the way back as if it were not."""
    _changed(held, lambda change: tuple(s._replace(target=SEVERAL if s.target == SAME else s.target) for s in change))


def _bias_on_every_rank(held: DerivedModel) -> None:
    """A product that is cut in what it sums is called as it is, bias and all, on every rank."""
    program = held.programs[0]
    for actions in program.actions.values():
        for action in actions.values():
            action.why = "" if "addmm" in action.why else action.why


def _operators(held: DerivedModel) -> list[Any]:
    """What runs operators in the stead of functions."""
    cells: Any = cast(Any, next(iter(held._programs.values())).instead).__closure__  # pyright: ignore[reportPrivateUsage]
    return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Operators)]


def _other_rows(held: DerivedModel) -> None:
    """Every rank takes itself for the first."""
    for own in _operators(held):
        own._rank = 0


def _routed(held: DerivedModel, wrong: Callable[[Tensor, tuple[str, str], Tensor], Tensor]) -> None:
    """Of a tensor, the kinds of rows' states and what should come of it: what comes instead."""
    routes = held._routes  # pyright: ignore[reportPrivateUsage]
    real = routes.brought

    def brought(x: Tensor, axis: str, source: Any, target: Any) -> Tensor:
        return wrong(x, (source.kind, target.kind), real(x, axis, source, target))

    cast(Any, routes).brought = brought


def _counts_of_other_groups(held: DerivedModel) -> None:
    """Each of a rank's experts has as many rows as another one should have."""

    def swapped(x: Tensor, kinds: tuple[str, str], right: Tensor) -> Tensor:
        if kinds[1] != "sent ends":
            return right
        return torch.diff(right, prepend=right.new_zeros(1)).flip(0).cumsum(0).to(right.dtype)

    _routed(held, swapped)


def _rows_of_other_tokens(held: DerivedModel) -> None:
    """What experts have made of rows is not put back in the order of these."""
    _routed(held, lambda x, kinds, right: right.roll(1, 0) if kinds == ("sent", "own") else right)


def _biases_of_other_experts(held: DerivedModel) -> None:
    """A row takes the bias of another one of its rank's experts."""
    _routed(held, lambda x, kinds, right: right.max() - right if kinds[1] == "sent ids" else right)


def _one_block(held: DerivedModel) -> None:
    """What is cut in three blocks, queries, keys and values, is cut in one: the other ranks have the values."""
    model, whole = held._model, dict(model_of("dit").named_parameters())  # pyright: ignore[reportPrivateUsage]
    for name, parameter in model.named_parameters():
        if name.endswith("qkv.weight"):
            part = cast(DTensor, parameter.data).to_local()
            part.copy_(whole[name].data.chunk(len(whole[name]) // len(part))[dist.get_rank()])


def _masks_of_the_part(held: DerivedModel) -> None:
    """Attention is told that it is causal, of queries that begin elsewhere."""
    vars(held.programs[0])["cuts_queries"] = False


def _first_places(held: DerivedModel) -> None:
    """Positions and rows of masks are those of the first part."""
    now, bring = next(iter(held._programs.values())), held._bring  # pyright: ignore[reportPrivateUsage]

    def first(x: Tensor, change: Change) -> Tensor:
        for step in change:
            if not x.requires_grad and step.source.kind in ("same", "several") and step.target.kind == "cut":
                x = x.narrow(step.target.dim, 0, x.shape[step.target.dim] // dist.get_world_size())
            else:
                x = bring(x, (step,))
        return x

    now.bring = held._bring = first  # type: ignore[method-assign]


def _no_halos(held: DerivedModel) -> None:
    """Windows read nothing of other ranks' elements: zeros, as beyond the ends."""
    for own in _operators(held):
        linked, real = own._linked, own._linked.with_halos

        def none(bound: Any, part: Any, along: Any, local: Any, real: Any = real) -> Any:
            found = real(bound, part, along, local)
            for f, window in bound.windows.items():
                if f in part.indices:
                    here = rank_of(needed(bound, part, f), stands(part, f, window.n))
                    mask = torch.zeros(found[window.place].shape[window.dim])
                    mask[elements(here)] = 1
                    found[window.place] = found[window.place] * mask
            return found

        linked.with_halos = none


def _scans_anew(held: DerivedModel) -> None:
    """What comes before a part is not joined to its scan."""
    for own in _operators(held):
        own._linked.with_totals = lambda bound, part, along, results: results


def _gathered_as_the_same(held: DerivedModel) -> None:
    """The gradient of a gathered parameter is cut, and not summed before."""
    program = held.programs[0]
    program.gathered = {
        name: tuple(step._replace(target=SAME) for step in change) for name, change in program.gathered.items()
    }


MISTAKES: Mapping[str, Callable[[DerivedModel], None]] = {
    "gradients of norms are not summed": _unsummed,
    "gathers are not summed on the way back": _same_for_several,
    "logits are summed on the way back": _several_for_same,
    "every rank adds the bias": _bias_on_every_rank,
    "every rank looks up the first rows": _other_rows,
    "heads are cut in one block": _one_block,
    "masks are those of a sequence as long as the part": _masks_of_the_part,
    "every rank takes the first positions": _first_places,
    "gradients of gathered parameters are not summed": _gathered_as_the_same,
    "every rank counts the rows of other experts": _counts_of_other_groups,
    "rows are put back in another order": _rows_of_other_tokens,
    "rows take the biases of other experts": _biases_of_other_experts,
    "windows read nothing of other ranks": _no_halos,
    "scans begin anew on every rank": _scans_anew,
}


def named(works: Iterable[Work]) -> dict[str, Work]:
    """By a name for tests."""
    found: dict[str, Work] = {}
    for work in works:
        plans = f"by the plans for {work.plans}" if work.plans else ""
        parts = (work.kind, f"over {work.mesh}", plans, "further marks" if work.marks else "", work.mistake)
        found[", ".join(part for part in parts if part)] = replace(work)
    return found
