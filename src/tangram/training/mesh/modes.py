"""What a model's code may do otherwise from call to call: a derived program stands for one mode of it.

    each module     whether it trains, what else it has as a number, flag, text or function (`p`, `layerdrop`), or as
                    lists and dicts of them, which of its parameters are trained, and what hooks it has
    configurations  the same of what modules have as `config`, dataclass or namespace
    torch           whether gradients are on, autocast, the default type of numbers

So training and evaluation are captured apart, and a module that is frozen in evaluation stays so. What a mode cannot
say is refused: Python's and numpy's generators, which differ from rank to rank, and an attribute that is another one at
every call. What is drawn at random is here, too: which numbers, and that ranks draw the same.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.models.building.twin import Shared, rebound, with_values
from tangram.sharding.ops.rule_table import OwnCollectiveError

Mode = tuple[Any, ...]
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_KEPT = (*_PLAIN, Enum, FunctionType, BuiltinFunctionType)
_SETS = (set, frozenset)
_CONTAINERS = (list, tuple, dict, *_SETS)
_NOT_FOLLOWED = frozenset(vars(nn.Module())) - {"training", "_is_full_backward_hook"} | {
    "forward", "_output_capturing_hooks_installed",
}  # fmt: skip
"""What torch keeps in every module; a forward is wrapped; and whether a first call has had transformers put its hooks
into this very module, for hidden states and the like."""
_LIBRARIES = frozenset({"tangram", "torch", "transformers"})
"""Whose hooks come and go with what they do in a forward, and are no other way of the model's code."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MOST_LEAVES = 1000
"""Of a list or dict; what is larger is a vocabulary."""
_TRAINED = "requires_grad"
MOST_MODES = 16
"""Of one size of the inputs."""


def mode_of(model: nn.Module, hooks: bool = False) -> Mode:
    """All of it, to compare; with `hooks`, those of users, too. Raises UserError where no program can run."""
    refuse_transforms()
    kind = next((p.device.type for p in model.parameters()), "cpu")
    casts = torch.is_autocast_enabled(kind) if kind != "meta" else False
    if casts and kind != "cpu":
        raise UserError(
            f"a derived model cannot run under autocast on {kind}: make its parameters of the type to compute in "
            "(model.to(torch.bfloat16)), or set precision.compute in a plan"
        )
    cast_to = torch.get_autocast_dtype(kind) if casts else None
    attributes = tuple(
        [(path, cast("type[object]", type(one)), *_state_of(one, hooks)) for path, one in _with_attributes(model)]
    )
    return torch.is_grad_enabled(), cast_to, torch.get_default_dtype(), attributes


