"""A model's first weights: transformers' own, by a rule that depends on names only.

`initial_tensors` yields parameters and buffers whole, one module at a time, made by the initialisation of the model's
class from a random stream seeded with (seed, module name). So the weights are the same on any number of ranks and in
any layout.

Trade-off: every rank makes every whole tensor once, which costs time in proportion to the model but memory of only one
module; and one module's parameters share a stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]
from transformers import PreTrainedConfig, PreTrainedModel

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta, constructed_on_meta
from tangram.models.building.twin import storage_of


def initial_tensors(
    config: PreTrainedConfig, seed: int, only: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by name, whole, on the CPU; tied parameters once, under their first name.

    `only`: of these names; modules without any are not made. Raises UserError where transformers fails to.
    """
    model = build_on_meta(config)
    names_in_it = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    wanted = {name for name in names_in_it if only(name)}
    constructed: dict[type[nn.Module], PreTrainedModel] = {}
    outer = _outer_rules(model)
    for path, module in cast(Iterator[tuple[str, nn.Module]], model.named_modules()):
        names = _own_tensors(module)
        if not any(_join(path, name) in wanted for name in names):
            continue
        _initialise(model, [path, *outer.get(path, ())], _stream_seed(seed, path))
        for name in _without_value(module):
            made = _as_constructed(config, type(module), seed, constructed)
            with torch.no_grad():
                getattr(module, name).copy_(getattr(made.get_submodule(path), name))
        if left := _without_value(module):
            raise RuntimeError(f"{type(model).__name__} leaves {_join(path, left[0])} without an initial value")
        for name in names:
            full_name = _join(path, name)
            tensor: Tensor = getattr(module, name)
            if full_name in wanted:
                yield full_name, tensor.detach()
        module.to_empty(device="meta", recurse=False)


def _outer_rules(model: PreTrainedModel) -> dict[str, list[str]]:
    """By module, those around it whose rules touch its tensors, in the order of transformers: the innermost first.

    As GPT-2's blocks do into the projections that end them, and a mixer of Mamba into the bias of its steps.
    """
    storages: dict[int, str] = {}
    modules = [*cast(Iterator[tuple[str, nn.Module]], model.named_modules())]
    for path, module in reversed(modules):  # of tied tensors the first module has them
        storages |= {storage_of(getattr(module, name)): path for name in _own_tensors(module)}
    outer: dict[str, list[str]] = {}
    for path, module in reversed(modules):
        if next(module.children(), None) is None:
            continue
        with torch.no_grad(), _Touched() as touched, torch.random.fork_rng(devices=[]):
            _rule_of(model, path)
        for inside in {storages[one] for one in touched.storages if one in storages} - {path}:
            outer.setdefault(inside, []).append(path)
    return outer


class _Touched(TorchFunctionMode):
    """The storages of tensors that functions of torch take. (Operators do not tell: some do nothing on meta.)"""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        taken = tree_leaves((args, kwargs))
        self.storages |= {storage_of(x) for x in taken if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


def _rule_of(model: PreTrainedModel, path: str) -> None:
    """Give a module the first values that transformers does, and others those that its class gives them.

    The rule is that of the innermost model of transformers around it: a tower of images has another one than the model
    that it is part of.
    """
    around = path
    while not isinstance(part := model.get_submodule(around), PreTrainedModel):
        around = around.rpartition(".")[0]
    try:
        part._init_weights(model.get_submodule(path))  # pyright: ignore[reportPrivateUsage]  the documented override point
    except AttributeError as error:
        raise UserError(
            f"this transformers cannot initialise a {type(model).__name__} ({error}): give a directory with weights"
        ) from error


def _initialise(model: PreTrainedModel, rules: Sequence[str], seed: int) -> None:
    """Give the module at the first of these paths storage, and the values that the rules of all of them give it.

    What else they write stays on meta, where writing does nothing and draws no random number. The process's random
    state is as it was.
    """
    module = model.get_submodule(rules[0])
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name in _own_tensors(module):
            tensor: Tensor = getattr(module, name)
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))  # so that a tensor which nothing initialises is seen
        for path in rules:
            torch.random.default_generator.manual_seed(seed)
            _rule_of(model, path)


def _as_constructed(
    config: PreTrainedConfig, kind: type[nn.Module], seed: int, known: dict[type[nn.Module], PreTrainedModel]
) -> PreTrainedModel:
    """The model on meta but for the modules of one class, which hold what their constructor has put there.

    For classes that leave initial values to it. All modules of that class are in memory at once.
    """
    if kind not in known:
        construct = kind.__init__

        def on_cpu(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            with torch.device("cpu"):
                construct(self, *args, **kwargs)

        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody fills holds nan then
        kind.__init__ = on_cpu
        try:
            with torch.random.fork_rng(devices=[]):
                torch.random.default_generator.manual_seed(_stream_seed(seed, kind.__qualname__))
                known[kind] = constructed_on_meta(config)
        finally:
            kind.__init__ = construct
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return known[kind]


def _without_value(module: nn.Module) -> list[str]:
    tensors = {name: cast(Tensor, getattr(module, name)) for name in _own_tensors(module)}
    return [name for name, tensor in tensors.items() if tensor.is_floating_point() and bool(tensor.isnan().any())]


def _own_tensors(module: nn.Module) -> list[str]:
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    return parameters + [name for name, _ in module.named_buffers(recurse=False)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _stream_seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=7).digest())
