"""Which parameters weight decay pulls at: those that multiply as matrices, and embeddings. By what a parameter is.

    a module's type   the weight of a linear map, a convolution or an embedding decays; nothing of a norm does
    its shape         a vector does not, with dims of size 1 around it either
    its neighbours    a bias of stacked maps does not: (experts out) beside (experts in out)
    its name          of what a module of its own has, as fall-back: biases, scans (A_log, D), sinks, scales

Shapes are those of whole parameters, so the groups are the same on any ranks. `optimiser.no_decay` adds names.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

from torch import nn
from transformers.pytorch_utils import Conv1D

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.models.outlines.costs import block_names
from tangram.schema.job import Job
from tangram.schema.optimiser import OptimiserPlan, RuleName
from tangram.schema.plan import matches
from tangram.training.data import tokens_of
from tangram.training.parallel.apply import freeze
from tangram.training.state.build_model import source_of

NO_MATRICES = (
    nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)  # fmt: skip
"""Modules whose `weight` is looked up in, or convolves."""
MATRICES = (nn.Linear, nn.Bilinear, Conv1D, *NO_MATRICES)
"""Those whose `weight` is multiplied as a matrix in some way."""
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)  # pyright: ignore[reportPrivateUsage]
"""Those of transformers are told by the names of their classes, which end in Norm."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "bias": ("*bias*",),
    "scan": ("A_log", "A", "D", "dt_bias", "time_decay", "time_first", "time_mix*", "time_maa*"),
    "sink": ("sinks", "*_sinks"),
    "scale": ("scale", "*_scale", "layer_scale*", "gamma", "beta", "lambda*"),
}
"""By the last part of the name of a parameter that a module of its own has."""
RULE_WORDS: Mapping[str, str] = {"muon": "Muon", "adamw": "AdamW"}
"""Of an optimiser with several rules."""
_SHOWN = 12


@dataclass(frozen=True)
class DecayGroup:
    """Parameters that decay or do not, for one reason."""

    why: str
    """Why they do not; "" of those that decay."""
    names: tuple[str, ...]
    """Folded: `*` for the numbers of layers."""
    tensors: int
    values: int


def why_not(
    model: nn.Module, plan: OptimiserPlan, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> dict[str, str]:
    """Of each parameter that is trained why it does not decay; "" where it does.

    `shapes`: of all of a parameter, where this rank has a part that does not say it.
    """
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            path, _, last = name.rpartition(".")
            why = _why_not(model.get_submodule(path), last, parameter, shapes.get(name) or tuple(parameter.shape))
            found[name] = why or ("optimiser.no_decay" if matches(plan.no_decay, name) else "")
    return found


def _why_not(module: nn.Module, name: str, parameter: nn.Parameter, shape: tuple[int, ...]) -> str:
    if isinstance(module, NORMS) or type(module).__name__.endswith("Norm"):
        return "norm"
    if isinstance(module, MATRICES):
        return "" if name == "weight" else "bias"
    if parameter.ndim > 1 and any(_is_bias_of(parameter, other) for other in module.parameters(recurse=False)):
        return "bias"
    named = (why for why, patterns in NAMES.items() if any(fnmatchcase(name, pattern) for pattern in patterns))
    return next(named, "vector" if sum(size > 1 for size in shape) < 2 else "")


def rules_of(
    model: nn.Module, plan: OptimiserPlan, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> dict[str, RuleName]:
    """Of each parameter that is trained how it is updated; `shapes` as above.

    Muon is for what multiplies as a matrix within layers, and not for what is added, scales, convolves or is looked up.
    """
    found: dict[str, RuleName] = {}
    layers = tuple(f"{name}." for name in block_names(model))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            path, _, last = name.rpartition(".")
            module, shape = model.get_submodule(path), shapes.get(name) or tuple(parameter.shape)
            matrix = not isinstance(module, NO_MATRICES) and not _why_not(module, last, parameter, shape)
            found[name] = plan.rule_of(name, shape, in_layer=matrix and name.startswith(layers))
    return found


def _is_bias_of(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether one is added to what stacked maps give: it has their first dims and their results, and no inputs."""
    shape, weights = tuple(one.shape), tuple(other.shape)
    return len(weights) == len(shape) + 1 and weights[:-2] == shape[:-1] and shape[-1] in weights[-2:]


def groups(model: nn.Module, plan: OptimiserPlan) -> list[DecayGroup]:
    """The groups of a model: those that decay first, then the others by reason."""
    return _grouped(model, why_not(model, plan))


def _grouped(model: nn.Module, whys: Mapping[str, str]) -> list[DecayGroup]:
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    found: list[DecayGroup] = []
    for why in sorted(set(whys.values())):
        names = [name for name, own in whys.items() if own == why]
        folded = tuple(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
        found.append(DecayGroup(why, folded, len(names), sum(sizes[name] for name in names)))
    return found


def rows(plan: Job) -> list[tuple[str, str]]:
    """What `tangram plan show` says of them, of rates of their own and of rules; of a model that cannot be built here,
    why."""
    optimiser = plan.optimiser
    try:
        model = build_on_meta(source_of(plan, tokens_of(plan)).config)
        freeze(model, plan)
    except UserError as error:
        return [("groups of parameters", f"which they are is not known here: {error}")]
    decay = f"weight decay {optimiser.weight_decay:g}"
    decays = {name: f"no weight decay: {why}" if why else decay for name, why in why_not(model, optimiser).items()}
    rates = {name: f"learning rate {optimiser.peak_lr(name):g}" for name in decays}
    rules = {name: f"by {RULE_WORDS[rule]}" for name, rule in rules_of(model, optimiser).items()}
    told = ((decays, optimiser.weight_decay), (rates, optimiser.lr_of), (rules, optimiser.name == "muon"))
    return [row for some, asked in told if asked for row in _rows(_grouped(model, some))]


def _rows(found: list[DecayGroup]) -> Iterator[tuple[str, str]]:
    for group in sorted(found, key=lambda group: group.why.startswith("no ")):
        more = f" and {len(group.names) - _SHOWN} more" if len(group.names) > _SHOWN else ""
        many = f"{group.tensors:,} tensor{'s' if group.tensors != 1 else ''} of {group.values:,} values"
        yield group.why, f"{many}: {', '.join(group.names[:_SHOWN])}{more}"
