"""Models with the dropout that their configurations have by default, as derived on ranks, beside one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from tangram.layout import Mesh
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.sharding.runtime.operators import Operators
from tangram.training.mesh.drawing import drawn_apart, seed_for
from tangram.training.mesh.tensor_parallel import DerivedModel, parallel
from tangram.training.run.launch import Rank
from tests.training import switched_tasks
from tests.training.test_drawing import KINDS, SOURCES, STEP, WIDTH, X, trained


def _bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=32,
        )
    )  # fmt: skip


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )


def _t5() -> nn.Module:
    config: Any = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {"bert": _bert, "gpt2": _gpt2, "t5": _t5}
MARKS: Mapping[str, tuple[str, ...]] = {
    "bert": (
        "{*.query.weight,*.key.weight,*.value.weight,*.intermediate.dense.weight}: o/tp i",
        "*.output.dense.weight: o i/tp",
    ),
    "gpt2": ("*.c_attn.weight: i (3 o/tp)", "*.c_fc.weight: i o/tp", "*.c_proj.weight: i/tp o"),
    "t5": (
        "{*.q.weight,*.k.weight,*.v.weight,*.wi.weight}: o/tp i",
        "{*.o.weight,*.wo.weight}: o i/tp",
        "*.relative_attention_bias.weight: n h/tp",
    ),
}
"""As Megatron cuts them."""
SEQUENCE = {
    "bert": "{bert.embeddings,bert.encoder.layer.*}: b s/tp h",
    "gpt2": "{transformer.drop,transformer.h.*,transformer.ln_f}: b s/tp h",
}
"""Hidden states between blocks, so that their dropouts are cut, too."""


@dataclass(frozen=True)
class Work:
    """A model with its default dropout on a mesh."""

    kind: str
    mesh: str = "tp=2"
    sequence: bool = False
    recompute: bool = False
    """By the model's own gradient checkpointing."""
    mistake: str = ""


@dataclass(frozen=True)
class Ran:
    """What came of it on one rank."""

    off: Mapping[str, float]
    """Of each loss, relative to that of one process."""
    worst: float
    """The gradient that is furthest off, relative to its norm."""
    losses: Mapping[str, float]
    programs: int
    refused: Mapping[str, str] = field(default_factory=dict[str, str])


