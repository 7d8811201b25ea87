"""Models of public reports, made parallel by `tangram.parallelize` on two ranks, beside one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

import tangram
from tangram.errors import UserError
from tangram.training.run.launch import Rank


class Residual(nn.Module):
    """A block whose hidden states are cut by sequence between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Bounded(Residual):
    """A layer that has its activation from outside, and makes a bound anew at each call."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(x + self.down(self.act(self.up(self.norm(x)))), torch.tensor([1.5] * 8))


def alike() -> nn.Module:
    """Layers that share one activation."""
    act = nn.GELU()
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*[Bounded(act) for _ in range(3)]))


def hooked() -> nn.Module:
    """A block with hooks of every kind that change what they see, some of them around what is in parts."""
    model = Residual()
    model.up.register_forward_pre_hook(lambda _, args: (args[0] + 1.0,), prepend=True)
    model.up.register_forward_hook(lambda _, args, y: y * torch.linspace(0, 1, y.shape[-1]))
    model.down.register_forward_hook(lambda _, args, kwargs, y: y - 0.5 * y.mean(0, keepdim=True), with_kwargs=True)
    model.down.register_full_backward_hook(lambda _, inward, outward: (inward[0] * 2,))
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, {"x": kwargs["x"].cos()}), with_kwargs=True)
    model.register_forward_hook(lambda _, args, y: y + y.std())
    return model


class Headed(Residual):
    """Two layers, and a view as torch makes them for hooks, are called on one line."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(super().forward(x)).view_as(x.flatten(0, 1)))


def hooked_behind() -> nn.Module:
    """A hook behind the backward of each layer, as those who watch gradients have, and one before the last's."""
    model = Headed()
    for layer in model.children():
        layer.register_full_backward_hook(lambda _, inward, outward: tuple(g if g is None else g * 2 for g in inward))
    model.head.register_full_backward_pre_hook(lambda _, outward: (outward[0].sin(),))
    return model


def with_hook_of_parameter() -> nn.Module:
    """Whose weight doubles its gradient."""
    model = Residual()
    model.up.weight.register_hook(lambda gradient: gradient * 2)
    return model


class Reentrant(nn.Module):
    """Layers that run without gradients at first, and again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = cast(Any, checkpoint)(layer, x, use_reentrant=True)
        return x


def transformers_own() -> nn.Module:
    """A Llama of which transformers checkpoints the layers so."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model


@dataclass
class Hidden:
    """Results that torch sees as one thing."""

    y: Tensor


@dataclass
class Seen:
    """The same, of which it is told what is in it."""

    y: Tensor
    others: list[Tensor]


_pytree.register_dataclass(Seen)


class Gives(Residual):
    """Gives its results in an object."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Any:
        return self.made(super().forward(x))


class Shared(nn.Module):
    """Keys of which a part is one for all heads: made of a weight that no rank cuts, and expanded to heads that are."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.shared, self.out = (nn.Linear(16, n, bias=False) for n in (32, 16, 4, 16))
        self.down = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k = self.q(x).view(b, s, 4, 8), self.k(x).view(b, s, 4, 4)
        k = torch.cat([k, self.shared(x)[:, :, None].expand(b, s, 4, 4)], -1)
        v = self.out(x).view(b, s, 4, 4)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.down(y.transpose(1, 2).reshape(b, s, 16))


class Recurrent(nn.Module):
    """Channels that are apart from each other: a convolution of each, and a norm of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.mix, self.norm = nn.Conv1d(16, 16, 4, padding=3, groups=16), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.up(x).transpose(1, 2))[..., : x.shape[1]]
        b, c, s = h.shape
        h = self.norm(h.transpose(1, 2).reshape(b * s, c)).view(b, s, c)
        return self.down(F.silu(h))


class Unused(nn.Module):
    """Operators of several results, of which some are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scan = nn.Linear(8, 32), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        a, _, c, _ = self.up(x).chunk(4, -1)
        most, _ = torch.max(a, dim=-1)
        y, _ = self.scan(a * torch.sigmoid(c))
        return y + most[..., None] + torch.topk(c, 3).values.sum(-1, keepdim=True)


