"""What loops change of a model between its calls, made parallel on two ranks, beside one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import leaky_relu
from torch.nn.utils import prune
from transformers import LlamaConfig, LlamaForCausalLM

import tangram
from tangram.errors import UserError

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
MARKS = ("*.up.weight: o/tp i", "{a,b.norm}: b s/tp h")
Change = Callable[[Any], object]


def centred(x: Tensor) -> Tensor:
    """Of which a part of the sequence makes something else."""
    return x - x.mean(1, keepdim=True) / 2


@dataclass
class Options:
    """A configuration of one's own, in which another one is."""

    way: str = "gated"
    more: Any = field(default_factory=lambda: SimpleNamespace(way="gated"))


class Block(nn.Module):
    """Goes the way that what it has as `reads` says."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gate, self.scale, self.bias = (nn.Parameter(torch.randn(8)) for _ in range(3))
        self.reads, self.act, self.options = reads, torch.tanh, Options()
        self._way, self.ways = "gated", ["gated"]
        self.of_layer: dict[str, Any] = defaultdict(list, first=("gated", {"gated"}), mask=torch.ones(2))

    def way(self) -> str:
        """One of them."""
        return {
            "private": self._way,
            "list": self.ways[0],
            "dict": self.of_layer["first"][0],
            "options": self.options.way,
            "nested": self.options.more.way,
            "function": "function",
            "": "gated",
        }[self.reads]

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(torch.relu(self.up(self.norm(x))))
        way = self.way()
        h = h * self.gate if way == "gated" else self.act(h) if way == "function" else centred(h) * self.scale
        return x + h + self.bias


class Net(nn.Module):
    """Two of them."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.a, self.b = Block(reads), Block(reads)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def _private(block: Block) -> None:
    block._way = "centred"  # pyright: ignore[reportPrivateUsage]


def _thaws(net: Net) -> None:
    net.requires_grad_(True)


def _freezes_others(net: Net) -> None:
    net.b.norm.requires_grad_(False)
    net.a.up.weight.requires_grad_(False)


def _hooks(net: Net) -> None:
    net.b.register_forward_pre_hook(lambda _, args: (centred(args[0]),))


def _both(change: Change) -> Change:
    return lambda net: [change(block) for block in (net.a, net.b)]


def _acts(act: Callable[[Tensor], Tensor]) -> Change:
    return _both(lambda block: setattr(block, "act", act))


def _leaking(slope: float) -> Callable[[Tensor], Tensor]:
    return partial(leaky_relu, negative_slope=slope)


def frozen_first() -> nn.Module:
    """A head that is trained before what it stands on."""
    net = Net()
    net.a.requires_grad_(False)
    net.b.norm.requires_grad_(False)
    return net


CHANGES: Mapping[str, tuple[Callable[[], nn.Module], tuple[Change, ...]]] = {
    "private": (lambda: Net("private"), (_both(_private),)),
    "list": (lambda: Net("list"), (_both(lambda block: block.ways.__setitem__(0, "centred")),)),
    "dict": (lambda: Net("dict"), (_both(lambda block: block.of_layer.update(first=("centred", {"centred"}))),)),
    "options": (lambda: Net("options"), (_both(lambda block: setattr(block.options, "way", "centred")),)),
    "nested": (lambda: Net("nested"), (_both(lambda block: setattr(block.options.more, "way", "centred")),)),
    "function": (lambda: Net("function"), (_acts(centred), _acts(_leaking(0.3)), _acts(_leaking(0.6)))),
    "frozen": (frozen_first, (_thaws, _freezes_others, _thaws)),
    "hook": (Net, (_hooks,)),
}


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def run_changes() -> dict[str, float]:
    """How far values and gradients are off one process, before and after each change."""
    return {f"{name} {i}": off for name, (make, changes) in CHANGES.items() for i, off in _offs(make, changes)}


def _offs(make: Callable[[], nn.Module], changes: tuple[Change, ...]) -> list[tuple[int, float]]:
    one, model = _made(make), _made(make)
    tangram.parallelize(model, "tp=2", MARKS, inputs={"x": X})
    found = [(0, _off(one, model, x=X))]
    for i, change in enumerate(changes, 1):
        for each in (one, model):
            change(each)
        found.append((i, _off(one, model, x=X)))
    return found


def _off(one: nn.Module, model: nn.Module, **inputs: Tensor) -> float:
    values: list[Tensor] = []
    for each in (one, model):
        each.zero_grad()
        given = each(**inputs)
        values.append(getattr(given, "logits", given))
        values[-1].sin().sum().backward()
    worst = float((values[1] - values[0]).abs().max() / values[0].abs().max())
    least = 1e-3 * max(float(p.grad.abs().max()) for p in one.parameters() if p.grad is not None)
    for p, right in zip(model.parameters(), one.parameters(), strict=True):
        if p.grad is None or right.grad is None:
            worst = worst if p.grad is right.grad else float("inf")
            continue
        grad: Tensor = getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        worst = max(worst, float((grad - right.grad).abs().max() / right.grad.abs().max().clamp(min=least)))
    return worst


def adapted() -> PeftModel:
    """A model with two adapters, of which one is on."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    own = LoraConfig(r=2, target_modules=["q_proj", "o_proj", "up_proj"], init_lora_weights=False)
    found = cast(PeftModel, get_peft_model(cast(Any, model), own))
    found.add_adapter("second", own)
    return found


def run_adapters() -> dict[str, float]:
    """peft's model by the marks of its type: with one adapter, another one, none, and one of another scale."""
    one, model = (cast(Any, _made(adapted)) for _ in range(2))
    ids = {"input_ids": torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))}
    tangram.parallelize(model, "tp=2", inputs=ids)
    plain = [
        name for name, p in model.named_parameters() if "q_proj.base_layer" in name and p.to_local().shape[0] == 16
    ]
    found = {"first": _off(one, model, **ids), "whole queries": float(len(plain))}
    for each in (one, model):
        each.set_adapter("second")
    found["second"] = _off(one, model, **ids)
    for each in (one, model):
        for module in each.modules():
            if hasattr(module, "lora_A"):
                module.scaling["second"] *= 3
    found["scaled"] = _off(one, model, **ids)
    with one.disable_adapter(), model.disable_adapter(), torch.no_grad():
        found["off"] = float((one(**ids).logits - model(**ids).logits).abs().max())
    return found


def run_other_modules() -> dict[str, str]:
    """What is said of modules that are other ones, more or fewer than before."""
    return {name: _said(change) for name, change in {**OTHERS, **PRUNED}.items()}


PRUNED: Mapping[str, Change] = {
    "pruned": lambda net: prune.random_unstructured(net.b.norm, "weight", 0.5),
    "normed": lambda net: nn.utils.weight_norm(net.b.up),
}


OTHERS: Mapping[str, Change] = {
    "another type": lambda net: setattr(net.b, "norm", nn.RMSNorm(8)),
    "another one": lambda net: setattr(net.b, "norm", nn.LayerNorm(8)),
    "one more": lambda net: setattr(net.b, "more", nn.LayerNorm(8)),
    "one less": lambda net: delattr(net.b, "norm"),
}


def _said(change: Change) -> str:
    model = cast(Any, _made(Net))
    tangram.parallelize(model, "tp=2", MARKS, inputs={"x": X})
    change(model)
    try:
        model(x=X)
    except UserError as error:
        return str(error)
    return ""
