"""What a model costs: parameters, operations and bytes of one micro-batch, counted by running it without memory.

`costs` runs forward, loss and backward of a copy of the model under torch's fake tensors, as on the CPU (so that
attention is one fused operator), and looks at every operator: the FLOPs of products, the bytes that all others read and
write, and what autograd keeps for the backward. So it needs no rules per architecture. FLOPs are those of dense
attention: a causal kernel that skips half of the scores is credited with all of them, as is usual.

Trade-off: activations are counted as eager autograd keeps them; compilation keeps less. Experts in float32, whose
product torch can only fake in bfloat16, are run in bfloat16 with every such tensor counted twice.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.kernels.attention import ATTEND, ATTEND_BACKWARD
from tangram.kernels.cross_entropy import cross_entropy
from tangram.kernels.flash.operator import FLASH, FLASH_BACKWARD
from tangram.kernels.fused.projected_loss import FLOPS
from tangram.models.building.twin import fake_twin, stacked_experts, storage_of
from tangram.models.capturing.reasons import place_and_reason

OUTSIDE = ""
"""The name under which what lies outside the blocks is kept."""

_aten = torch.ops.aten
_GATHERS = {_aten.embedding, _aten.index, _aten.gather, _aten.index_select}  # read no more than they write


@dataclass(frozen=True)
class Parameter:
    """A parameter, tied ones once under their first name."""

    name: str
    shape: tuple[int, ...]
    block: str
    """The name of the repeated block that it belongs to, "" outside all blocks."""
    trained: bool = True
    quantised: bool = False  # kept as `models.lora.bases` says, and made for its layer alone

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


@dataclass(frozen=True)
class Work:
    """What the devices do in one pass, call after call."""

    products: tuple[float, ...] = ()
    """FLOPs of each matmul."""
    memory_traffic: tuple[float, ...] = ()
    """Bytes that each other operator reads and writes."""

    @property
    def flops(self) -> float:
        """Of all products."""
        return sum(self.products)

    @property
    def bytes_moved(self) -> float:
        """By all other operators."""
        return sum(self.memory_traffic)

    @property
    def calls(self) -> int:
        """How many operators run."""
        return len(self.products) + len(self.memory_traffic)


@dataclass(frozen=True)
class Made:
    """What operators of one kind make in a forward, and what they compute for it."""

    nbytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Part:
    """One block, or what lies outside of all: its share of a micro-batch."""

    name: str
    forward_flops: float
    backward_flops: float
    kept_bytes: float
    """Of activations that the backward needs."""
    input_bytes: float
    """What has to be kept of a block that is recomputed in the backward."""
    made: Mapping[str, Made] = field(default_factory=dict[str, Made])
    """Of the forward, by kind of operator: "matmuls" and "attention"."""


@dataclass(frozen=True)
class ModelCosts:
    """What one micro-batch of `micro_batch` samples of `sequence` tokens costs on one device that holds the model."""

    sequence: int
    micro_batch: float
    parameters: tuple[Parameter, ...]
    parts: tuple[Part, ...]
    """The blocks in order, then what lies outside."""
    forward: Work
    backward: Work
    logits_bytes: float
    """Of the gradient of the logits, in their own type; the logits themselves are among what the backward needs."""

    @property
    def parameter_count(self) -> int:
        """Numbers in all parameters."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def forward_flops_per_sample(self) -> float:
        """FLOPs of a sample's forward."""
        return self.forward.flops / self.micro_batch

    @property
    def backward_flops_per_sample(self) -> float:
        """FLOPs of a sample's backward."""
        return self.backward.flops / self.micro_batch

    @property
    def flops_per_sample(self) -> float:
        """FLOPs of a sample's forward and backward."""
        return self.forward_flops_per_sample + self.backward_flops_per_sample

    @property
    def activation_bytes(self) -> float:
        """What is kept for the backward of a micro-batch, parameters not counted."""
        return sum(part.kept_bytes for part in self.parts)

    @property
    def blocks(self) -> tuple[Part, ...]:
        """The repeated blocks."""
        return tuple(part for part in self.parts if part.name != OUTSIDE)

    def block_parameters(self, block: str) -> int:
        """Numbers in the parameters of one block, or of "" outside all blocks."""
        return sum(parameter.size for parameter in self.parameters if parameter.block == block)


