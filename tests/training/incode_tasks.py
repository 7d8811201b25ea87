"""What ranks do with marks in code: functions of torch, a module with marks, and models, each beside one process."""

# ruff: noqa: N803, N806

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.building.twin import without_memory
from tangram.sharding.derive.layouts import layout_of as layout_from
from tangram.sharding.derive.layouts import value_layout
from tangram.sharding.derive.marking.marks import Mark, matched, noted
from tangram.sharding.derive.of_model import derive_model, graph_of, parameter_states
from tangram.sharding.derive.problem.states import SAME, SEVERAL, SUM
from tangram.sharding.eager import layout_of, mark, relayout
from tangram.sharding.eager.api import marks_in
from tangram.sharding.eager.sharded_tensor import ShardedTensor
from tangram.training.mesh.eager_marks import EagerModel, eager
from tangram.training.mesh.tensor_parallel import DerivedModel, parallel
from tangram.training.run.launch import Rank
from tests.training.derived_models import _furthest as furthest  # pyright: ignore[reportPrivateUsage]
from tests.training.derived_models import inputs_of, loss_of, marks_for, model_of


class Block(nn.Module):
    """Attention and a gated product, with its layouts in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.RMSNorm(32)])
        self.qkv = mark(nn.Parameter(torch.randn(96, 32) / 6), "(3 out/tp) in")
        self.out = nn.Linear(32, 32)
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), mark(nn.Linear(48, 32), "b s/tp h")
        mark(self.out.weight, "out in/tp")
        mark(self.up.weight, "f/tp h")
        mark(self.up.bias, "f/tp")
        mark(self.down.weight, "h f/tp")

    def forward(self, x_BSH: Tensor) -> Tensor:
        b, s, _ = x_BSH.shape
        x_BSH = mark(x_BSH, "b s/tp h")
        whole_BSH = relayout(self.norms[0](x_BSH), "b s h")
        q, k, v = (whole_BSH @ self.qkv.T).view(b, s, 3, 4, 8).permute(2, 0, 3, 1, 4)
        early_SS = torch.arange(s)[:, None] >= torch.arange(s)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=early_SS).transpose(1, 2).reshape(b, s, 32)
        x_BSH = x_BSH + relayout(self.out(found), "b s/tp h")
        n_BSH = self.norms[1](x_BSH)
        f_BSF = F.silu(self.gate(n_BSH)) * relayout(self.up(n_BSH), "b s f/tp")
        return mark(x_BSH + self.down(f_BSF), "b s/tp h")


class Marked(nn.Module):
    """Two blocks between an embedding that is cut and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 64, bias=False)
        mark(self.embed.weight, "v/tp h")
        mark(self.head.weight, "v/tp h")

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSH = self.embed(ids_BS) + 0.1 * torch.arange(ids_BS.shape[1])[:, None]
        for block in self.blocks:
            x_BSH = block(x_BSH)
        return self.head(x_BSH)


def marked() -> Marked:
    """The same on every rank."""
    torch.manual_seed(0)
    return Marked()


def ids() -> Tensor:
    return torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))


def loss_of_marked(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(ids()).flatten(0, 1), ids().roll(1).flatten())


@dataclass(frozen=True)
class Ran:
    """What came of a model on one rank."""

    loss: float
    """Relative to that of one process."""
    worst: float
    """The gradient that is furthest off."""
    where: str
    layouts: Mapping[str, set[str]] = field(default_factory=dict[str, set[str]])
    """How the tensors of each mark lie."""


def devices_of(mesh: str) -> DeviceMesh:
    axes = {name: n for name, (n, _) in Mesh.parse(mesh).axes.items()}
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def beside(model: nn.Module, loss: Tensor, whole: nn.Module, want: Tensor, **more: Any) -> Ran:
    off = float((loss.detach() - want.detach()).abs() / want.detach().abs())
    return Ran(off, *furthest(model, dict(whole.named_parameters())), **more)


