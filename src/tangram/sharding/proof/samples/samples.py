"""Calls to prove rules with: what torch's own test samples make of its operators, as the dispatcher sees them.

Each sample of torch's database of operators (the one that its tests use) is run whole under a mode that notes every
operator that is reached, so that a rule is tried with the arguments that users' calls end in. Values are drawn anew,
with both signs.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tangram.errors import UserError
from tangram.sharding.ops.calls import DIM_ARGUMENTS, OpCall
from tangram.sharding.proof.samples import extra_samples

SAMPLES = 40
"""Of an operator of the database that are run."""
CALLS = 16
"""Of an operator of the dispatcher that are kept."""
LARGEST = 1 << 14
"""Elements of a sample."""
ALIKE = 3
"""Of those, with tensors of the same numbers of dims."""


class SampleRecorder(TorchDispatchMode):
    """Notes the calls of operators, with their tensors as they were then."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[OpCall]] = {}
        self._seen: set[str] = set()
        self._alike: dict[Any, int] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = OpCall.of(func, args, kwargs)
        kept = self.calls.setdefault(call.name, [])
        flags = tuple(value for value in call.arguments.values() if isinstance(value, bool))
        dims = call.name, flags, tuple(-1 if t is None else t.ndim for t in call.tensors)
        if len(kept) < CALLS and self._alike.get(dims, 0) < ALIKE and any(t is not None for t in call.tensors):
            self._note(call, dims, kept)
        return func(*args, **kwargs)

    def _note(self, call: OpCall, dims: Any, kept: list[OpCall]) -> None:
        if str(call) not in self._seen:
            self._seen.add(str(call))
            self._alike[dims] = self._alike.get(dims, 0) + 1
            kept.append(_frozen(call))


def _frozen(call: OpCall) -> OpCall:
    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = value.detach().clone(memory_format=torch.contiguous_format)
        return made if made.is_contiguous() else made.contiguous()

    return OpCall(call.operator, cast("dict[str, Any]", tree_map(copy, dict(call.arguments))))


def recorded(names: Sequence[str] = ()) -> dict[str, list[OpCall]]:
    """Calls by the operator's name. `names`: of these operators at least; the entries that bear a name go first, and
    nothing more is run once each name has calls.

    Raises UserError where torch's database cannot be imported.
    """
    try:
        from torch.testing._internal.common_methods_invocations import op_db  # what torch's own tests use
    except ImportError as error:
        raise UserError(f"torch's samples cannot be loaded ({error}): install tangram-train[proof]") from None
    infos = cast("list[Any]", op_db)
    first = [info for info in infos if any(_alike(info.name, name) for name in names)]
    recorder, state = SampleRecorder(), torch.get_rng_state()
    extra_samples.run(recorder)
    for info in [*first, *(info for info in infos if info not in first)]:
        # The database takes long: it is left as soon as each name has a call.
        if names and info not in first and all(_has(recorder, name) for name in names):
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _record(recorder, info)
    torch.set_rng_state(state)
    return {name: calls for name, calls in recorder.calls.items() if calls}


def is_named(names: Sequence[str], name: str) -> bool:
    """Whether an operator is one of some: by its whole name, or by that of all its overloads."""
    return not names or name in names or name.partition(".")[0] in names


def _alike(entry: str, name: str) -> bool:
    """Whether an entry of the database is likely to end in an operator."""
    return entry.rpartition(".")[2].strip("_") == name.partition(".")[0].strip("_")


def _has(recorder: SampleRecorder, name: str) -> bool:
    return any(calls and is_named([name], own) for own, calls in recorder.calls.items())


def _record(recorder: SampleRecorder, info: Any) -> None:
    """Run the samples of one entry."""
    dtype = next((d for d in (torch.float64, torch.float32, torch.int64) if info.supports_dtype(d, "cpu")), None)
    if dtype is None:
        return
    torch.manual_seed(0)  # the same samples each time
    try:
        samples: list[Any] = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), SAMPLES))
    except Exception:  # noqa: BLE001  of libraries that are not there
        return
    for sample in samples:
        if _elements(sample) <= LARGEST:
            with recorder:
                try:
                    info.op(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # noqa: BLE001, S112  a sample that cannot run here is no call
                    continue


def _elements(sample: Any) -> int:
    found = [sample.input, *sample.args, *sample.kwargs.values()]
    return sum(t.numel() for t in tree_leaves(found) if isinstance(t, Tensor))


def drawn(call: OpCall, seed: int) -> OpCall:
    """The same call with other values of its numbers, of both signs, and of its truths. Integers may be indices."""
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        if t.dtype == torch.bool:
            return torch.rand(t.shape, generator=generator) > 0.5
        if t.is_floating_point():
            return torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
        return t

    return call.with_tensors([t if t is None else draw(t) for t in call.tensors])


def of_dtype(call: OpCall, dtype: torch.dtype) -> OpCall | None:
    """The same call with its floating tensors as another type; None where it has none."""
    if not any(t is not None and t.is_floating_point() for t in call.tensors):
        return None
    asked = call.arguments.get("dtype")
    if dtype.is_complex and isinstance(asked, torch.dtype) and not asked.is_complex:
        return None  # what torch derives of numbers whose imaginary part is dropped is not their gradient

    def cast_to(t: Tensor | None) -> Tensor | None:
        if t is None or not t.is_floating_point():
            return t
        if dtype == torch.bool:
            return t > t.mean()  # true in some places only, also where all are positive
        if dtype.is_complex:
            return torch.complex(t.double(), t.double().flip(0) if t.ndim else t.double() / 2)
        if dtype.is_floating_point:  # where rounding is coarse, a large number's logarithm says nothing
            return torch.where(t.isfinite(), t.clamp(-10, 10), t).to(dtype)
        return t.nan_to_num().clamp(-100, 100).to(dtype)

    return call.with_tensors([cast_to(t) for t in call.tensors])


def respelled(call: OpCall) -> Iterator[OpCall]:
    """The same call with its dims counted from the other end, where it names any."""
    first = next((t for t in call.tensors if t is not None), None)
    if first is None or not first.ndim or call.name.startswith("_"):  # private ones are called with dims from 0 on
        return
    for name in DIM_ARGUMENTS & call.arguments.keys():
        value = call.arguments[name]
        if isinstance(value, int) and not isinstance(value, bool) and -first.ndim <= value < first.ndim:
            other = value - first.ndim if value >= 0 else value + first.ndim
            yield OpCall(call.operator, {**call.arguments, name: other})
        elif isinstance(value, list) and value and all(isinstance(v, int) for v in cast("list[Any]", value)):
            yield OpCall(
                call.operator,
                {
                    **call.arguments,
                    name: [(v - first.ndim if v >= 0 else v + first.ndim) for v in cast("list[int]", value)],
                },
            )