def block_names(model: nn.Module) -> list[str]:
    """The repeated blocks: the members of the outermost module lists that have parameters.

    A dict of modules (torchtitan's layers) or a Sequential is a list, too, where its members are blocks of one class.
    """
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    lists = {f"{name}." if name else "": module for name, module in named if _repeats(module)}
    outer = [path for path in lists if not any(path != other and path.startswith(other) for other in lists)]
    members = ((f"{path}{key}", block) for path in outer for key, block in lists[path].named_children())
    return [name for name, block in members if any(True for _ in block.parameters())]


def _repeats(module: nn.Module) -> bool:
    members = [*module.children()]
    if not isinstance(module, nn.ModuleDict | nn.Sequential):
        return isinstance(module, nn.ModuleList)
    return len(members) > 1 and len({*map(type, members)}) == 1 and any(True for _ in members[0].children())


def parameters_of(model: nn.Module) -> tuple[Parameter, ...]:
    """Every parameter with the block it belongs to."""
    blocks = block_names(model)
    return tuple(
        Parameter(
            name,
            tuple(parameter.shape),
            next((block for block in blocks if name.startswith(f"{block}.")), OUTSIDE),
            parameter.requires_grad,
        )
        for name, parameter in model.named_parameters()
    )


def costs(model: nn.Module, sequence: int, micro_batch: int = 1, dtype: torch.dtype = torch.float32) -> ModelCosts:
    """Count what a causal language model (on meta or not) costs; `dtype` is that of the computation.

    The model is not changed. Raises UserError for a model that does not run on token ids alone.
    """
    experts = stacked_experts(model)
    scale = dtype.itemsize // 2 if experts else 1
    try:
        return _counted(model, sequence, micro_batch, torch.bfloat16 if experts else dtype, scale)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"what a {type(model).__name__} costs cannot be counted: {place_and_reason(error)}") from error


def at_micro_batch(one: ModelCosts, two: ModelCosts, micro_batch: float) -> ModelCosts:
    """The costs of any number of samples from those of one and of two: every call grows along a line."""

    def line(low: float, high: float) -> float:
        return low + (micro_batch - 1) * (high - low)

    def each(low: tuple[float, ...], high: tuple[float, ...]) -> tuple[float, ...]:
        if len(low) != len(high):  # other calls for other sizes: in proportion to the larger one
            return tuple(size * micro_batch / 2 for size in high)
        return tuple(map(line, low, high))

    def work(low: Work, high: Work) -> Work:
        return Work(each(low.products, high.products), each(low.memory_traffic, high.memory_traffic))

    return ModelCosts(
        one.sequence,
        micro_batch,
        one.parameters,
        tuple(
            Part(
                low.name,
                line(low.forward_flops, high.forward_flops),
                line(low.backward_flops, high.backward_flops),
                line(low.kept_bytes, high.kept_bytes),
                line(low.input_bytes, high.input_bytes),
                {
                    kind: Made(line(a.nbytes, b.nbytes), line(a.flops, b.flops))
                    for (kind, a), b in zip(low.made.items(), high.made.values(), strict=True)
                },
            )
            for low, high in zip(one.parts, two.parts, strict=True)
        ),
        work(one.forward, two.forward),
        work(one.backward, two.backward),
        line(one.logits_bytes, two.logits_bytes),
    )


def _counted(model: nn.Module, sequence: int, micro_batch: int, dtype: torch.dtype, scale: int) -> ModelCosts:
    fake = FakeTensorMode()
    twin = fake_twin(model, dtype, fake, buffers=scale != 1)  # in the place of float32, all have one type as there
    blocks = block_names(twin)
    meter = _Meter(twin, blocks, scale)
    with ExitStack() as stack:
        stack.enter_context(fake)
        ids_BS = torch.zeros(micro_batch, sequence, dtype=torch.long)  # noqa: N806
        positions_BS = torch.arange(sequence).expand(micro_batch, sequence)  # noqa: N806
        stack.enter_context(meter.flops)
        stack.enter_context(meter)
        with torch.autograd.graph.saved_tensors_hooks(meter.keep, _same):
            logits_BSV: Tensor = twin(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).logits  # noqa: N806
            loss = cross_entropy(logits_BSV.flatten(0, 1), ids_BS.flatten(), ignored=-1).sum()
        forward, forward_flops, made = meter.take(), meter.flops_by_block(), meter.take_made()
        loss.backward()
        backward, all_flops = meter.take(), meter.flops_by_block()
    parts = tuple(
        Part(
            name,
            forward_flops[name],
            all_flops[name] - forward_flops[name],
            float(meter.kept[name]),
            float(meter.inputs[name]),
            made[name],
        )
        for name in (*blocks, OUTSIDE)
    )
    logits = float(meter.size(logits_BSV))
    return ModelCosts(sequence, micro_batch, parameters_of(model), parts, forward, backward, logits)


