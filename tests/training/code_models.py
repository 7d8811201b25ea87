"""Small models of a few lines of code each, run as derived on ranks beside one process: values and every gradient."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.sharding.derive.marking.marks import Mark
from tangram.training.mesh.tensor_parallel import DerivedModel, parallel
from tangram.training.run.launch import Rank


class Code(nn.Module):
    """Parameters of some shapes, other modules, and a function of the module and its input."""

    def __init__(
        self,
        code: Callable[[Any, Tensor], Any],
        shapes: Mapping[str, tuple[int, ...]],
        modules: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self.code = code
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.3 * torch.randn(shape, generator=generator)))
        self.register_buffer("table", torch.randn(8, 8, generator=generator))
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


@dataclass(frozen=True)
class Small:
    """A model, what it is given, and its marks."""

    code: Callable[[Any, Tensor], Any]
    marks: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    input: tuple[int, ...] = (8, 8)
    modules: Callable[[], Mapping[str, nn.Module]] = dict[str, nn.Module]
    mesh: str = "tp"
    """Its axes; all but the first have 2 ranks, which has the others."""
    integers: int = 0
    """Not 0: what it is given are numbers below."""


@dataclass(frozen=True)
class Off:
    """How far a run on ranks is off one process, relative to the largest number; or why there was none."""

    values: float = 0.0
    gradients: float = 0.0
    refused: str = ""


def run_all(rank: Rank, table: str, spoil: Callable[[DerivedModel], None] | None = None) -> dict[str, Off]:
    """The task of the ranks: the models of a table. `spoil` plants a mistake."""
    return {name: _run(work, rank.world, spoil) for name, work in TABLES[table].items()}


def model_of(work: Small) -> tuple[Code, Tensor]:
    """A model, the same on each rank, and what it is given."""
    torch.manual_seed(0)
    model = Code(work.code, work.shapes, work.modules())
    generator = torch.Generator().manual_seed(1)
    given = torch.randint(work.integers, work.input, generator=generator) if work.integers else None
    return model, torch.randn(work.input, generator=generator) if given is None else given


def mesh_of(work: Small, world: int) -> Mesh:
    first, *others = work.mesh.split()
    return Mesh.parse(" ".join([f"{first}={world // 2 ** len(others)}", *(f"{axis}=2" for axis in others)]))


def _run(work: Small, world: int, spoil: Callable[[DerivedModel], None] | None) -> Off:
    model, x = model_of(work)
    whole, axes = deepcopy(model), {name: n for name, (n, _) in mesh_of(work, world).axes.items()}
    devices = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    try:
        held = parallel(model, [Mark.parse(mark) for mark in work.marks], devices, {"x": x})
        held.prepare({"x": x})
    except UserError as error:
        return Off(refused=str(error))
    if spoil is not None:
        spoil(held)
    results, wanted = (_tensors(one(x)) for one in (model, whole))
    _weighed(results).backward()
    _weighed(wanted).backward()
    own, other = (dict(one.named_parameters()) for one in (model, whole))
    assert any(p.grad is not None and bool(p.grad.any()) for p in other.values()), "no gradient is compared"
    left = [_apart(_whole(own[name]), p) for name, p in other.items()]  # a forward may write into them
    gradients = [_apart(_whole(own[name].grad), p.grad) for name, p in other.items()]
    return Off(max([*left, *map(_apart, results, wanted)]), max(gradients, default=0.0))


def _whole(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _apart(x: Tensor | None, want: Tensor | None) -> float:
    if x is None or want is None:
        return 0.0 if x is want else float("inf")
    if x.shape != want.shape:
        return float("inf")
    return float((x.detach() - want.detach()).abs().max() / want.detach().abs().max().clamp(min=1e-9))


def _tensors(found: Any) -> Sequence[Tensor]:
    leaves: list[Any] = tree_leaves(found)
    return [x for x in leaves if isinstance(x, Tensor)]


def _weighed(results: Sequence[Tensor]) -> Tensor:
    """A loss that no two elements of a result go into alike."""
    floats = [x for x in results if x.requires_grad]
    weights = [torch.sin(torch.arange(x.numel(), dtype=x.dtype) + i + 1).view(x.shape) for i, x in enumerate(floats)]
    return torch.stack([(x * w).sum() for x, w in zip(floats, weights, strict=True)]).sum()


# ------------------------------------------------------------ tensors that no function of torch gives


def by_capacity(model: Any, x_TH: Tensor) -> Tensor:
    """A mixture whose experts take as many tokens as they have room for: by one-hot and cumsum."""
    experts, room = model.w.shape[0], 4
    p_TE = (x_TH @ model.router).softmax(-1)
    best_TKE = F.one_hot(p_TE.topk(2, -1).indices, experts)
    place_TKE = best_TKE.flatten(0, 1).cumsum(0).view(best_TKE.shape) - 1
    kept_TKE = (best_TKE * (place_TKE < room)).to(x_TH.dtype)
    slot_TEC = (kept_TKE[..., None] * F.one_hot(place_TKE.clamp(0, room - 1), room)).sum(1)
    x_ECH = torch.einsum("tec,th->ech", slot_TEC, x_TH)
    y_ECH = torch.bmm(torch.relu(torch.bmm(x_ECH, model.w)), model.v)
    return torch.einsum("tec,ech->th", slot_TEC * p_TE[..., None], y_ECH).T.contiguous().T


def _into_view(model: Any, x: Tensor) -> Tensor:
    y = x @ model.w.T
    y.T.add_(1)
    return y * 2


def _clamped(model: Any, x: Tensor) -> Tensor:
    """As Gemma 3n, in training."""
    model.w.data.clamp_(-0.2, 0.2)
    return x @ model.w.T


def _clamped_by_rows(model: Any, x: Tensor) -> Tensor:
    """What has the gradient of a weight is used after the write: each rank's rows make a part of it."""
    x = model.mid(x)
    model.w.data.clamp_(-0.2, 0.2)
    return torch.tanh(x @ model.w.T)


