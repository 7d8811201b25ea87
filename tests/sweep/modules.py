"""Every module of `torch.nn` as cases: with its default arguments, behind a product, samples or its weights cut."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tangram.sharding.derive.marking.marks import Mark
from tests.sweep.ranks import Case

IMAGE, LINE, VOLUME, ROWS, STEPS = (4, 8, 12, 12), (4, 8, 12), (4, 8, 6, 6, 6), (4, 8), (4, 6, 8)
"""Shapes of what they take: batch 4, 8 channels."""
_LABELS = torch.tensor([1, 0, 3, 2])
_SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])


def _conv(kind: Any) -> nn.Module:
    return kind(8, 8, 3)


def _channels(kind: Any) -> nn.Module:
    return kind(8)


def _window(kind: Any) -> nn.Module:
    return kind(2)


def _shape(number: int) -> tuple[int, ...]:
    return (LINE, IMAGE, VOLUME)[number - 1]


class Then(nn.Module):
    """A module before another one that takes more."""

    def __init__(self, first: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.first, self.module = first, module

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.module(self.first(x), *more)


class Itself(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.module(x, x, x)


def _named(x: Tensor) -> list[Tensor]:
    return [torch.sigmoid(x).flip(0)]


def _turned(x: Tensor) -> list[Tensor]:
    return [x.flip(0)]


_MORE: Mapping[str, Callable[[Tensor], Sequence[Tensor]]] = {
    **dict.fromkeys(("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "KLDivLoss", "PoissonNLLLoss"), _named),
    **dict.fromkeys(("BCEWithLogitsLoss", "MultiLabelSoftMarginLoss"), _named),
    **dict.fromkeys(("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"), lambda x: [_LABELS]),
    "NLLLoss2d": lambda x: [_LABELS[:, None, None].expand(4, 12, 12)],
    "SoftMarginLoss": lambda x: [x.flip(0).sign()],
    "HingeEmbeddingLoss": lambda x: [x.flip(0).sign()],
    "MultiLabelMarginLoss": lambda x: [torch.tensor([[0, 3, -1, 1, 0, 0, 0, 0]] * 4)],
    "CosineEmbeddingLoss": lambda x: [x.flip(0), _SIGNS],
    "MarginRankingLoss": lambda x: [x.flip(0), _SIGNS[:, None]],
    "TripletMarginLoss": lambda x: [x.flip(0), x.flip(1)],
    "TripletMarginWithDistanceLoss": lambda x: [x.flip(0), x.flip(1)],
    "GaussianNLLLoss": lambda x: [x.flip(0), torch.ones(4, 8)],
    **dict.fromkeys(("Bilinear", "CosineSimilarity", "PairwiseDistance", "Transformer", "TransformerDecoder"), _turned),
    "TransformerDecoderLayer": _turned,
    "BCELoss": _named,
    "AdaptiveLogSoftmaxWithLoss": lambda x: [torch.tensor([2, 7, 12, 19])],
    "LinearCrossEntropyLoss": lambda x: [_LABELS],
    "CTCLoss": lambda x: [torch.ones(6, 2, dtype=torch.long), torch.full((6,), 4), torch.full((6,), 2)],
}
"""What a module takes beside, from the numbers that it takes."""

OWN: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
        ROWS,
    ),
    "BCELoss": (lambda: Then(nn.Sigmoid(), nn.BCELoss()), ROWS),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 6), ROWS),
    "CTCLoss": (
        lambda: Then(nn.LogSoftmax(-1), nn.CTCLoss()),
        STEPS,
    ),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), IMAGE),
    "ConstantPad1d": (lambda: nn.ConstantPad1d(1, 0.5), LINE),
    "ConstantPad2d": (lambda: nn.ConstantPad2d(1, 0.5), IMAGE),
    "ConstantPad3d": (lambda: nn.ConstantPad3d(1, 0.5), VOLUME),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(), ROWS),
    "CrossMapLRN2d": (lambda: nn.CrossMapLRN2d(2), IMAGE),
    "Embedding": (lambda: nn.Sequential(Whole(8), nn.Embedding(8, 16)), ROWS),
    "EmbeddingBag": (lambda: nn.Sequential(Whole(8), nn.EmbeddingBag(8, 16)), ROWS),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, IMAGE),
    "Flatten": (nn.Flatten, IMAGE),
    "Fold": (lambda: nn.Fold(output_size=(4, 5), kernel_size=(2, 2)), (4, 8, 12)),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, output_size=5), IMAGE),
    "FractionalMaxPool3d": (lambda: nn.FractionalMaxPool3d(2, output_size=3), VOLUME),
    "GLU": (nn.GLU, ROWS),
    "GRU": (lambda: nn.GRU(8, 8), STEPS),
    "GRUCell": (lambda: nn.GRUCell(8, 8), ROWS),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), IMAGE),
    "LSTM": (lambda: nn.LSTM(8, 8), STEPS),
    "LSTMCell": (lambda: nn.LSTMCell(8, 8), ROWS),
    "LayerNorm": (lambda: nn.LayerNorm(8), STEPS),
    "LazyLinear": (lambda: nn.LazyLinear(8), ROWS),
    "Linear": (lambda: nn.Linear(8, 8), STEPS),
    "LinearCrossEntropyLoss": (lambda: nn.LinearCrossEntropyLoss(8, 6), ROWS),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), IMAGE),
    "MaxUnpool1d": (lambda: Unpooled(nn.MaxPool1d, nn.MaxUnpool1d), LINE),
    "MaxUnpool2d": (lambda: Unpooled(nn.MaxPool2d, nn.MaxUnpool2d), IMAGE),
    "MaxUnpool3d": (lambda: Unpooled(nn.MaxPool3d, nn.MaxUnpool3d), VOLUME),
    "ModuleDict": (lambda: Held(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Tanh()})), ROWS),
    "ModuleList": (lambda: Held(nn.ModuleList([nn.Linear(8, 8), nn.Tanh()])), ROWS),
    "MultiheadAttention": (Itself, STEPS),
    "PairwiseDistance": (lambda: nn.PairwiseDistance(), ROWS),
    "ParameterDict": (lambda: Held(nn.ParameterDict({"a": torch.ones(8)})), ROWS),
    "ParameterList": (lambda: Held(nn.ParameterList([torch.ones(8), torch.ones(8)])), ROWS),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), IMAGE),
    "RMSNorm": (lambda: nn.RMSNorm(8), STEPS),
    "RNN": (lambda: nn.RNN(8, 8), STEPS),
    "RNNCell": (lambda: nn.RNNCell(8, 8), ROWS),
    "Sequential": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)), ROWS),
    "Threshold": (lambda: nn.Threshold(0.1, 0.2), ROWS),
    "Transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16),
        STEPS,
    ),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2),
        STEPS,
    ),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(8, 2, 16), STEPS),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), STEPS),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), STEPS),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 4)), ROWS),
    "Unfold": (lambda: nn.Unfold(3), IMAGE),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
    "UpsamplingNearest2d": (lambda: nn.UpsamplingNearest2d(scale_factor=2), IMAGE),
    "ZeroPad1d": (lambda: nn.ZeroPad1d(1), LINE),
}
"""Those that take more than others of their kind."""

ABSTRACT = frozenset({"Container", "Module", "RNNBase", "RNNCellBase", "DataParallel"})
"""Bases of others, and what is of several accelerators."""


class Whole(nn.Module):
    """Numbers as indices below a bound, by their size."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, x: Tensor) -> Tensor:
        return (x.detach().abs() * 3).long() % self.bound