def refuse_transforms() -> None:
    """Raise UserError within what hands on tensors of its own, which no collective takes."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:  # pyright: ignore
        raise UserError(
            "a derived model cannot be called within torch.func (vmap, grad, vjp, jacrev, ...) or forward_ad, of whose "
            "tensors no collective knows: use torch.autograd.grad, with create_graph=True for a second derivative, or "
            "torch.autograd.functional (jacobian, hvp, ...)"
        )
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        raise UserError(
            "a derived model cannot be exported or traced: a program of one process holds no collectives of a mesh; "
            "export the model before it is made parallel"
        )


def follow(template: nn.Module, model: nn.Module, hooks: bool = False) -> None:
    """Give a copy of a model the attributes and trained parameters that the model has now; with `hooks`, those, too."""
    own = dict(_with_attributes(template))
    both = [(path, one) for path, one in _with_attributes(model) if path in own]
    copies = {id(one): own[path] for path, one in both if isinstance(one, nn.Module)}
    for path, one in both:
        its = cast("dict[str, Any]", vars(one))
        renewed = {name: _renewed(vars(own[path]).get(name), its[name]) for name, _ in _attributes(one)}
        vars(own[path]).update({name: rebound(x, copies) for name, x in renewed.items()})
        if isinstance(one, nn.Module):
            trained = {key: p.requires_grad for key, p in one.named_parameters(recurse=False)}
            for key, p in own[path].named_parameters(recurse=False):
                p.requires_grad_(trained.get(key, p.requires_grad))
            for kind in _HOOKS if hooks else ():
                _follow_hooks(cast("dict[str, Any]", vars(own[path])), its, kind, copies)


def _follow_hooks(own: Mapping[str, Any], its: Mapping[str, Any], kind: str, copies: dict[int, Any]) -> None:
    """Give a copy of a module the user's hooks of one kind, with the ways in which each is called. In place: handles
    know the dict."""
    added = _of_users(its[kind])
    for n in _of_users(own[kind]).keys() - added.keys():
        del own[kind][n]
    own[kind].update({n: rebound(Shared(hook), copies) for n, hook in added.items()})
    for way in (f"{kind}_with_kwargs", f"{kind}_always_called"):
        if way in own:
            own[way].update({n: on for n, on in its[way].items() if n in added})


def _of_users(hooks: Mapping[int, Any]) -> dict[int, Any]:
    return {n: hook for n, hook in hooks.items() if _library(hook) not in _LIBRARIES}


def _library(hook: Any) -> str:
    hook = hook.hook if isinstance(hook, Shared) else hook
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0]


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """All of them, by their names."""
    return dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))


def refuse_others(model: nn.Module, known: Mapping[str, nn.Module]) -> None:
    """Raise UserError for a module that is not what a model had when it was made parallel."""
    if (now := modules_of(model)) != known:
        other = next((path for path in now if now[path] is not known.get(path)), "") or min(known.keys() - now.keys())
        raise UserError(
            f"{other} is not the module that the model had when it was derived: wrap, put in and take out modules "
            "before it is, and where a forward puts others in the place of its own, call the model once before"
        )


def changed(one: Mode, other: Mode) -> str:
    """The first attribute in which two modes differ; "" where none does."""
    for (path, _, *own), (other_path, _, *its) in zip(one[-1], other[-1], strict=False):
        if path != other_path:
            return path
        before, after = dict(own), dict(its)
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                return f"{path}.{name}".lstrip(".")
    return ""


def refuse_ever_new(modes: Sequence[Mode]) -> None:
    """Raise UserError where so many modes were met that programs would be derived for ever. Not where other parameters
    are trained, which a loop may thaw layer by layer."""
    if len(modes) >= MOST_MODES and (name := changed(modes[-1], modes[-2])) and not name.endswith(_TRAINED):
        raise UserError(
            f"{name} was another one in each of {len(modes)} calls, and a derived model is captured anew for each: "
            "keep it in a buffer, or out of the model"
        )


def _with_attributes(model: nn.Module) -> Iterable[tuple[str, Any]]:
    seen: set[int] = set()
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        yield path, module
        yield from _configured(path, module, seen)


def _configured(path: str, one: Any, seen: set[int]) -> Iterable[tuple[str, Any]]:
    """What something has as a configuration, dataclass or namespace, and what these have, each once."""
    for name, x in cast("dict[str, Any]", vars(one)).items():
        if (
            name in _NOT_FOLLOWED
            or id(x) in seen
            or issubclass(type(x), (*_KEPT, partial, type))
            or not hasattr(x, "__dict__")
        ):
            continue
        if name == "config" or isinstance(x, (SimpleNamespace, Namespace)) or hasattr(x, "__dataclass_fields__"):
            seen.add(id(x))
            yield f"{path}.{name}", x
            yield from _configured(f"{path}.{name}", x, seen)


def _attributes(one: Any) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """What says by its value how code goes on: its name, and what is compared."""
    for name, x in cast("dict[str, Any]", vars(one)).items():
        if name not in _NOT_FOLLOWED and (compared := _compared(x)) is not None:
            yield name, compared


def _compared(x: Any) -> tuple[Any, ...] | None:
    """What can be compared of something that is kept, or a container of such; None of anything else. Of a dict what it
    has beside those is left out."""
    kind = cast("type[object]", type(x))  # and not isinstance: a configuration of transformers is slow to say its class
    if issubclass(kind, _KEPT):
        return (x,)
    if issubclass(kind, partial):  # of which no two are equal; one that holds a module or tensor says nothing
        return _compared((x.func, x.args, *x.keywords.items()))
    if not issubclass(kind, _CONTAINERS) or len(x) > _MOST_LEAVES:
        return None
    if isinstance(x, dict):
        items = cast("dict[Any, Any]", x).items()
        return kind.__name__, tuple((key, own) for key, y in items if (own := _compared(y)) is not None)
    parts = [_compared(one) for one in cast("Iterable[Any]", x)]
    return None if None in parts else (kind.__name__, frozenset(parts) if issubclass(kind, _SETS) else tuple(parts))


def _renewed(own: Any, its: Any) -> Any:
    """What a copy has in the place of something that can be compared: of a dict, what cannot stays."""
    if not isinstance(its, dict):
        return its if issubclass(type(its), (*_KEPT, partial)) else deepcopy(its)
    if type(own) is type(cast(Any, its)) and _compared(own) == _compared(its):
        return own  # it may not let itself be written, as a configuration of diffusers
    before = cast("dict[Any, Any]", own) if isinstance(own, dict) else {}
    now: dict[Any, Any] = copy(cast("dict[Any, Any]", its))  # of its kind, as one that has a default
    items = [(key, y) for key, y in now.items() if _compared(y) is not None]
    now.clear()
    now.update((key, y) for key, y in before.items() if _compared(y) is None)
    now.update((key, _renewed(before.get(key), y)) for key, y in items)
    return now


def _state_of(one: Any, hooks: bool) -> Iterable[tuple[str, tuple[Any, ...]]]:
    yield from _attributes(one)
    if isinstance(one, nn.Module):
        own = vars(one)
        if own["_parameters"]:
            yield _TRAINED, tuple(p is not None and p.requires_grad for p in own["_parameters"].values())
        if hooks:
            yield from ((kind, added) for kind in _HOOKS if own[kind] and (added := tuple(_of_users(own[kind]))))


@contextmanager
def without_inference() -> Generator[None]:
    """Inference mode is off within, and gradients are as they are outside, where leaving it would put them on.

    What is saved for a backward is no matter of a checkpoint around, which would count it.
    """
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad), saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


@contextmanager
def steady(model: nn.Module) -> Generator[None]:
    """Raise UserError where what runs within draws from a generator that is not torch's."""
    before = _others()
    try:
        yield
    except UserError as error:  # which may come of it, but where torch's stand-in for a collective draws itself
        if not _of_collective(error):
            _refuse_others(model, before)
        raise
    _refuse_others(model, before)