class Masked(nn.Module):
    """Code that does without a mask where there is nothing to mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = F.silu(self.up(x))
        return self.down(h) if bool(mask.all()) else self.down(h) * mask[..., None]


class Picked(Masked):
    """Code that works on the tokens that are there alone, as Qwen3-VL does on those of images."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = F.silu(self.up(x))
        return self.down(h[mask.bool(), :])


class Heads(nn.Module):
    """A norm with one weight for all heads, on heads that ranks have some of each, as of Qwen3-Next's delta rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.RMSNorm(4), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).unflatten(-1, (8, 4))
        return self.down((self.norm(h) * torch.sigmoid(h)).flatten(-2))


class Words(nn.Module):
    """Log-probabilities of words that ranks have some of each, for a cross-entropy and for an entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        logs = F.log_softmax(logits, -1)
        labels = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        entropy = -(logs.exp() * logs).sum(-1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(entropy) - entropy


class Outside(nn.Module):
    """A tied weight that code reads from outside of its module, and not by its first name, as MobileBERT's head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.more = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False), nn.Linear(24, 8)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self.head.weight.t(), self.more.weight], 0)
        return torch.cat([x, x], -1) @ weight


class States(LlamaForCausalLM):
    """What a layer gives, where it is called for, as by who teaches another model."""

    def forward(self, input_ids: Tensor, states: bool = False) -> Any:  # type: ignore[override]  # pyright: ignore
        found = super().forward(input_ids=input_ids, use_cache=False, output_hidden_states=states)  # pyright: ignore
        return found.hidden_states[1] if states else found.logits  # pyright: ignore


class Collects(nn.Module):
    """A module that gives what it takes beside what it makes of it, as encoders collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(F.silu(self.up(h))), h


class Collected(nn.Module):
    """Results of which one is what a module inside has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), Collects()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(torch.tanh(self.first(x)))


def bare() -> nn.Module:
    """BERT without a head, whose last layer gives what the model gives. The gradient of a key's bias is rounding."""
    model = BertModel(BertConfig(**SMALL)).eval()
    for name, module in model.named_modules():
        if name.endswith("self.key"):
            module.register_parameter("bias", None)
    return model


def of_ids() -> dict[str, Any]:
    """Four samples of words."""
    return {"input_ids": torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(1))}


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 24}


def masked(*padded: int) -> dict[str, Any]:
    """Four samples, the last places of some of which are padding."""
    mask = torch.ones(4, 6, dtype=torch.long)
    for sample in padded:
        mask[sample, 4:] = 0
    return {**of_x(), "mask": mask}


def sees_images() -> nn.Module:
    """Qwen2.5-VL, small: windows of patches, and one layer of its tower without."""
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    tower = {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32, "patch_size": 4,
        "fullatt_block_indexes": [1], "window_size": 16,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, image_token_id=60, video_token_id=61)
    return Qwen2_5_VLForConditionalGeneration(config)


def images(height: int = 4, width: int = 8) -> dict[str, Any]:
    """Two samples of an image each."""
    draw = torch.Generator().manual_seed(1)
    ids, n = torch.randint(0, 60, (2, 16), generator=draw), height * width
    ids[:, 3 : 3 + n // 4] = 60
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(2 * n, 3 * 2 * 4 * 4, generator=draw),
        "image_grid_thw": torch.tensor([[1, height, width]] * 2),
        "position_ids": torch.arange(16).expand(3, 2, 16),
    }


def of_x(length: int = 6, width: int = 8, name: str = "x") -> dict[str, Any]:
    """Four samples of one tensor."""
    return {name: torch.randn(4, length, width, generator=torch.Generator().manual_seed(1))}


