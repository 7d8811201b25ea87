"""The table of op rules: torch's database right and in how many bytes, time of propagation, lines, what is covered.

`--only`: a group of figures (time, lines, core, database, gaps, whole). `database` runs every entry of torch's database
of operators by our rules and by DTensor, some five minutes on two cores; `--quick` takes every twelfth entry. `gaps`
lists what discovery finds and the table does not allow. `whole` is torch's five-axis `add`, some twenty seconds a call,
and runs only when it is asked for.

The peer is DTensor of the torch at hand, in this process, without its cache: `propagate_op_sharding_non_cached`. Ours
makes the call, finds the rule, binds it and chooses for every axis, and has no cache of calls, shapes or layouts; what
a rule says of so many dims is worked out once, and the rows `first of its kind` are without that, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, _decomp
from torch._C import DispatchKey
from torch._ops import OpOverload

from bench._sharding import database, gaps
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row, interleaved
from tangram.layout import Layout, Mesh
from tangram.sharding.ops import views
from tangram.sharding.ops.calls import OpCall, name_of, schema_of, tensor_arguments
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.propagation.propagate import propagate

GROUPS = ("time", "lines", "core", "database", "gaps", "whole")
TARGET = 0.1  # ms
AXES = "xyzuv"
TORCH_AXES = 3
"""More take torch's DTensor seconds for each call."""


def rows(quick: bool, only: tuple[str, ...] = ()) -> Iterable[Row]:
    """The figures; `quick` takes fewer repeats."""
    unknown = [name for name in only if name not in GROUPS]
    if unknown:
        raise UserError(f"there is no group {unknown[0]!r} of figures here; known are {', '.join(GROUPS)}")
    wanted = only or GROUPS[: 4 if quick else 5]
    with _ranks(2 ** len(AXES)):
        if "time" in wanted:
            for axes in (1, 3, 5):
                for name in CASES:
                    yield from _time(name, axes, 3 if quick else 15)
        if "whole" in wanted:
            yield from _whole()
        if "lines" in wanted:
            yield from _lines()
        if "core" in wanted:
            yield _core()
    if "database" in wanted:
        yield from database.rows(quick)
    if "gaps" in wanted:
        yield from gaps.rows()


# ---------------------------------------------------------------- time

Case = tuple[OpOverload, tuple[tuple[int, ...], ...], dict[int, tuple[str, ...]]]
"""Operator, shapes, and by the number of axes the layouts."""

CASES: dict[str, Case] = {
    "add of 4-D tensors": (
        torch.ops.aten.add.Tensor,
        ((8, 16, 32, 64),) * 2,
        {1: ("a/x b c d",) * 2, 3: ("a/x b/y c/z d",) * 2, 5: ("a/x/v b/y c/z d/u",) * 2},
    ),
    "mm, placements mixed": (
        torch.ops.aten.mm.default,
        ((64, 32), (32, 64)),
        {1: ("m/x k", "k n"), 3: ("m/x k", "k n/y"), 5: ("m/x/z k", "k n/y/u")},
    ),
    "bmm": (
        torch.ops.aten.bmm.default,
        ((8, 64, 32), (8, 32, 64)),
        {1: ("b/x m k",) * 2, 3: ("b/x m/y k", "b/x k n/z"), 5: ("b/x/u m/y k", "b/x/u k n/z/v")},
    ),
}


def _time(name: str, axes: int, repeats: int) -> Iterable[Row]:
    operator, shapes, texts = CASES[name]
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    mesh = Mesh.parse(" ".join(f"{axis}=2" for axis in AXES[:axes]))
    layouts = [Layout.parse(text).bind(shape) for text, shape in zip(texts[axes], shapes, strict=True)]
    rules = builtin()
    line = rules.find(OpCall.of(operator, tensors, {}))
    assert line is not None

    def ours() -> object:
        return propagate(rules, OpCall.of(operator, tensors, {}), layouts, mesh)

    def first() -> object:
        vars(line.rule).pop("_patterns", None)
        return ours()

    calls: dict[str, Callable[[], object]] = {"ours": ours, "first": first}
    if axes <= TORCH_AXES:
        calls["torch"] = _dtensor(operator, tensors, layouts, axes)
    times = {key: seconds * 1e3 for key, seconds in interleaved(calls, repeats).items()}
    peers = {"torch DTensor": times["torch"]} if "torch" in times else {}
    what = f"propagate {name}, {axes} mesh ax{'e' if axes > 1 else 'i'}s"
    yield Row(what, "ms", times["ours"], peers, target=TARGET)
    yield Row(f"{what}, first of its kind", "ms", times["first"], peers, target=TARGET)