def seen(held: EagerModel, marks: Sequence[Mark]) -> dict[str, set[str]]:
    """How the tensors of each mark lie, as operators ran; over the axes that a mark of a name names."""
    axes = {f"the mark `{one}`": one.layout.axes for one in marks}
    found: dict[str, set[str]] = {}
    for one in held.session.seen:
        found.setdefault(one.by, set()).add(over(str(one.layout), axes.get(one.by, frozenset())))
    return found


def came_to(held: DerivedModel, marks: Sequence[Mark]) -> dict[str, set[str]]:
    """The same of a captured graph."""
    found = held.programs[0].derived
    graph = found.folded.graph
    known = {str(one): {str(value_layout(found, v)) for v in matched(graph, one).values()} for one in noted(graph)}
    for one in marks:
        values = [v for name, v in matched(graph, one).items() if name in graph.results]
        if values:
            texts = {over(str(value_layout(found, v)), one.layout.axes) for v in values}
            known[f"the mark `{one}`"] = texts
    return known


def over(layout: str, axes: Collection[str]) -> str:
    """A layout over some axes alone; over all where there are none."""
    if not axes:
        return layout
    cut = re.sub(r"/(\w+)", lambda found: found[0] if found[1] in axes else "", layout)
    return re.sub(r" \w+:(\w+)", lambda found: found[0] if found[1] in axes else "", cut)


# ---------------------------------------------------------------- a module with marks


@dataclass(frozen=True)
class All:
    """What one start of ranks finds."""

    wrong: dict[str, list[str]]
    """By mistake, the functions that are not as on one process."""
    marked: dict[str, dict[str, Ran]]
    """By mistake, the module with marks, in both ways."""
    models: dict[str, dict[str, Ran]]
    refused: dict[str, str]
    """What is said of each mistake."""


Works = Mapping[str, tuple[str, str, tuple[str, ...]]]


def run_all(rank: Rank, works: Works) -> All:
    """The quick part of the tests."""
    mistakes = ["", *MISTAKES]
    return All(
        {mistake: run_functions(mistake) for mistake in mistakes},
        {mistake: run_marked(mistake) for mistake in mistakes},
        run_models(rank, works),
        run_refused(),
    )