@dataclass(frozen=True)
class Work:
    """A model of a report."""

    make: Callable[[], nn.Module]
    marks: Sequence[str]
    mesh: str = "tp=2"
    inputs: Callable[[], Mapping[str, Any]] = of_x
    first: Callable[[], Mapping[str, Any]] | None = None
    """What it is made parallel with, where it is something else."""
    then: Sequence[Mapping[str, Any]] = ()
    """More calls, without gradients."""
    compiled: bool = False


BLOCK = ("up.weight: f/tp h", "down.weight: h f/tp")
WORKS: Mapping[str, Work] = {
    "odd": Work(Residual, ("norm: b s/tp h", *BLOCK), inputs=partial(of_x, length=5)),
    "shared": Work(Shared, ("q.weight: n/tp h", "k.weight: n/tp h"), inputs=partial(of_x, width=16)),
    "recurrent": Work(Recurrent, ("up.weight: c/tp h", "mix.weight: c/tp _ k")),
    "one way": Work(Residual, ("norm: b/dp s h", *BLOCK), "dp=2 tp=1"),
    "alike": Work(alike, ("*.up.weight: f/tp h", "*.down.weight: h f/tp"), inputs=partial(of_x, name="input")),
    "compiled": Work(Residual, BLOCK, compiled=True),
    "reentrant": Work(Reentrant, ("*.up.weight: f/tp h", "*.down.weight: h f/tp")),
    "reentrant of transformers": Work(transformers_own, (), inputs=of_ids),
    "hidden": Work(partial(Gives, Hidden), BLOCK),
    "hidden in a dict": Work(partial(Gives, lambda y: {"last": Hidden(y)}), BLOCK),
    "seen": Work(partial(Gives, lambda y: Seen(y, [y.sin()])), ("norm: b/tp s h", *BLOCK)),
    "hooked": Work(hooked, BLOCK),
    "hooked behind": Work(hooked_behind, BLOCK),
    "hooked, compiled": Work(hooked, BLOCK, compiled=True),
    "hook of a parameter": Work(with_hook_of_parameter, BLOCK),
    "unused": Work(Unused, ("up.weight: f/tp h",), compiled=True),
    "partly": Work(
        lambda: nn.Sequential(nn.Linear(8, 8), Residual(), nn.LayerNorm(8)),
        ("1.up.weight: f/tp h",),
        inputs=partial(of_x, name="input"),
    ),
    "masked": Work(Masked, BLOCK, inputs=partial(masked, 1), first=masked, then=tuple(masked(i) for i in range(4))),
    "picked": Work(Picked, BLOCK, inputs=partial(masked, 1), first=partial(masked, 2), then=(masked(), masked(3, 0))),
    "heads": Work(Heads, ("up.weight: f/tp h",)),
    "words": Work(Words, ("head.weight: v/tp h",)),
    "words, gathered": Work(Words, ("head.weight: v/tp h", "head: b s v")),
    "outside": Work(Outside, ("words.weight: v/tp h",)),
    "collected": Work(Collected, ("inner.up: b/tp s f",)),
    "bare": Work(bare, (), inputs=of_ids),
    "states": Work(lambda: States(LlamaConfig(**SMALL)), (), inputs=lambda: {**of_ids(), "states": True}, first=of_ids),
    "images": Work(sees_images, (), inputs=images),
    "images of other sides": Work(sees_images, (), inputs=partial(images, 2, 16), first=images),
}


@dataclass(frozen=True)
class Ran:
    """What came of a model on one rank."""

    value: float = 0.0
    """How far what it gives is off one process."""
    gradient: float = 0.0
    """Of the parameter whose gradient is furthest off."""
    stepped: float = 0.0
    """Of the parameter that is furthest off after gradients were clipped and a fused AdamW has stepped."""
    alike: bool = False
    """Whether all ranks have the same bits of gradients of what is whole."""
    parts: Mapping[str, tuple[int, ...]] | None = None
    refused: str = ""
    programs: int = 1
    then: float = 0.0
    """How far the results of more calls are off."""