class _Gate(nn.Module):
    """Whose forward code calls as a method, so that no hook of the module's runs; as AltUp of Gemma 3n."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.cumsum(0) * self.scale)

    def gated(self, x: Tensor) -> Tensor:
        return self.forward(x)


COLUMN, ROW, SQUARE = ("w: o/tp i",), ("w: o i/tp",), {"w": (8, 8)}
EXPERTS = {"router": (8, 4), "w": (4, 8, 16), "v": (4, 16, 8)}
ATTRIBUTES: Mapping[str, Small] = {
    "a Gram matrix": Small(lambda m, x: (x.T @ x) @ m.w.T, COLUMN, SQUARE),
    "a Gram matrix, summed": Small(lambda m, x: (x.T @ x) @ m.w.T, ROW, SQUARE),
    "mT": Small(lambda m, x: x.view(4, 2, 8).mT.reshape(8, 8) @ m.w.mT, COLUMN, SQUARE),
    "H": Small(lambda m, x: torch.tanh((m.w @ x.H).H), ROW, SQUARE),
    "imag": Small(lambda m, x: cast(Any, torch).fft.fft(x @ m.w.T).imag, COLUMN, SQUARE),
    "real": Small(lambda m, x: torch.view_as_complex((x @ m.w.T).view(8, 4, 2)).real, COLUMN, SQUARE),
    "data": Small(lambda m, x: torch.tanh((x @ m.w.T).data) * (x @ m.w.T), ROW, SQUARE),
    "a buffer": Small(lambda m, x: x @ m.w.T @ m.table.T, COLUMN, SQUARE),
    "a constant": Small(lambda m, x: x @ m.w.T * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]), COLUMN, SQUARE),
    "a result": Small(lambda m, x: (x.T, (x @ m.w.T).T), COLUMN, SQUARE),
    "both ways": Small(lambda m, x: (x @ m.w.T) * x.T, COLUMN, SQUARE),
    "written into": Small(_into_view, COLUMN, SQUARE),
    "a weight that is clamped": Small(_clamped, COLUMN, SQUARE),
    "a weight that is clamped, summed": Small(_clamped, ROW, SQUARE),
    "a weight that is clamped, by rows": Small(
        _clamped_by_rows, ("mid: b/tp h",), SQUARE, modules=lambda: {"mid": nn.Linear(8, 8)}
    ),
    "a forward that is called as a method": Small(
        lambda m, x: m.gate.gated(m.mid(x)), ("mid: b/tp h",), {"w": (1,)},
        modules=lambda: {"mid": nn.Linear(8, 8), "gate": _Gate()},
    ),
    "a softmax": Small(lambda m, x: (x @ m.w.T).T.log_softmax(0).T, COLUMN, SQUARE),
    "an unused parameter": Small(lambda m, x: x @ m.w.T, ("{w,v}: o/tp i",), {**SQUARE, "v": (8, 8)}),
    "capacity, experts": Small(by_capacity, ("w: e/tp h f", "v: e/tp f h"), EXPERTS),
    "capacity, hidden": Small(by_capacity, ("w: e h f/tp", "v: e f/tp h"), EXPERTS),
}  # fmt: skip
# ------------------------------------------------------------ public reports


def _scattered(m: Any, x: Tensor) -> Tensor:
    """Rows added up where numbers say, of which several are alike."""
    at = (x[:, 0].abs() * 3).long().clamp(max=3)
    return torch.zeros(4, 8).index_add(0, at, torch.tanh(m.mid(x) @ m.w.T))


def _mid() -> dict[str, nn.Module]:
    return {"mid": nn.Linear(8, 8)}


_ROWS = "mid: b/tp h"


def _routed(m: Any, x: Tensor) -> Tensor:
    """Every token by its two best experts, weighted by their scores."""
    scores, chosen = torch.softmax(x @ m.router.T, -1).topk(2, -1)
    weights = torch.zeros(len(x), 4).scatter(1, chosen, scores)
    found = torch.einsum("eio,beo->bei", m.down, torch.einsum("eoi,bi->beo", m.experts, x).relu())
    return (found * weights[:, :, None]).sum(1)


def _attentions(m: Any, x: Tensor) -> Tensor:
    """Two attentions, of which the first is frozen."""

    def attend(x: Tensor, qkv: nn.Linear) -> Tensor:
        q, k, v = qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)

    return m.out(x + attend(x + attend(x, m.first), m.second))


def _first_frozen() -> dict[str, nn.Module]:
    return {"first": nn.Linear(16, 48).requires_grad_(False), "second": nn.Linear(16, 48), "out": nn.Linear(16, 16)}


def _penalty(m: Any, x: Tensor) -> Tensor:
    """What a convolution gives, and the square of its gradient by what it takes."""
    x = m.mid(x)
    y = m.conv(x[:, None]).tanh()
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.flatten(1).sum(1) + gradient.square().sum(1)


def _next_word(m: Any, x: Tensor) -> Tensor:
    """The loss of a vocabulary of 13."""
    return F.cross_entropy(F.linear(torch.tanh(m.words(x)), m.words.weight).flatten(0, 1), x.flatten())


PUBLIC: Mapping[str, Small] = {
    "pytorch#134050, heads": Small(
        _attentions, ("{first,second}.weight: (3 h/tp 4) i", "out.weight: o i/tp"), {"w": (1,)}, (2, 6, 16),
        _first_frozen,
    ),
    "pytorch#134050, samples": Small(_attentions, ("first: b/tp s h",), {"w": (1,)}, (2, 6, 16), _first_frozen),
    "pytorch#159959": Small(
        _penalty, ("mid: b/tp h",), {"w": (1,)}, (4, 8), lambda: {**_mid(), "conv": nn.Conv1d(1, 1, 3)}
    ),
    "physicsnemo#1944": Small(
        lambda m, x: torch.linalg.cross(m.mid(x).view(-1, 8, 3), m.v), ("mid: b/tp h",), {"w": (1,), "v": (1, 1, 3)},
        (6, 8), lambda: {"mid": nn.Linear(8, 24)},
    ),
    "physicsnemo#1944, all sizes": Small(
        lambda m, x: torch.linalg.cross(m.mid(x).view(-1, 8, 3), m.v), ("mid: b/tp h",), {"w": (1,), "v": (6, 8, 3)},
        (6, 8), lambda: {"mid": nn.Linear(8, 24)},
    ),
    "Megatron-LM#1754": Small(
        _next_word, ("words.weight: v/tp h",), {"w": (1,)}, (4, 6), lambda: {"words": nn.Embedding(13, 8)}, integers=13
    ),
    "jax#21403": Small(lambda m, x: m.mid(x).cumsum(0) @ m.w.T, (_ROWS,), SQUARE, modules=_mid),
    "jax#39301": Small(lambda m, x: torch.roll(m.mid(x), 3, 0) @ m.w.T, (_ROWS,), SQUARE, (2, 8), _mid),
    "jax#24576": Small(lambda m, x: torch.cat([m.mid(x), m.mid(x[:4])]) @ m.w.T, ("w: o i/tp", _ROWS), SQUARE,
                       modules=_mid),
    "xla#42481": Small(_scattered, (_ROWS,), SQUARE, modules=_mid),
    "tt-mlir#8623": Small(lambda m, x: (x @ m.w.T).gather(1, (x @ m.w.T).argmax(1, keepdim=True)), COLUMN, SQUARE),
    "pytorch#191926": Small(
        lambda m, x: m.conv(m.mid(x)), ("mid: b c h w/tp",), {"w": (1,)}, (2, 3, 8, 8),
        lambda: {**_mid(), "conv": nn.Conv2d(3, 4, 4, stride=4)},
    ),
    "torchtitan#4332": Small(
        lambda m, x: torch.tanh(m.down(torch.tanh(m.up(x)))), ("up.weight: o/tp i", "down.weight: o i/tp"), {"w": (1,)},
        modules=lambda: {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)},
    ),
    "pytorch#144359": Small(
        lambda m, x: m.down(F.gelu(m.up(x), approximate="tanh")), ("up.weight: o/tp i", "down.weight: o i/tp"),
        {"w": (1,)}, modules=lambda: {"up": nn.Linear(8, 32), "down": nn.Linear(32, 8)},
    ),
    "pytorch#179502": Small(lambda m, x: m.mid(x).view(16, 6).sin(), ("mid: b h/tp",), {"w": (1,)}, (12, 8), _mid),
    "pytorch#170934": Small(
        lambda m, x: torch.zeros(16).index_put((torch.arange(16),), torch.tanh(m.mid(x)).sum(1)), ("mid: b/tp h",),
        {"w": (1,)}, (16, 8), _mid,
    ),
    "pytorch#159856": Small(lambda m, x: torch.linalg.vector_norm(x @ m.w.T, dim=1), ("w: o i/tp",), SQUARE),
    "pytorch#133499": Small(
        lambda m, x: F.layer_norm(m.mid(x), (8,), m.v) @ m.w.T, ("w: o/tp i",), {**SQUARE, "v": (8,)}, modules=_mid,
    ),
    "pytorch#141335": Small(lambda m, x: m.mid(x), ("mid.weight: o i/tp",), {"w": (1,)}, (9, 7),
                            lambda: {"mid": nn.Linear(7, 10)}),
    "pytorch#143372": Small(lambda m, x: torch.tanh(m.mid(x)).view(-1), ("mid: b/tp h",), {"w": (1,)}, (5, 8), _mid),
    "pytorch#190746": Small(
        lambda m, x: F.log_softmax(x @ m.w.T, -1).square() + F.log_softmax(x @ m.w.T, -1), ("w: o/tp i",), SQUARE
    ),
    "pytorch#160285": Small(_routed, ("experts: e/tp o i", "down: e/tp i o"),
                            {"router": (4, 8), "experts": (4, 16, 8), "down": (4, 8, 16)}),
    "torchtitan#1805": Small(_routed, ("experts: e o/tp i", "down: e i o/tp"),
                             {"router": (4, 8), "experts": (4, 16, 8), "down": (4, 8, 16)}),
    "torchtitan#4637": Small(
        lambda m, x: m.words(x) @ m.w.T, ("words.weight: v/tp h",), SQUARE, (4, 6),
        lambda: {"words": nn.Embedding(16, 8, padding_idx=3)}, integers=16,
    ),
    "torchtitan#4637, the other rank": Small(
        lambda m, x: m.words(x) @ m.w.T, ("words.weight: v/tp h",), SQUARE, (4, 6),
        lambda: {"words": nn.Embedding(16, 8, padding_idx=12)}, integers=16,
    ),
    "Megatron-LM#7452, smoothed labels": Small(
        lambda m, x: F.cross_entropy(
            x @ m.w.T, torch.arange(len(x)) % 5, torch.linspace(0.5, 1, 8), label_smoothing=0.1
        ),
        ("w: v/tp i",), SQUARE,
    ),
    "Megatron-LM#7452, one norm of all heads": Small(
        lambda m, x: m.norm(m.mid(x).unflatten(-1, (4, 4))).tanh().flatten(1), ("mid.weight: (heads/tp 4) i",),
        {"w": (1,)}, modules=lambda: {"mid": nn.Linear(8, 16), "norm": nn.RMSNorm(4)},
    ),
    "nano-vllm#99": Small(lambda m, x: m.mid(x), ("mid.weight: o i/tp",), {"w": (1,)}, modules=_mid),
}  # fmt: skip


TABLES = {"attributes": ATTRIBUTES, "public": PUBLIC}
