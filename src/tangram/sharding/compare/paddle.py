"""Paddle's rules beside ours: the same operators, shapes and cuts, and who is right where they differ.

Paddle's rules can be asked on a CPU without devices. Each dim of each input is cut over one axis of two ranks, then
two dims of the inputs over two axes. Where what Paddle says of inputs or results is not what our propagation says,
both are run: parts by the layouts that it names, put together by the layouts that it predicts, and compared with the
whole operator. Only forward; a rule of Paddle's for gradients is a function of its own.

Some attributes end Paddle's process, so each operator is asked in a fork of a helper process.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from tangram.errors import UserError
from tangram.hardware.host import workers
from tangram.layout import Layout, Mesh
from tangram.layout.syntax import VOID, Cut, Dim
from tangram.models.capturing.graph import flat
from tangram.sharding.compare.paddle_table import PAIRS, PaddlePair
from tangram.sharding.ops.cut_trees import Tree
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.proof.execute import EXPECTED_ERRORS
from tangram.sharding.proof.propagated import check
from tangram.sharding.propagation.propagate import Propagation, propagate

LIMIT = 300.0
EACH = 60.0
"""Seconds of an operator."""
AXES = ("x", "y")


@dataclass(frozen=True)
class PaddleReport:
    """One row of the table: in how many cuts the two agree."""

    paddle: str
    aten: str
    cases: int
    agree: int


@dataclass(frozen=True)
class PaddleDifference:
    """A cut of which the two say different things."""

    paddle: str
    aten: str
    inputs: str
    """The layouts of the inputs, in aten's order."""
    theirs: str
    """What Paddle needs of the inputs, and what it predicts."""
    ours: str
    verdict: str
    """`Paddle is wrong`, `ours is wrong`, `both are right`, `ours is right` (Paddle refuses), `ours refuses`, or
    `Paddle ends its process`."""
    why: str = ""

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        sides = f": Paddle {self.theirs}, ours {self.ours}" if self.theirs else ""
        return f"{self.paddle} ({self.aten}) of {self.inputs}{sides}; {self.verdict}{why}."


def compare(names: Sequence[str] = ()) -> tuple[list[PaddleReport], list[PaddleDifference]]:
    """Ask both of every cut. `names`: only these, as Paddle calls them. Raises UserError where Paddle is not there."""
    unknown = [name for name in names if name not in {pair.paddle for pair in PAIRS}]
    if unknown:
        raise UserError(
            f"there is no operator {unknown[0]} here, but {', '.join(dict.fromkeys(p.paddle for p in PAIRS))}"
        )
    if importlib.util.find_spec("paddle") is None:
        raise UserError("Paddle is not installed: pip install 'tangram-train[paddle]' brings it")
    shares = workers.in_parts(f"{__name__}:job", {"names": [*names]}, LIMIT, "Paddle could not be asked")
    reports = [PaddleReport(**one) for share in shares for one in share["reports"]]
    differences = [PaddleDifference(**one) for share in shares for one in share["differences"]]
    place = {(pair.paddle, pair.aten): i for i, pair in enumerate(PAIRS)}
    reports.sort(key=lambda one: place[one.paddle, one.aten])
    differences.sort(key=lambda one: place[one.paddle, one.aten])
    return reports, differences


def first_of_each(differences: Sequence[PaddleDifference]) -> list[tuple[PaddleDifference, int]]:
    """Of each operator the first difference of each verdict, and how many are like it."""
    found: dict[tuple[str, str, str], list[PaddleDifference]] = {}
    for one in differences:
        found.setdefault((one.paddle, one.aten, one.verdict), []).append(one)
    return [(some[0], len(some) - 1) for some in found.values()]