def _same(x: Tensor) -> Tensor:
    return x


class _Meter(TorchDispatchMode):
    """Looks at every operator that runs, and at every tensor that autograd keeps."""

    def __init__(self, model: nn.Module, blocks: list[str], scale: int) -> None:
        super().__init__()
        self.flops = flop_counter.FlopCounterMode(display=False, custom_mapping=MORE_FLOPS)
        self.root = type(model).__name__
        self.blocks = blocks
        self.kept: Counter[str] = Counter()
        self.inputs: Counter[str] = Counter()
        self._made = {name: dict.fromkeys(("matmuls", "attention"), Made()) for name in (*blocks, OUTSIDE)}
        self._products: list[float] = []
        self._moves: list[float] = []
        self._scale = scale
        self._block = OUTSIDE
        # Storages that have been seen; they are held, so that no other one gets their number.
        self._seen = {storage_of(x): x for x in (*model.parameters(), *model.buffers())}
        for name in blocks:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            block.register_forward_hook(self._leave)

    def _enter(self, name: str, _: nn.Module, *given: Any) -> None:
        self._block = name
        first = next((x for x in tree_leaves(given) if isinstance(x, Tensor)), None)
        self.inputs[name] = self.size(first) if first is not None else 0

    def _leave(self, *_: Any) -> None:
        self._block = OUTSIDE

    def keep(self, x: Tensor) -> Tensor:
        """A tensor that the backward needs; each storage counts once."""
        key = storage_of(x)
        if key not in self._seen:
            self._seen[key] = x
            self.kept[self._block] += x.untyped_storage().nbytes() * (self._scale if x.dtype == torch.bfloat16 else 1)
        return x

    def take(self) -> Work:
        """What ran since the last call."""
        work = Work(tuple(self._products), tuple(self._moves))
        self._products.clear()
        self._moves.clear()
        return work

    def take_made(self) -> dict[str, dict[str, Made]]:
        """What each block has made until now, by kind."""
        return {name: {**kinds} for name, kinds in self._made.items()}

    def flops_by_block(self) -> dict[str, float]:
        """The FLOPs until now of each block and of what lies outside."""
        counts = self.flops.get_flop_counts()
        found = {name: float(sum(counts.get(f"{self.root}.{name}", {}).values())) for name in self.blocks}
        return {**found, OUTSIDE: self.flops.get_total_flops() - sum(found.values())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.flops.get_total_flops()
        result = func(*args, **(kwargs or {}))
        if flops := self.flops.get_total_flops() - before:
            self._products.append(float(flops))
            kind = "attention" if "attention" in str(func.overloadpacket) else "matmuls"
            before, made = self._made[self._block][kind], sum(map(self.size, tensors_in(result)))
            self._made[self._block][kind] = Made(before.nbytes + made, before.flops + flops)
        elif size := self._moved(func, [args, kwargs or {}], result):
            self._moves.append(float(size))
        return result

    def _moved(self, func: Any, given: Any, result: Any) -> int:
        inputs = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        storages = {storage_of(x) for x in inputs}
        if not outputs or (not func._schema.is_mutable and all(storage_of(x) in storages for x in outputs)):
            return 0  # a view
        written = sum(map(self.size, outputs))
        return 2 * written if func.overloadpacket in _GATHERS else written + sum(map(self.size, inputs))

    def size(self, x: Tensor) -> int:
        """Bytes."""
        held = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
        return held * (self._scale if x.dtype == torch.bfloat16 else 1)


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors that an operator has given."""
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_flop_count(query, key, value)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_backward_flop_count(grad, query, key, value)


def _attend(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """As if nothing were hidden, as torch counts its own."""
    rows, heads, queries, width = query
    return 2 * rows * heads * queries * key[2] * (width + value[3])


def _attend_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    rows, heads, queries, width = query
    return 2 * rows * heads * queries * key[2] * (3 * width + 2 * value[3])


def _grouped(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """One product a row group: what each row of `left` meets is a single matrix of `right`."""
    flops = 2 * right[-1]
    for n in left:
        flops *= n
    return flops


MORE_FLOPS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    ATTEND: _attend,
    ATTEND_BACKWARD: _attend_backward,
    FLASH: _attend,
    FLASH_BACKWARD: _attend_backward,
    _aten._grouped_mm: _grouped,
    **FLOPS,
}
"""Of operators that torch's counter does not know."""