def _whole() -> Iterable[Row]:
    """Once, for it takes torch some twenty seconds."""
    name, axes = "add of 4-D tensors", 5
    operator, shapes, texts = CASES[name]
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    layouts = [Layout.parse(text).bind(shape) for text, shape in zip(texts[axes], shapes, strict=True)]
    theirs = _dtensor(operator, tensors, layouts, axes)
    start = time.perf_counter()
    theirs()
    seconds = time.perf_counter() - start
    mesh, rules = Mesh.parse(" ".join(f"{axis}=2" for axis in AXES)), builtin()
    calls = {"ours": lambda: propagate(rules, OpCall.of(operator, tensors, {}), layouts, mesh)}
    ours = interleaved(calls, 5)["ours"]
    yield Row(f"propagate {name}, {axes} mesh axes, beside torch", "ms", ours * 1e3, {"torch DTensor": seconds * 1e3},
              target=TARGET)  # fmt: skip


def _dtensor(
    operator: OpOverload, tensors: Sequence[Tensor], layouts: Sequence[Layout], axes: int
) -> Callable[[], object]:
    """The same by torch's DTensor, without its cache."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema

    mesh = DeviceMesh("cpu", torch.arange(2**axes).reshape((2,) * axes))
    specs: list[DTensorSpec] = []
    for tensor, layout in zip(tensors, layouts, strict=True):
        where = {cut.axis: dim for dim, one in enumerate(layout.dims) for cut in one.cuts}
        placements = tuple(Shard(where[axis]) if axis in where else Replicate() for axis in AXES[:axes])
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        specs.append(DTensorSpec(mesh, placements, tensor_meta=meta))
    schema = OpSchema(operator, tuple(specs), {})
    propagator = _propagator(DTensor)
    return lambda: propagator.propagate_op_sharding_non_cached(schema)


def _propagator(dtensor: Any) -> Any:
    return dtensor._op_dispatcher.sharding_propagator


@contextmanager
def _ranks(world: int) -> Generator[None]:
    """A group of ranks that do not exist: DTensor wants one for its mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- what the table covers


def _overloads() -> list[OpOverload]:
    """Every overload of aten."""
    found: list[OpOverload] = []
    names: list[str] = vars(torch)["_C"]._dispatch_get_all_op_names()
    for name in names:
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == "aten" and hasattr(torch.ops.aten, packet):
            one: Any = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if one is not None:
                found.append(one)
    return found


def _has_rule(operator: OpOverload) -> bool:
    from tangram.sharding.ops import computed_rules

    named = name_of(operator) in computed_rules.ESCAPES or bool(builtin().all_of(operator))
    return named or views.view_of(operator) is not None


def _dtensor_knows() -> set[OpOverload]:
    from torch.distributed.tensor import DTensor

    propagator = _propagator(DTensor)
    tables = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
    return {op for name in tables for op in getattr(propagator, name, {})}


def _lines() -> Iterable[Row]:
    from torch.distributed import tensor

    from tangram.sharding.ops import computed_rules

    files = [f for f in resources.files("tangram.sharding.rules").iterdir() if f.name.endswith(".rules")]
    functions = [Path(str(module.__file__)) for module in (views, computed_rules)]
    ours = sum(len(f.read_text().splitlines()) for f in files) + sum(map(_physical, functions))
    covered = sum(map(_has_rule, _overloads()))
    theirs = sum(map(_physical, (Path(str(tensor.__file__)).parent / "_ops").glob("_*.py")))
    known = len(_dtensor_knows())
    yield Row("lines of the table and of its functions", "lines", ours, {"torch DTensor": theirs})
    yield Row("overloads of aten with a rule", "operators", covered, {"torch DTensor": known}, better="higher")
    yield Row("lines for an operator", "lines", ours / covered, {"torch DTensor": theirs / known}, target=1)


def _physical(file: Path) -> int:
    return len(file.read_text().splitlines())


def _core() -> Row:
    """With a rule, or taken apart by torch's own decompositions, or without a tensor that could be cut."""
    core = [one for one in _overloads() if torch.Tag.core in one.tags]
    missing = [one for one in core if not (_has_rule(one) or _taken_apart(one) or _without_tensors(one))]
    known = _dtensor_knows()
    theirs = sum(one in known or _taken_apart(one) or _without_tensors(one) for one in core)
    names = ", ".join(sorted(str(one).removeprefix("aten.") for one in missing))
    what = f"of {len(core)} core operators of aten: with a rule, decomposed, or without tensors"
    what += f" (not: {names})" if names else ""
    count = len(core) - len(missing)
    return Row(what, "operators", count, {"torch DTensor": theirs}, target=len(core), better="higher")


def _taken_apart(operator: OpOverload) -> bool:
    """Whether torch turns it into other operators, by its dispatcher or by its table of decompositions."""
    return operator in vars(_decomp)["decomposition_table"] or operator.has_kernel_for_dispatch_key(
        DispatchKey.CompositeImplicitAutograd
    )


def _without_tensors(operator: OpOverload) -> bool:
    """Whether nothing goes in that could be cut, or numbers come out: `empty`, `sym_size`."""
    returns = schema_of(operator).returns
    return not tensor_arguments(operator) or not any("Tensor" in str(r.type) for r in returns)