def inputs_of(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 64, (4, 16), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def run_all(rank: Rank, works: Sequence[Work]) -> list[Ran]:
    """The task of the ranks."""
    return [run(work) for work in works]


def losses_of(model: nn.Module, kind: str, drawing: bool) -> dict[str, float]:
    """Of two calls in training, of two in evaluation, and of one more in training; gradients are those of the last."""
    found: dict[str, float] = {}
    torch.manual_seed(5)
    for name in ("train", "train again", "eval", "eval again", "train last"):
        model.train(name.startswith("train"))
        model.zero_grad()
        with DrawMode() if drawing else nullcontext():
            loss: Tensor = model(**inputs_of(kind)).loss
            if model.training:
                loss.backward()
        found[name] = float(loss.detach())
    return found


class Drawn(nn.Module):
    """Something that draws behind a product that is cut."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), draw

    def forward(self, x_BSH: Tensor) -> Tensor:  # noqa: N803
        return self.draw(x_BSH + self.down(torch.relu(self.up(x_BSH))))


BY_TORCH: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "poisson": lambda x: x * torch.poisson(x.detach().abs()),
    "log_normal": lambda x: x * torch.empty_like(x).log_normal_(),
    "multinomial": lambda x: x * torch.multinomial(x.detach().abs().flatten(1), 1)[:, :, None],
    "binomial": lambda x: x * torch.binomial(torch.ones_like(x) * 9, torch.sigmoid(x.detach())),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}
"""What is not known to draw by the element: each of the ranks draws for all of it."""


def run_kinds() -> Ran:
    """Every kind of draw behind hidden states that are cut, two samples at a time, beside all four in one process."""
    devices = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    off: dict[str, float] = {}
    for kind, draw in KINDS.items():
        torch.manual_seed(0)
        whole, model = Drawn(draw), Drawn(draw)
        model.load_state_dict(whole.state_dict())
        seed_for(torch.device("cpu"), 7, STEP)
        with DrawMode():
            want = whole(X)
        marks = [Mark.parse("up.weight: o/tp i"), Mark.parse("down: b s/tp h")]
        if kind == "checkpointed":  # a function, which is refused
            continue
        SOURCES[model] = parallel(model, marks, devices, {"x_BSH": X[:2]})
        off[kind] = float((trained(model, 2)[0] - want).abs().max())
        assert drawn_apart([("Drawn", SOURCES[model])]) == [], kind
    for kind, draw in BY_TORCH.items():
        torch.manual_seed(0)
        whole, model = Drawn(draw), Drawn(draw)
        model.load_state_dict(whole.state_dict())
        parallel(model, [Mark.parse("up.weight: o/tp i"), Mark.parse("down: b s/tp h")], devices, {"x_BSH": X})
        torch.manual_seed(5)
        with DrawMode():
            want = torch.stack([whole(X), whole(X)])
        torch.manual_seed(5)
        off[kind] = float((torch.stack([model(X), model(X)]) - want).abs().max() / want.abs().max())
    model = Drawn(lambda x: F.rrelu(x, training=True))
    SOURCES[model] = parallel(model, [Mark.parse("up.weight: o/tp i")], devices, {"x_BSH": X[:2]})
    trained(model, 2, until=2)
    (said,) = drawn_apart([("Drawn", SOURCES[model])])
    assert "whole batch: rrelu" in said, said
    model = Drawn(lambda x: F.dropout(x.unflatten(0, (2, -1)), 0.4).flatten(0, 1))
    SOURCES[model] = parallel(model, [Mark.parse("up.weight: o/tp i")], devices, {"x_BSH": X[:2]})
    trained(model, 2, until=2)
    (said,) = drawn_apart([("Drawn", SOURCES[model])])
    assert "with one sample more it does not run" in said, said
    return Ran(off, 0.0, {}, 0)


def run(work: Work) -> Ran:
    if work.kind == "kinds":
        return run_kinds()
    if work.kind == "changes":
        said = switched_tasks.run_other_modules()
        own = {**switched_tasks.run_changes(), **{f"adapters {k}": x for k, x in switched_tasks.run_adapters().items()}}
        return Ran(own, 0.0, {}, 0, said)
    torch.manual_seed(0)
    whole = MODELS[work.kind]()
    torch.manual_seed(0)
    model = MODELS[work.kind]()
    for each in (whole, model):
        if work.recompute:
            cast(Any, each).gradient_checkpointing_enable({"use_reentrant": False})
    want = losses_of(whole, work.kind, drawing=True)
    axes = {name: n for name, (n, _) in Mesh.parse(work.mesh).axes.items()}
    devices = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    texts = [*MARKS[work.kind], *([SEQUENCE[work.kind]] if work.sequence else [])]
    held = parallel(model, [Mark.parse(text) for text in texts], devices, inputs_of(work.kind))
    if work.mistake:
        MISTAKES[work.mistake](held, model)
    found = losses_of(model, work.kind, drawing=False)
    off = {name: abs(found[name] - loss) / abs(loss) for name, loss in want.items()}
    return Ran(off, _furthest(model, whole), found, len(held.programs))


def _furthest(model: nn.Module, whole: nn.Module) -> float:
    wanted: dict[str, Any] = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    least = 1e-4 * float(torch.stack([grad.norm() for grad in wanted.values()]).norm())
    worst, full = 0.0, torch.empty(0)
    for name, parameter in model.named_parameters():
        if name not in wanted:
            continue
        grad = cast(Any, parameter.grad)
        assert grad is not None, name
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        worst = max(worst, float((full - wanted[name]).norm() / wanted[name].norm().clamp(min=least)))
    return worst


def _same_at_every_call(held: DerivedModel, model: nn.Module) -> None:
    """As if the key were of the step's seed alone."""
    forward = model.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(5)
        return forward(*args, **kwargs)

    model.forward = run


def _captured_in_training(held: DerivedModel, model: nn.Module) -> None:
    """Evaluation runs by the program of training."""
    now = held._now  # pyright: ignore[reportPrivateUsage]

    def trained(given: Mapping[str, Any]) -> Any:
        training = model.training
        try:
            model.train()
            return now(given)
        finally:
            model.train(training)

    cast(Any, held)._now = trained


def _each_rank_its_own(held: DerivedModel, model: nn.Module) -> None:
    """Generators of ranks are in other states while the model runs."""
    first = next(iter(model.children()))

    def seed(module: nn.Module, args: Any) -> None:
        torch.manual_seed(dist.get_rank())

    first.register_forward_pre_hook(seed)


def _places_of_the_part(held: DerivedModel, model: nn.Module) -> None:
    """Every rank draws the numbers of the first one's part."""
    held.prepare(inputs_of("gpt2"))
    for now in held._programs.values():  # pyright: ignore[reportPrivateUsage]
        cells: Any = cast(Any, now.instead).__closure__
        for cell in cells:
            if isinstance(cell.cell_contents, Operators):
                cell.cell_contents._rank = 0  # pyright: ignore[reportPrivateUsage]


def _another_when_recomputed(held: DerivedModel, model: nn.Module) -> None:
    """What runs again in the backward finds another state of the generator."""
    told = {"use_reentrant": False, "preserve_rng_state": False}
    cast(Any, model).gradient_checkpointing_enable(told)


MISTAKES: Mapping[str, Callable[[DerivedModel, nn.Module], None]] = {
    "the same masks at every call": _same_at_every_call,
    "evaluation as training": _captured_in_training,
    "ranks draw by generators of their own": _each_rank_its_own,
    "masks of the first part": _places_of_the_part,
    "other masks when recomputed": _another_when_recomputed,
}