def job(names: list[str], part: int, parts: int) -> Any:
    """One helper's share, each operator in a fork."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    importlib.import_module("paddle")  # here, and not in each fork
    reports: list[Any] = []
    differences: list[Any] = []
    for pair in PAIRS[part::parts]:
        if names and pair.paddle not in names:
            continue
        cases = cast(
            "list[Any] | None", workers.forked(lambda pair=pair: [_plain(one) for one in _compared(pair)], EACH)
        )
        known = cases or []
        found = [one for one in known if one is not None]
        if cases is None:
            found = [_plain(_ended(pair))]
        reports.append(asdict(PaddleReport(pair.paddle, pair.aten, len(known), len(known) - len(found) * bool(known))))
        differences += found
    return {"reports": reports, "differences": differences}


def _ended(pair: PaddlePair) -> PaddleDifference:
    given = ", ".join(" ".join(map(str, shape)) for shape in pair.shapes)
    return PaddleDifference(
        pair.paddle, pair.aten, f"{given} with {pair.attributes}", "", "", "Paddle ends its process"
    )


def _plain(one: PaddleDifference | None) -> Any:
    return None if one is None else asdict(one)


# ---------------------------------------------------------------- cuts

Places = tuple[tuple[int, int], ...]
"""(tensor, dim) for each axis."""


def _cuts(pair: PaddlePair) -> Iterator[Places]:
    """Each dim by itself, then two: of one tensor, or of two."""
    every = [(i, d) for i, shape in enumerate(pair.shapes) for d in range(len(shape))]
    yield from ((one,) for one in every)
    yield from itertools.permutations(every, 2)


def _compared(pair: PaddlePair) -> Iterator[PaddleDifference | None]:
    tensors = pair.tensors()
    call = pair.call(tensors)
    expected = call.run()
    for places in _cuts(pair):
        mesh = Mesh.parse(" ".join(f"{axis}=2" for axis in AXES[: len(places)]))
        given = [
            Layout(tuple(Dim(VOID, n, cuts=_axes(places, i, d)) for d, n in enumerate(shape)))
            for i, shape in enumerate(pair.shapes)
        ]
        layouts = [*given, *[None] * (len(call.tensors) - len(given))]
        ours: Propagation | str
        try:
            ours = propagate(builtin(), call, layouts, mesh, differentiable=False)
        except UserError as error:
            ours = str(error)
        yield _judged(pair, given, ours, _requested(pair, given, mesh, expected), expected)


def _axes(places: Places, tensor: int, dim: int) -> tuple[Cut, ...]:
    return tuple(Cut(AXES[k]) for k, place in enumerate(places) if place == (tensor, dim))


# ---------------------------------------------------------------- Paddle

_KINDS = {"SUM": "sum", "MAX": "max", "MIN": "min", "AVG": "avg"}


@dataclass(frozen=True)
class _Claim:
    """What Paddle says: the layouts that it needs, in aten's order, and those of the results."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    strange: str = ""
    """A pending reduction that has no name here."""