def run_refused() -> dict[str, str]:
    """What is said of mistakes in the marks of a model, and in how it is run."""
    devices = devices_of("tp=2")
    found: dict[str, str] = {}

    def tried(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except UserError as error:
            found[name] = str(error)

    for text in (
        "head.wait: v/tp h", "head.weight: v/cp h", "head.weight: (5 v/tp) h", "ids_BS: b/tp s", "head.weight: v h/tp",
        "head.weight: v h sum:tp", "blocks.0.up.weight: f/tp h k",
    ):  # fmt: skip
        tried(text, lambda text=text: eager(marked(), devices, [Mark.parse(text)]))
    held = eager(model := marked(), devices)
    tried("outside", lambda: model(ids()))

    other = eager(marked(), devices)

    def nested() -> None:
        with held, other:
            pass

    tried("nested", nested)
    cut = marked()

    def written() -> None:
        with eager(cut, devices):
            cut(ids())

    cut.head.register_forward_pre_hook(lambda head, _: (head.weight.detach().mul_(0.5), None)[1])
    tried("written", written)
    with held:  # and goes on after what was refused
        model(ids())
    return found


def run_marked(mistake: str) -> dict[str, Ran]:
    """The module in both ways, beside one process."""
    whole = marked()
    want = loss_of_marked(whole)
    want.backward()
    first, second = marked(), marked()
    held = eager(first, devices_of("tp=2"))
    if mistake:
        MISTAKES[mistake](held)
    with held:
        loss = loss_of_marked(first)
    loss.backward()
    ran = {"as it runs": beside(first, loss, whole, want, layouts=seen(held, marks_in(whole)))}
    if mistake:
        return ran
    inputs = {"ids_BS": ids()}
    other = parallel(second, [], devices_of("tp=2"), inputs)
    loss = loss_of_marked(second)
    loss.backward()
    ran["captured"] = beside(second, loss, whole, want, layouts=came_to(other, marks_in(whole)))
    return ran


def _not_summed_back(held: EagerModel) -> None:
    """What each rank uses for something of its own counts as the same on all."""
    bring = held.session._bring  # pyright: ignore[reportPrivateUsage]
    held.session._bring = lambda x, change, trained: bring(  # pyright: ignore[reportPrivateUsage]
        x, tuple(s._replace(target=SAME if s.target == SEVERAL else s.target) for s in change), trained
    )


def _not_added_up(held: EagerModel) -> None:
    """A sum that is pending is taken for what it will be."""
    bring = held.session._bring  # pyright: ignore[reportPrivateUsage]
    held.session._bring = lambda x, change, trained: bring(  # pyright: ignore[reportPrivateUsage]
        x, tuple(s._replace(source=SAME if s.source == SUM else s.source) for s in change), trained
    )


def _first_rank(held: EagerModel) -> None:
    """Every rank takes itself for the first."""
    held.session._rank = 0  # pyright: ignore[reportPrivateUsage]


MISTAKES: Mapping[str, Callable[[EagerModel], None]] = {
    "gradients are not summed": _not_summed_back,
    "sums are not added up": _not_added_up,
    "every rank is the first": _first_rank,
}


# ---------------------------------------------------------------- models


def run_models(rank: Rank, works: Works) -> dict[str, dict[str, Ran]]:
    """Models by the marks that come with them and others, in both ways."""
    return {name: run_model(*work) for name, work in works.items()}


def run_model(kind: str, mesh: str, more: tuple[str, ...]) -> dict[str, Ran]:
    """One model. Parameters lie in both ways as is derived, since a session derives nothing of them."""
    whole = model_of(kind)
    want = loss_of(whole, kind)
    want.backward()
    first, second = model_of(kind), model_of(kind)
    marks = [*marks_for(kind), *map(Mark.parse, more)]
    found = derive_model(graph_of(without_memory(whole), inputs_of(kind), torch.float32), marks, Mesh.parse(mesh))
    shapes = {name: p.shape for name, p in whole.named_parameters()}
    lies = [Mark(name, layout_from(shapes[name], s)) for name, s in parameter_states(found).items() if name in shapes]
    held = eager(first, devices_of(mesh), [*marks, *lies])
    with held:
        loss = loss_of(first, kind)
    loss.backward()
    other = parallel(second, marks, devices_of(mesh), inputs_of(kind))
    after = loss_of(second, kind)
    after.backward()
    return {
        "as it runs": beside(first, loss, whole, want, layouts=seen(held, marks)),
        "captured": beside(second, after, whole, want, layouts=came_to(other, marks)),
    }


# ---------------------------------------------------------------- functions


FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "sum of squares, by dim": lambda x, w: x.pow(2).sum(1),
    "mean of all": lambda x, w: x.mean(),
    "softmax over each dim": lambda x, w: torch.stack([x.softmax(d) for d in range(3)]),
    "cumulative sum": lambda x, w: x.cumsum(1),
    "norm and its sum": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]).sum(-1),
    "product with weights": lambda x, w: F.linear(x, w).relu(),
    "outer product": lambda x, w: torch.einsum("abc,dc->bad", x, w),
    "views there and back": lambda x, w: x.view(4, 3, 2, 8).transpose(1, 2).reshape(8, 24)[:, 1:-1],
    "flattened": lambda x, w: x.flatten() * torch.arange(x.numel()),
    "iterated": lambda x, w: [row * i for i, row in enumerate(x)],
    "chunks swapped": lambda x, w: torch.cat(x.chunk(2, -1)[::-1], -1),
    "rotated": lambda x, w: torch.cat((-x[..., 4:], x[..., :4]), -1),
    "rolled": lambda x, w: x.roll(1, 1),
    "broadcast": lambda x, w: x + w[0] * x[:1] - x[:, :1],
    "written in place": lambda x, w: x.clone().mul_(2).add_(w[0]).masked_fill_(x > 0, 1.0),
    "written through a view": lambda x, w: _through(x, w),
    "indexed": lambda x, w: x[:, torch.tensor([0, 2, 5])] * x[:, [1, 3, 0]],
    "gathered": lambda x, w: x.gather(-1, x.argsort(-1, descending=True)[..., :3]),
    "largest": lambda x, w: x.topk(2, -1).values + x.amax(-1, keepdim=True),
    "where": lambda x, w: torch.where(x > w[0], x, w[1]),
    "numbers of its own": lambda x, w: x * x.new_tensor([1.0, 2.0] * 4) + torch.zeros_like(x) + x.new_ones(8),
    "other types": lambda x, w: x.double().to(torch.bfloat16).float(),
    "without gradient": lambda x, w: x * x.detach().exp() * (x.shape[1] + len(x) + x.size(-1)),
    "one hot": lambda x, w: F.one_hot(x.argmax(-1), 8) * w[0],
    "attention": lambda x, w: F.scaled_dot_product_attention(x[:, None], x[:, None] @ w, x[:, None], is_causal=True),
    "cross entropy": lambda x, w: F.cross_entropy(x.flatten(0, 1), torch.arange(24) % 8),
    "convolution": lambda x, w: F.conv1d(x, w[:6, :6, None]),
    "a number read": lambda x, w: x * (x.detach().sum().item() if bool(x.detach().max() > -99) else 0),
    "a choice by value": lambda x, w: x * 2 if x.detach().abs().sum() > 1 else x,
    "branches of a sum": lambda x, w: (lambda y: y.exp() + y.sin() + y @ w)(x @ w),
    "twice relaid": lambda x, w: relayout(relayout(x, "a b/tp c") * 2, "a b c/tp") @ w,
    "marked whole, used in two ways": lambda x, w: (lambda y: y @ w + y * 2)(mark(x * 1, "a b c")),
}


