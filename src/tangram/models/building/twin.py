"""Copies of a model that have no memory: on meta, or of fake tensors, on the CPU as far as operators can tell."""

from __future__ import annotations

import copy
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from tangram.errors import UserError

MOST_OF_INPUT = 1 << 16
"""Elements of an input whose values are known: code may ask them again at each call."""


def fake_twin(model: nn.Module, dtype: torch.dtype, fake: FakeTensorMode, buffers: bool = False) -> nn.Module:
    """The copy, its modules in training or not as they are, with parameters of `dtype`; tied parameters stay one.

    `buffers`: those in floating point have `dtype`, too.
    """
    twin = copied(model, {})
    made: dict[Tensor, Tensor] = {}

    def faked(tensor: Tensor) -> Tensor:
        if tensor not in made:
            with fake:
                cast_too = tensor.is_floating_point() and (buffers or isinstance(tensor, nn.Parameter))
                kind = dtype if cast_too else tensor.dtype
                empty = torch.empty(tensor.shape, dtype=kind, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return made[tensor]

    for module in cast("Iterable[nn.Module]", twin.modules()):
        for tensors in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, tensor in tensors.items():
                if tensor is not None:
                    cast("dict[str, Tensor]", tensors)[name] = faked(tensor)
    return twin


def copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy, with what `memo` has by the identity of what stands in its place.

    What a forward has left on a module, as the weight of the older weight_norm, has a history that cannot be copied: of
    it the copy has the values, until its own forward makes it anew.
    """
    for module in cast("Iterable[nn.Module]", model.modules()):
        for x in vars(module).values():
            if isinstance(x, Tensor) and not x.is_leaf:
                memo.setdefault(id(x), x.detach())
    _refuse_compiled(model)
    seen = {**memo}
    try:
        twin = copy.deepcopy(model, seen)
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} cannot be copied, and what is captured is a copy: {_why(model, memo)}{error}"
        ) from error
    for module in cast("Iterable[nn.Module]", twin.modules()):
        for name, value in [*vars(module).items()]:
            if name in ("_modules", "_parameters", "_buffers") or (own := rebound(value, seen)) is value:
                continue
            if name.endswith("_hooks"):  # whose handles know the dict
                cast("dict[Any, Any]", value).update(own)
            else:
                vars(module)[name] = own
    return twin


@dataclass(frozen=True)
class Shared:
    """A hook in a copy of a model, which is not copied with that: it may hold whatever a user has."""

    hook: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> Shared:
        return self


def rebound(value: Any, copies: MutableMapping[int, Any], depth: int = 5) -> Any:
    """The value, or one like it whose functions refer to `copies` of what they referred to, also in containers.

    `copies`: by the identity of the original, as deepcopy's memo has them.
    """
    if id(value) in copies:
        return copies[id(value)]
    if depth == 0:
        return value
    depth -= 1
    if isinstance(value, Shared):
        hook = rebound(value.hook, copies, depth)
        return value if hook is value.hook else Shared(hook)
    if isinstance(value, weakref.ref):
        own = copies.get(id(cast("object", value())))
        return cast("object", value if own is None else weakref.ref(own))
    if isinstance(value, types.FunctionType):
        return _rebound_function(value, copies, depth)
    if isinstance(value, types.MethodType):
        own = copies.get(id(value.__self__), value.__self__)
        function = rebound(value.__func__, copies, depth)
        return value if own is value.__self__ and function is value.__func__ else types.MethodType(function, own)
    if type(value) is partial:
        parts = [value.func, *value.args, *value.keywords.values()]
        function, *given = [rebound(x, copies, depth) for x in parts]
        if all(x is y for x, y in zip(parts, (function, *given), strict=True)):
            return cast("object", value)
        n = len(value.args)
        return cast(Any, partial)(function, *given[:n], **dict(zip(value.keywords, given[n:], strict=True)))
    return _rebound_container(value, copies, depth)


def _rebound_container(value: Any, copies: MutableMapping[int, Any], depth: int) -> Any:
    if type(value) in (dict, OrderedDict):
        entries = cast("dict[Any, Any]", value)
        new = {key: rebound(x, copies, depth) for key, x in entries.items()}
        if any(new[key] is not x for key, x in entries.items()):
            return type(entries)(new)
    elif type(value) in (list, tuple):
        items = cast("list[Any]", value)
        made = [rebound(x, copies, depth) for x in items]
        if any(x is not y for x, y in zip(items, made, strict=True)):
            return type(items)(made)
    return cast("object", value)


def _rebound_function(function: types.FunctionType, copies: MutableMapping[int, Any], depth: int) -> types.FunctionType:
    cells = function.__closure__ or ()
    defaults = ((*(function.__defaults__ or ()),), {**(function.__kwdefaults__ or {})})
    if not cells and not any(defaults):
        return function
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, tuple(types.CellType() for _ in cells)
    )
    copies[id(function)] = made  # before its cells, one of which may have itself
    own = _rebound_container(defaults, copies, depth + 1)
    same = own is defaults
    for old, new in zip(cells, made.__closure__ or (), strict=True):
        try:
            kept = old.cell_contents
        except ValueError:  # a name that is not bound yet
            continue
        new.cell_contents = rebound(kept, copies, depth)
        same &= new.cell_contents is kept
    if same:
        del copies[id(function)]
        return function
    made.__defaults__, made.__kwdefaults__ = own
    made.__dict__ = {**vars(function)}
    made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
    return made


def _refuse_compiled(model: nn.Module) -> None:
    """Raise UserError for a model that torch.compile has: what is captured is a copy, and runs in Python."""
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if hasattr(module, "_orig_mod") or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            what = path or "the model"
            raise UserError(f"{what} is compiled by torch.compile: make it parallel first, and compile it after that")


def _why(model: nn.Module, memo: Mapping[int, Any]) -> str:
    """The attribute that cannot be copied."""
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        for name, x in vars(module).items():
            if name != "_modules" and not _copies(x, memo):
                return f"keep {path and path + '.'}{name}, a {type(x).__name__}, out of the model: "
    return ""


def _copies(x: Any, memo: Mapping[int, Any]) -> bool:
    try:
        copy.deepcopy(x, {**memo})
    except Exception:  # noqa: BLE001  whatever an object's own copying raises
        return False
    return True


def without_memory(model: nn.Module) -> nn.Module:
    """A copy on meta, for fake ones or for none; tied parameters stay one."""
    memo: dict[int, Any] = {}
    for t in [*model.parameters(), *cast("Sequence[Tensor]", [*model.buffers()])]:
        empty = t.detach().to("meta")
        memo[id(t)] = nn.Parameter(empty, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else empty
    return copied(model, memo)


def storage_of(tensor: Tensor) -> int:
    """Which storage a tensor has; in a run without memory none has an address."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def stacked_experts(model: nn.Module) -> bool:
    """Whether experts are stacked for one grouped product, which torch can only fake in bfloat16."""
    return any(parameter.ndim == 3 for parameter in model.parameters())


def dtype_of(model: nn.Module) -> torch.dtype:
    """That of the first parameter of floating numbers."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def fake_input(tensor: Any, fake: FakeTensorMode, dynamic: Mapping[int, str]) -> Any:
    """What stands for an input of a model, of which some dims may be dynamic."""
    if not isinstance(tensor, Tensor):
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if not dynamic:
        with fake:
            return torch.empty(plain.shape, dtype=plain.dtype, device="cpu", requires_grad=tensor.requires_grad)
    dims = [DimDynamic.DYNAMIC if d in dynamic else DimDynamic.STATIC for d in range(tensor.ndim)]
    with torch.device("cpu"):
        real = torch.empty(1, dtype=tensor.dtype).expand(tensor.shape)
    context = cast(Any, StatelessSymbolicContext)(dynamic_sizes=dims)
    return fake.from_tensor(real, symbolic_context=context)


def with_values(x: Any) -> bool:
    """Whether an argument is a small tensor of integers that has its values."""
    if not isinstance(x, Tensor) or isinstance(x, FakeTensor) or x.is_meta:
        return False
    return not (x.is_floating_point() or x.is_complex()) and x.numel() <= MOST_OF_INPUT


def names_of_symbols(given: Mapping[str, Any], dynamic: Mapping[str, Mapping[int, str]]) -> dict[str, str]:
    """The caller's name of each symbol of torch's."""
    return {str(given[name].shape[dim]): text for name, dims in dynamic.items() for dim, text in dims.items()}
