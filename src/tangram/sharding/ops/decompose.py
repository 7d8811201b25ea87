"""An operator as a sequence of others: what they are called with, and whose results go where.

    decomposition(call)    _softmax -> detach, amax, sub, exp, sum, div

A decomposition is a function of an operator's arguments: one of ours (`compositions`), or torch's own for the operators
that are named here. It is run once on tensors without memory and every operator that it reaches is noted. What no
gradient passes through (behind `detach`, comparisons, integers) is told, for there a maximum may stay pending.

Only operators that stand in one of the two tables are decomposed: each is proved (`tangram.sharding.proof.routes`), as
rules are. Variants that write their result have none; what is written beside it (running statistics) is a `copy_`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._decomp import decomposition_table  # pyright: ignore[reportUnknownVariableType]
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tangram.sharding import compositions
from tangram.sharding.ops.calls import OpCall, is_written, schema_of

FLOATS = frozenset(
    {
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "native_layer_norm_backward",
        "native_group_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "renorm",
    }
)
"""Operators whose decomposition is torch's, for tensors of floating numbers."""
TORCH = FLOATS | frozenset(
    {
        "_chunk_cat",
        "aminmax",
        "channel_shuffle",
        "diag_embed",
        "im2col",
        "new_full",
        "new_ones",
        "new_zeros",
        "pixel_shuffle",
        "pixel_unshuffle",
        "repeat",
        "rot90",
        "select_scatter",
        "trace",
        "tril",
        "triu",
    }
)
"""Operators whose decomposition is torch's."""
_KNOWN: dict[tuple[OpOverload, str], Decomposition | None] = {}
_MOST = 1024
_REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError)
"""What torch's decompositions raise of arguments that they do not do."""


class ResultRef(NamedTuple):
    """A tensor of a decomposition: result `place` of a step, or with step -1 a tensor of the call itself."""

    step: int
    place: int


@dataclass(frozen=True)
class DecomposedStep:
    """One operator of a decomposition."""

    call: OpCall
    """With tensors without memory."""
    sources: tuple[ResultRef | None, ...]
    """Where each of the call's tensors comes from."""
    differentiable: bool
    """Whether a gradient may pass through it."""


@dataclass(frozen=True)
class Decomposition:
    """An operator as others, one after the other."""

    steps: tuple[DecomposedStep, ...]
    results: tuple[ResultRef | None, ...]
    """Where the operator's results come from; None for one that is absent, as a gradient that is not asked for."""


def function_of(call: OpCall) -> Callable[..., Any] | None:
    """The decomposition of an operator, as a function of its arguments by their names; None where there is none."""
    own = compositions.OWN.get(call.name)
    if own is not None:
        return own
    first = call.tensors[0] if call.tensors else None
    if call.name not in TORCH or (call.name in FLOATS and not (first is not None and first.is_floating_point())):
        return None
    return cast("Mapping[OpOverload, Callable[..., Any]]", decomposition_table).get(call.operator)


def place_of(name: str) -> str:
    """Where an operator's decomposition stands; nothing where it has none."""
    return "compositions/" if name in compositions.OWN else "torch's decomposition" * (name in TORCH)


def is_decomposed(name: str) -> bool:
    """Whether an operator has a decomposition, for some arguments at least."""
    return bool(place_of(name))


def decomposition(call: OpCall) -> Decomposition | None:
    """The steps of a call. None where its operator has no decomposition, or none for these arguments."""
    function = function_of(call)
    if function is None:
        return None
    first = next((t for t in call.tensors if t is not None), None)
    key = call.operator, f"{call} {None if first is None else first.device}"
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[key] = _traced(function, call)
    return _KNOWN[key]


class _UnfitError(Exception):
    """A decomposition that cannot be followed."""


class _Noted(TorchDispatchMode):
    """Notes operators and where their tensors come from."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.steps: list[DecomposedStep] = []
        self.refs: dict[int, ResultRef] = {}
        self._alive: list[Tensor] = []  # an id is that of a tensor only while there is the tensor
        self._smooth: set[ResultRef] = set()
        for i, tensor in enumerate(inputs):
            if tensor is not None:
                self._see(tensor, ResultRef(-1, i), differentiable=True)

    def _see(self, tensor: Tensor, ref: ResultRef, *, differentiable: bool) -> None:
        self.refs[id(tensor)] = ref
        self._alive.append(tensor)
        if differentiable and (tensor.is_floating_point() or tensor.is_complex()):
            self._smooth.add(ref)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not any(isinstance(one, Tensor) for one in tree_leaves(found)):  # a question: `x.device`
            return found
        call = OpCall.of(func, args, kwargs or {})
        sources = [None if t is None else self.ref(t) for t in call.tensors]
        written = any(is_written(a) for a in schema_of(func).arguments)
        first = sources[0] if sources else None
        noted = func is torch.ops.aten.copy_.default and first is not None and first.step < 0
        if func.namespace != "aten" or (written and not noted):
            raise _UnfitError
        smooth = func is not torch.ops.aten.detach.default and any(s in self._smooth for s in sources)
        bare = call.with_tensors([None if t is None else _bare(t) for t in call.tensors])
        if "device" in call.arguments:  # that of its tensors
            bare = OpCall(func, {**bare.arguments, "device": None})
        for i, tensor in enumerate(tree_leaves(found)):
            if isinstance(tensor, Tensor):
                self._see(tensor, ResultRef(len(self.steps), i), differentiable=smooth)
        self.steps.append(DecomposedStep(bare, tuple(sources), smooth))
        return found

    def ref(self, tensor: Tensor) -> ResultRef:
        """Where a tensor comes from."""
        if id(tensor) not in self.refs:
            raise _UnfitError
        return self.refs[id(tensor)]


def _bare(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _traced(function: Callable[..., Any], call: OpCall) -> Decomposition | None:
    fakes = FakeTensorMode()  # on their device: types of results may depend on it
    with fakes:
        given = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in call.tensors]
        bare = call.with_tensors(given)
    schema = schema_of(call.operator).arguments
    positional = [bare.arguments[a.name] for a in schema if not a.kwarg_only]
    named = {a.name: bare.arguments[a.name] for a in schema if a.kwarg_only and not a.is_out}
    noted = _Noted(bare.tensors)
    try:
        with torch.no_grad(), fakes, noted:
            found = function(*positional, **named)
        results: list[Any] = [*cast("Sequence[Any]", found)] if isinstance(found, list | tuple) else [found]
        refs = tuple(noted.ref(r) if isinstance(r, Tensor) else None for r in results)
    except (_UnfitError, compositions.UnfitModuleError, *_REFUSALS):
        return None
    return Decomposition(tuple(noted.steps), refs)