def _through(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    y[:, :, 2:4].mul_(3)
    y.transpose(0, 2)[0].add_(1)
    return y * w[2]


FEW = ("sum of squares, by dim", "product with weights", "branches of a sum", "rotated", "norm and its sum")
LAYOUTS = ("a/tp b c", "a b/tp c", "a b c/tp", "a b c", "a b c sum:tp")
WEIGHTS = ("c d", "c/tp d", "c d/tp")


def run_functions(mistake: str) -> list[str]:
    """Every function on every layout beside one process: what it gives, and both gradients. What is not right.

    With a mistake only those whose ranks then still wait for each other.
    """
    wrong: list[str] = []
    x0 = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    w0 = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    held = eager(nn.Linear(2, 2), devices_of("tp=2"))
    if mistake:
        MISTAKES[mistake](held)
    for name in FEW if mistake else FUNCTIONS:
        function = FUNCTIONS[name]
        x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        want = _numbers(function(x, w))
        want.square().sum().backward()
        for lies in LAYOUTS:
            for weights in WEIGHTS if w.grad is not None else WEIGHTS[:1]:
                a, b = x0.clone().requires_grad_(), w0.clone().requires_grad_()
                try:
                    with held:
                        placed = relayout(a * 1, lies)
                        assert isinstance(placed, ShardedTensor)
                        assert str(layout_of(placed)) == layout_from_text(lies, (4, 6, 8))
                        own = relayout(_numbers(function(placed, relayout(b * 1, weights))), "n")
                        own.square().sum().backward()
                        found = held.session.full_tensor(own)
                except UserError as error:
                    wrong.append(f"{name}, {lies}, {weights}: {error}")
                    continue
                for what, ours, theirs in (("value", found, want), ("x", a.grad, x.grad), ("w", b.grad, w.grad)):
                    if theirs is None or ours is None:
                        same = theirs is None or not theirs.any()
                    else:
                        same = torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
                    if not same:
                        wrong.append(f"{name}, {lies}, {weights}: {what}")
    return wrong


def layout_from_text(text: str, shape: Sequence[int]) -> str:
    """As a session writes it: without names, with sizes."""
    sizes = iter(shape)
    return " ".join(f"_={next(sizes)}{word[1:]}" if ":" not in word else word for word in text.split())


def _numbers(found: Any) -> Tensor:
    """All that a function gives, in one row."""
    leaves = found if isinstance(found, list | tuple) else [found]
    return torch.cat([one.float().flatten() for one in leaves])