def _of_collective(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, OwnCollectiveError) or _of_collective(error.__context__))


def _refuse_others(model: nn.Module, before: Mapping[str, Any]) -> None:
    for name, state in _others().items():
        if state != before.get(name, state):
            raise UserError(
                f"{type(model).__name__} draws from {name}, which is another one on every rank and at every call: "
                "draw with torch"
            )


def _others() -> dict[str, Any]:
    numpy: Any = sys.modules.get("numpy")
    found: dict[str, Any] = {"Python's random": hash(random.getstate())}
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    return found


def refuse_tensors_in_containers(inputs: Mapping[str, Any]) -> None:
    """Raise UserError for arguments that hold tensors in something, of which nothing is derived."""
    if inputs.get("use_cache"):
        raise UserError(
            "use_cache=True would keep this rank's part of keys and values alone: call a derived model with "
            "use_cache=False"
        )
    for name, x in inputs.items():
        if isinstance(x, (Tensor, *_PLAIN)):
            continue
        leaves: list[Any] = tree_leaves(x)
        if any(not isinstance(leaf, _PLAIN) for leaf in leaves):
            raise UserError(
                f"{name} is a {type(x).__name__}, and a derived model takes tensors one by one: give it as tensors, "
                "or leave it out"
            )


def refuse_new_values(read: Sequence[str], met: Sequence[Any]) -> None:
    """Raise UserError where code reads so many things of inputs that programs would be derived for ever."""
    if read and len(met) >= MOST_MODES:
        raise UserError(
            f"the model's code reads the values of {' and '.join(read)}, of which it made something else in each of "
            f"{len(met)} calls, and a derived model is captured anew for each: give images of one size, or what the "
            "code works out of these values"
        )


def values_of(inputs: Mapping[str, Any], names: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """The values of some inputs, by a digest."""
    arrays = ((name, inputs[name].cpu().contiguous().numpy()) for name in names)
    return tuple((name, hashlib.blake2b(own.tobytes(), digest_size=16).digest()) for name, own in arrays)


def without_values(x: Any, *, integers: bool = False) -> Any:
    """What is derived is asked of an argument's sizes, and with a gradient where a call with it wants one.

    `integers`: code may read the values of a small one of integers.
    """
    if integers and with_values(x):
        return x.detach().cpu()
    if isinstance(x, Tensor):
        return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=_follows(x))
    return x


def size_of(x: Any) -> Any:
    """What of an argument the program depends on."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype, _follows(x)
    return x if isinstance(x, _PLAIN) else repr(x)


def _follows(x: Tensor) -> bool:
    """Whether it has a gradient, as hidden states of the stage before; in evaluation, as if it had: for the same cuts.

    Not whatever has floating numbers: of some arguments, as signs that are the labels of a loss, torch has none.
    """
    return x.requires_grad or (x.is_floating_point() and not torch.is_grad_enabled())


def without_cache(inputs: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Arguments with `use_cache=False` where the model would else keep what it makes of keys and values.

    One that looks at images often hands on to its language model what it is called with (`**kwargs`), and has no such
    parameter itself.
    """
    parameters = inspect.signature(type(model).forward).parameters
    handed = any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and _caches(getattr(model, "config", None))
    return {**({"use_cache": False} if "use_cache" in parameters or handed else {}), **inputs}


def _caches(config: Any) -> bool:
    """Whether a configuration, or that of the text in it, has a cache on by default."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return any(getattr(one, "use_cache", False) is True for one in (config, text))


def seed_generators(device: torch.device, seed: int) -> None:
    """Of this process and of its device. torch.manual_seed asks every kind of device: 0.7 ms where there is none."""
    torch.random.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def agree_on_draws(groups: Mapping[str, dist.ProcessGroup], model: nn.Module) -> None:
    """Give the ranks of some groups the state of the first one's generators, also of the model's device. Collective."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with _disable_current_modes():
        _agree(torch.get_rng_state, torch.set_rng_state, groups, device)
        if device.type != "cpu":
            own = torch.get_device_module(device)
            _agree(own.get_rng_state, own.set_rng_state, groups, device)


def _agree(
    state: Callable[[], Tensor],
    take: Callable[[Tensor], None],
    groups: Mapping[str, dist.ProcessGroup],
    device: torch.device,
) -> None:
    own = state().to(device)
    for group in groups.values():
        dist.broadcast(own, group_src=0, group=group)
    take(own.cpu())
