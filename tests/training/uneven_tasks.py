"""Models whose dims axes do not divide, and sequences in a zigzag, as derived on ranks, beside one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tangram.layout import Mesh
from tangram.relayout.collectives import uneven
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.sharding.runtime.operators import Operators
from tangram.training.mesh.tensor_parallel import DerivedModel, parallel
from tangram.training.run.launch import Rank

VOCABULARY = 37


def _llama(heads: int = 5, kv: int = 5) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8 * heads, num_hidden_layers=2, num_attention_heads=heads, head_dim=8,
            num_key_value_heads=kv, intermediate_size=11, max_position_embeddings=32,
        )
    )  # fmt: skip


def _gpt2() -> nn.Module:
    """With its dropout of 0.1 and its head tied to its embedding."""
    config: Any = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=40, n_layer=2, n_head=5, n_inner=11)
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": _llama, "grouped": lambda: _llama(6, 3), "one kv head": lambda: _llama(5, 1), "gpt2": _gpt2
}  # fmt: skip
VOCABULARIES = "{model.embed_tokens.weight,lm_head.weight}: v/tp h"
HEADS = "{*.q_proj.weight,*.k_proj.weight}: (heads/tp 8) h"
GPT2 = (
    "transformer.wte.weight: v/tp h",
    "*.c_attn.weight: i (3 heads/tp 8)",
    "*.c_fc.weight: i f/tp",
    "*.mlp.c_proj.weight: f/tp o",
)


@dataclass(frozen=True)
class Work:
    """A model on a mesh."""

    kind: str
    mesh: str
    marks: tuple[str, ...]
    samples: int = 4
    tokens: int = 16
    mistake: str = ""


@dataclass(frozen=True)
class Ran:
    """What came of it on one rank, relative to one process: of each call's loss, of gradients and of values after."""

    losses: Mapping[str, float]
    gradient: float
    value: float
    where: str = ""
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """The shape of what a rank has of each parameter."""


def run_all(rank: Rank, works: Sequence[Work]) -> list[Ran]:
    """The task of the ranks."""
    return [run(work) for work in works]


def run(work: Work) -> Ran:
    torch.manual_seed(0)
    whole = MODELS[work.kind]()
    torch.manual_seed(0)
    model = MODELS[work.kind]()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (work.samples, work.tokens), generator=generator)
    given = {"input_ids": ids, "labels": ids.clone()}
    axes = {name: n for name, (n, _) in Mesh.parse(work.mesh).axes.items()}
    devices = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    held = parallel(model, [Mark.parse(text) for text in work.marks], devices, given)
    undo = MISTAKES[work.mistake](held, given) if work.mistake else None
    found, grads = _trained(model, given)
    if undo is not None:
        undo()
    want, wanted = _trained(whole, given)
    losses = {name: abs(found[name] - loss) / abs(loss) for name, loss in want.items()}
    least = 1e-4 * float(torch.stack([grad.norm() for grad in wanted.values()]).norm())
    off = {name: _off(held, name, grads[name], grad, least) for name, grad in wanted.items()}
    values = [_off(held, name, p.data, whole.get_parameter(name).data, 1e-6) for name, p in model.named_parameters()]
    worst = max(off, key=lambda name: off[name])
    parts = {name: tuple(_local(p).shape) for name, p in model.named_parameters()}
    return Ran(losses, off[worst], max(values), worst, parts)


def _trained(model: nn.Module, given: Mapping[str, Tensor]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Two steps and an evaluation before, between and after them; the losses, and the gradients of the last step."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: dict[str, float] = {}
    torch.manual_seed(5)
    grads: dict[str, Tensor] = {}
    for name in ("eval", "train", "eval after", "train again", "eval at last"):
        model.train(name.startswith("train"))
        with DrawMode():
            loss: Tensor = model(**given).loss
        losses[name] = float(loss.detach())
        if model.training:
            loss.backward()
            grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
    return losses, grads


def _off(held: DerivedModel, name: str, found: Tensor, want: Tensor, least: float) -> float:
    if isinstance(found, DTensor):
        found = found.full_tensor()
    elif found.shape != want.shape:  # torch has no word for such parts
        want = held.part_of(name, want)
    return float((found - want).norm() / want.norm().clamp(min=least))


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _in_the_order_of_ranks(held: DerivedModel, given: Mapping[str, Any]) -> Callable[[], None]:
    """Parts that are put together stay in the order of their ranks."""
    right = uneven.joined

    def joined(parts: Sequence[Tensor], dim: int, at: Sequence[Tensor]) -> Tensor:
        return torch.cat([*parts], dim)

    cast(Any, uneven).joined = joined
    return lambda: setattr(uneven, "joined", right)


def _as_the_first_rank(held: DerivedModel, given: Mapping[str, Any]) -> Callable[[], None]:
    """Every rank takes its own places for those of the first."""
    right = Operators.part
    cast(Any, Operators).part = lambda self, step: right(Operators(self._found, 0, self._linked), step)
    return lambda: setattr(Operators, "part", right)


MISTAKES: Mapping[str, Callable[[DerivedModel, Mapping[str, Any]], Callable[[], None]]] = {
    "in the order of ranks": _in_the_order_of_ranks, "as the first rank": _as_the_first_rank
}  # fmt: skip