class Unpooled(nn.Module):
    """A pool, and what undoes it."""

    def __init__(self, pool: Any, back: Any) -> None:
        super().__init__()
        self.pool, self.module = pool(2, return_indices=True), back(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(*self.pool(x))


class Held(nn.Module):
    """What holds modules or parameters, used in their order."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        for one in self.module.values() if hasattr(self.module, "values") else self.module:
            x = one(x) if callable(one) else x * one
        return x


class Scale(nn.Module):
    """A product with a weight: so that what it gives can be marked, and has a gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Behind(nn.Module):
    """The module that is looked at, between two products: what is marked is no result, where it changes nothing."""

    def __init__(self, module: nn.Module, size: int) -> None:
        super().__init__()
        self.before, self.module = Scale(size), module

    def forward(self, x: Tensor, one: Any = None, two: Any = None, three: Any = None) -> Any:
        more = [x for x in (one, two, three) if x is not None]
        return tree_map(lambda found: 2 * found, self.module(self.before(x), *more))


def names() -> list[str]:
    """Every class of `torch.nn`."""
    found = {name for name, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    return sorted(found - ABSTRACT)


def made(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """The module, and the shape of what it takes."""
    torch.manual_seed(0)
    kind: Any = getattr(nn, name)
    number = int(name[-2]) if name[-1] == "d" and name[-2].isdigit() else 0
    if name in OWN:
        make, shape = OWN[name]
        return make(), shape
    if name in _MORE:
        return kind(), IMAGE if name == "NLLLoss2d" else ROWS
    if "Conv" in name:
        return (kind(8, 3) if "Lazy" in name else _conv(kind)), _shape(number)
    if "Norm" in name:
        return (kind() if "Lazy" in name else _channels(kind)), ROWS if name == "SyncBatchNorm" else _shape(number)
    if "Pool" in name or "Pad" in name:
        return (kind(2, 3) if name.startswith("LP") else _window(kind)), _shape(number)
    return kind(), _shape(number) if number else ROWS


def _model(name: str) -> nn.Module:
    module, shape = made(name)
    model = Behind(module, shape[-1])
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        with torch.no_grad():
            model(torch.randn(shape))
    return model


def _inputs(name: str, _: nn.Module) -> Mapping[str, Any]:
    x = torch.randn(made(name)[1], generator=torch.Generator().manual_seed(1))
    more = _MORE[name](x) if name in _MORE else ()
    return {"x": x, **dict(zip(("one", "two", "three"), more, strict=False))}


def _samples(_: nn.Module, __: Mapping[str, Any]) -> list[Mark]:
    return [Mark.parse("before: b/tp ...")]


def _weights(model: nn.Module, _: Mapping[str, Any]) -> list[Mark]:
    return [Mark.parse(f"{cut_weight(model)}: o/tp ...")]


def cut_weight(model: nn.Module) -> str | None:
    """The first weight of a module that can be cut in two."""
    own = cast("Any", model).module.named_parameters()
    return next((f"module.{name}" for name, p in own if p.ndim and not len(p) % 2), None)


def cases(some: Sequence[str]) -> list[Case]:
    """Of these classes: samples cut, and where there is a weight, that."""
    found: list[Case] = []
    for name in some:
        model, inputs = partial(_model, name), partial(_inputs, name)
        found.append(Case(name, model, inputs, _samples))
        if cut_weight(model()):
            found.append(Case(f"{name}, weights cut", model, inputs, _weights))
    return found