def _requested(pair: PaddlePair, given: Sequence[Layout], mesh: Mesh, expected: Sequence[Any]) -> _Claim | str:
    core = importlib.import_module("paddle.base.core")
    attributes = importlib.import_module("paddle.distributed.auto_parallel.static.dist_attribute")
    process_mesh: Any = importlib.import_module("paddle.distributed").ProcessMesh
    ranks: Any = torch.arange(mesh.size).reshape([n for n, _ in mesh.axes.values()]).numpy()
    order = pair.order or tuple(range(len(given)))
    axes = list(mesh.axes)
    specs: list[Any] = []
    for place in order:
        one = attributes.TensorDistAttr()
        one.dims_mapping = [axes.index(dim.cuts[0].axis) if dim.cuts else -1 for dim in given[place].dims]
        one.process_mesh = process_mesh(ranks, dim_names=axes)
        specs.append(attributes.DistTensorSpec(list(pair.shapes[place]), one))
    arguments = ([specs] if pair.listed else specs) + [*pair.attributes]
    try:
        needed, made = core.get_phi_spmd_rule(pair.paddle).infer_forward(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[-1].partition("(at /paddle")[0].strip()
    needed, made = flat(needed), flat(made)
    inputs: dict[int, Layout] = {}
    strange = ""
    for place, one in zip(order, needed, strict=False):
        inputs[place], more = _layout(one, pair.shapes[place], axes)
        strange = strange or more
    outputs: list[Layout] = []
    for one, tensor in zip(made[: pair.results], expected, strict=False):
        layout, more = _layout(one, tensor.shape, axes)
        outputs.append(layout)
        strange = strange or more
    return _Claim(tuple(inputs.get(i, layout) for i, layout in enumerate(given)), tuple(outputs), strange)


def _layout(attribute: Any, shape: Sequence[int], axes: Sequence[str]) -> tuple[Layout, str]:
    """A layout, and what is pending that has no name here. Several axes of a dim are only in the text."""
    text = str(attribute)
    listed = re.search(r"dim_mappings: \[(.*?)\], batch_dim", text)
    mapped = re.findall(r"\[([\d, -]*)\]", listed[1]) if listed else []
    dims: list[Dim] = []
    for i, n in enumerate(shape):
        own = [int(k) for k in re.findall(r"-?\d+", mapped[i])] if i < len(mapped) else []
        dims.append(Dim(VOID, n, cuts=tuple(Cut(axes[k]) for k in own if k >= 0)))
    waiting = [(axes[int(k)], kind) for k, kind in re.findall(r"Partial\(dims:(\d+), (\w+)\)", text)]
    pending = tuple((_KINDS[kind], axis) for axis, kind in waiting if kind in _KINDS)
    return Layout(tuple(dims), (), pending), next((kind for _, kind in waiting if kind not in _KINDS), "")


# ---------------------------------------------------------------- who is right


def _judged(
    pair: PaddlePair, inputs: Sequence[Layout], ours: Propagation | str, theirs: _Claim | str, expected: Sequence[Any]
) -> PaddleDifference | None:
    """What the two say differently of a cut; None where they agree."""
    own = _described(ours.inputs, ours.outputs[: pair.results]) if isinstance(ours, Propagation) else f"refuses: {ours}"
    other = _described(theirs.inputs, theirs.outputs) if isinstance(theirs, _Claim) else f"refuses: {theirs}"
    if isinstance(ours, Propagation) and own == other and not (isinstance(theirs, _Claim) and theirs.strange):
        return None
    verdict, why = "both are right", ""
    if isinstance(ours, str):
        verdict = "ours refuses"
    elif failure := check(ours, expected):
        verdict, why = "ours is wrong", f"{failure.where} {failure.what}"
    elif isinstance(theirs, str):
        verdict = "ours is right"
    elif wrong := _refuted(ours, theirs, expected):
        verdict, why = "Paddle is wrong", wrong
    return PaddleDifference(pair.paddle, pair.aten, ", ".join(map(_text, inputs)), other, own, verdict, why)


def _text(layout: Layout) -> str:
    """Dims here have no names."""
    return str(layout).replace("_=", "")


def _described(inputs: Sequence[Layout | None], outputs: Sequence[Layout]) -> str:
    sides = [", ".join(_text(one) or "()" for one in side if one is not None) for side in (inputs, outputs)]
    return f"[{sides[0]} -> {sides[1]}]"


def _refuted(ours: Propagation, claim: _Claim, expected: Sequence[Any]) -> str:
    """What is wrong with what Paddle says, when ranks run on what it says they have; nothing where it holds."""
    if claim.strange:
        return f"a pending {claim.strange}"
    if len(claim.outputs) < len(ours.outputs):  # of results that it does not name, or names in another shape
        outputs = (*claim.outputs, *ours.outputs[len(claim.outputs) :])
    else:
        outputs = claim.outputs
    trees: dict[str, Tree] = {}
    for dims, layout in zip(ours.bound.inputs, claim.inputs, strict=False):
        for factors, dim in zip(dims or (), layout.dims, strict=True):
            if dim.cuts and factors:
                trees.setdefault(factors[0], dim.cuts)
    if ours.bound.rule.note("scale") is not None:  # a part of ours is counted by its share: all are even here
        outputs = tuple(replace(one, pending=tuple(("sum", axis) for _, axis in one.pending)) for one in outputs)
    inputs = (*claim.inputs, *ours.inputs[len(claim.inputs) :])
    found = replace(ours, inputs=inputs, outputs=outputs, trees=trees, choices={}, relayouts=())
    try:
        failure = check(found, [*expected[: len(claim.outputs)], *[None] * (len(outputs) - len(claim.outputs))])
    except (UserError, *EXPECTED_ERRORS) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"{failure.where} {failure.what}" if failure else ""