def run_all(rank: Rank, _: None) -> dict[str, Ran]:
    """The task of the ranks."""
    return {**{name: _run(work) for name, work in WORKS.items()}, "adapted": adapted()}


def adapted() -> Ran:
    """A model of peft's, whose adapters alone are trained: a step, what is saved of it, and one more adapter then.

    `value`: how far the norm of the gradients is off; `stepped`: of what comes back from a directory.
    """
    ids = {"input_ids": torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))}
    whole, model = (_with_adapter() for _ in range(2))
    frozen = [name for name, p in whole.named_parameters() if not p.requires_grad]
    tangram.parallelize(model, "tp=2", inputs=ids)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == frozen
    norms: list[Tensor] = []
    for one in (whole, model):
        one(**ids).logits.sin().sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1))
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], 1.0).step()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    expected = whole(**ids).logits
    off = [0.0]
    if dist.get_rank() == 0:
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder, state_dict=full)
            off = [_off(PeftModel.from_pretrained(_bare_decoder(), folder)(**ids).logits, expected)]
    dist.broadcast_object_list(off)
    parts = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    model.add_adapter("late", LoraConfig(r=2, target_modules=["q_proj"]))
    try:
        model(**ids)
    except UserError as error:
        return Ran(_off(_full(norms[1]), norms[0]), stepped=off[0], parts=parts, refused=str(error))
    return Ran()


def _bare_decoder() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 32, "num_key_value_heads": 2}))


def _with_adapter() -> Any:
    own = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    return get_peft_model(_bare_decoder(), own)


def _run(work: Work) -> Ran:
    torch.manual_seed(0)
    whole = work.make()
    torch.manual_seed(0)
    model = work.make()
    inputs = work.inputs()
    try:
        held = tangram.parallelize(model, work.mesh, work.marks, inputs=(work.first or work.inputs)())
        if work.first is not None:
            model(**work.first())
    except UserError as error:
        return Ran(refused=str(error))
    called: Any = torch.compile(model, backend="eager") if work.compiled else model
    want, found = (_numbers(y) for y in (whole(**inputs), called(**inputs)))
    for one in (want, found):
        one.sin().sum().backward()
    programs, then = len(held.programs), max((_off(model(**one), whole(**one)) for one in work.then), default=0.0)
    programs = max(programs, len(held.programs))
    own = dict(model.named_parameters())
    full = {key: _full(p.grad) for key, p in own.items() if p.grad is not None}
    right = {key: p.grad for key, p in whole.named_parameters() if p.grad is not None}
    gradient = max(_off(full[key], one) if key in full else float("inf") for key, one in right.items())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, full)
    alike = all(torch.equal(other[key], full[key]) for other in gathered for key in full)
    for net in (whole, model):
        optimiser = torch.optim.AdamW(net.parameters(), 1e-2, fused=True)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimiser.step()
    stepped = max(_off(_full(own[key]), p.detach()) for key, p in whole.named_parameters())
    parts = {key: tuple(cast(Any, getattr(p, "to_local", lambda p=p: p)()).shape) for key, p in own.items()}
    return Ran(_off(found.detach(), want.detach()), gradient, stepped, alike, parts, programs=programs, then=then)


def _numbers(result: Any) -> Tensor:
    if isinstance(result, Seen):
        return torch.cat([result.y, *result.others], -1)
    if isinstance(result, tuple):
        return torch.cat([*cast("tuple[Tensor, ...]", result)], -1)
    return getattr(result, "logits", getattr(result, "last_hidden_state", result))


def _full(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def _off(x: Tensor, want: Tensor) -> float:
    return float((x - want).abs().max() / want.abs().max()) if x.shape == want.shape else float("inf")
