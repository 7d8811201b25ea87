"""Low-rank adapters put into a model, as peft makes them: frozen weights, and beside them what is trained.

The modules are peft's own, so that what is computed and what is saved is what peft computes and saves. Here is what it
does not do: targets that name nothing are refused, values begin alike at any layout, and where they came from is known.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType, NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tangram.errors import UserError
from tangram.models.lora import expert_adapters

ALL = "all-linear"
_ADAPTED = (nn.Linear, nn.Embedding, Conv1D)


@dataclass(frozen=True)
class Adapters:
    """Which layers have adapters, and of what kind. Names are ends of names or patterns (`named_by`); of patterns of
    ranks and alphas the first that fits counts, as in peft."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: str | Sequence[str] = ALL
    exclude: Sequence[str] = ()
    layers: Sequence[int] = ()
    """Numbers of layers; none: all."""
    ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    alphas: Mapping[str, float] = field(default_factory=dict[str, float])
    rslora: bool = False
    dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    init: str = "kaiming"
    modules_to_save: Sequence[str] = ()
    trainable_token_indices: Sequence[int] = ()
    """Of which the rows of the embeddings are trained."""

    def rank_of(self, name: str) -> int:
        """The rank beside a layer, or a weight of experts."""
        return next((rank for pattern, rank in self.ranks.items() if _fits(name, pattern)), self.rank)

    def scale_of(self, name: str) -> float:
        """By what B A is multiplied there."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _fits(name, pattern)), self.alpha)
        return alpha / (math.sqrt(self.rank_of(name)) if self.rslora else self.rank_of(name))

    def kept_from(self, names: Iterable[str], excluded: set[str]) -> list[str]:
        """Of names those that are in some of the layers, and not in what is excluded. Raises UserError for none."""
        found = [name for name in names if not any(f"{name}.".startswith(f"{one}.") for one in excluded)]
        numbers = {name: int(number[1]) for name in found if (number := re.search(r"\.(\d+)\.", name))}
        if self.layers and (unknown := sorted({*self.layers} - {*numbers.values()})):
            raise UserError(
                f"lora.layers names {unknown[0]}, and the layers that lora.targets names are "
                f"{', '.join(map(str, sorted({*numbers.values()}))) or 'in none that is numbered'}"
            )
        return [name for name in found if not self.layers or numbers.get(name) in self.layers]


def add_adapters(model: nn.Module, own: Adapters) -> None:
    """Put adapters without values beside the layers that `own.targets` names, in place, and freeze all else.

    A model that has some already stays as it is. Raises UserError for targets that name no layer, and without peft.
    """
    if getattr(model, "peft_config", None) is not None:
        return
    peft = peft_module()
    names = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
    stacked = list(expert_adapters.stacked_weights(model))
    some = (own.targets,) if isinstance(own.targets, str) else tuple(own.targets)
    adapted, experts = (_all_linear(model, names), stacked) if some == (ALL,) else _named(some, names, stacked)
    excluded = {name for one in own.exclude for name in named_by(one, "exclude", {**names, **dict.fromkeys(stacked)})}
    if left := {*own.kept_from([*adapted, *experts], excluded)} if own.exclude or own.layers else {*adapted, *experts}:
        adapted, experts = ([name for name in some if name in left] for some in (adapted, experts))
    else:
        raise UserError("lora.exclude and lora.layers leave no layer of lora.targets: change one of them")
    saved = [name for one in own.modules_to_save for name in named_by(one, "modules_to_save", names)]
    _refuse_unfit(own, adapted, experts, names)
    if both := set(adapted) & set(saved):
        raise UserError(f"{min(both)} is in lora.targets and in lora.modules_to_save: give it in one of them")
    _refuse_tied(model, {*adapted, *saved}, names)
    if own.trainable_token_indices:
        _refuse_rows(own.trainable_token_indices, model, {*adapted, *saved})
    everywhere = some == (ALL,) and not stacked and len(adapted) == len(_linear(model, names))
    config = peft.LoraConfig(
        r=own.rank, lora_alpha=own.alpha, lora_dropout=own.dropout, use_rslora=own.rslora, use_dora=own.dora,
        lora_bias=own.lora_bias, bias=own.bias, task_type="CAUSAL_LM",
        init_lora_weights=True if own.init == "kaiming" else own.init,
        rank_pattern=_as_regex(own.ranks), alpha_pattern=_as_regex(own.alphas),
        target_modules=ALL if everywhere else sorted(set(adapted)),
        modules_to_save=sorted(set(saved)) or None, trainable_token_indices=[*own.trainable_token_indices] or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in names.values()),
    )  # fmt: skip
    if adapted or saved or own.trainable_token_indices or not experts:
        try:
            peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
        except ValueError as error:
            _refuse_experts(config, stacked)
            raise UserError(
                f"peft puts no adapters into a {type(model).__name__}: {' '.join(str(error).split())}"
            ) from None
        _refuse_experts(config, stacked)
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(own.bias == "all" and name.endswith(".bias"))
        cast(Any, model).peft_config = {"default": config}
    for module in model.modules():
        if hasattr(module, "trainable_tokens_original"):  # rows as they were, for who takes them out again
            cast(Any, module).trainable_tokens_original.clear()
    config.target_parameters = sorted(experts) or None
    expert_adapters.adapt(model, {name: (own.rank_of(name), own.scale_of(name)) for name in experts})


def _refuse_unfit(
    own: Adapters, adapted: Sequence[str], experts: Sequence[str], names: Mapping[str, nn.Module]
) -> None:
    """What peft knows no adapters of."""
    for key in ("dropout", "dora", "lora_bias"):
        if experts and getattr(own, key):
            raise UserError(
                f"{experts[0]} has all experts of a layer, beside which peft knows no lora.{key}: leave one of the two "
                "out"
            )
    if own.dora and (tables := [name for name in adapted if isinstance(names[name], nn.Embedding)]):
        raise UserError(
            f"lora.dora trains lengths of the weights of linear layers, and {tables[0]} is an embedding: leave one of "
            "the two out, or name it in lora.modules_to_save"
        )
    if own.lora_bias and (bare := [name for name in adapted if getattr(names[name], "bias", None) is None]):
        raise UserError(
            f"lora.lora_bias is added to the biases of layers, and {bare[0]} has none: leave it out, or name it in "
            "lora.exclude"
        )
    for key, patterns in (("ranks", own.ranks), ("alphas", own.alphas)):
        for pattern in patterns:
            named_by(pattern, key, dict.fromkeys([*adapted, *experts]))


def _refuse_rows(tokens: Sequence[int], model: nn.Module, others: set[str]) -> None:
    """Raise UserError for rows that the embeddings have not, and where these are trained otherwise."""
    table: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(table, nn.Embedding):
        raise UserError(f"lora.trainable_token_indices names rows of embeddings, and a {type(model).__name__} has none")
    if max(tokens) >= table.num_embeddings or len({*tokens}) < len(tokens):
        raise UserError(
            f"lora.trainable_token_indices has {max(tokens)}, and there are {table.num_embeddings} tokens: "
            "give each once, from 0"
        )
    if both := [name for name in others if name and model.get_submodule(name) is table]:
        raise UserError(
            f"{both[0]} has adapters or is trained whole, and lora.trainable_token_indices trains rows of it: take one"
        )


def _as_regex(patterns: Mapping[str, Any]) -> dict[str, Any]:
    """As peft has patterns: regular expressions of the end of a name."""
    marks = {"*": ".*", "?": ".", ".": r"\.", "[!": "[^"}
    return {re.sub(r"\[!|[*?.]", lambda one: marks[one[0]], key): value for key, value in patterns.items()}


def initial_adapters(
    model: nn.Module, seed: int, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> Iterator[tuple[str, Tensor]]:
    """The values with which adapters begin, whole and by name: the model gives with them what it gave before.

    `shapes`: of whole parameters, where those in the model are plain tensors of a rank's part.

    As in peft one of two factors is drawn, each by the seed and its own name, and the other is 0. Magnitudes of DoRA
    are not among them: they are lengths of weights.
    """
    normal = cast(Any, model).peft_config["default"].init_lora_weights == "gaussian"
    of_experts = {factor.name: factor for factor in expert_adapters.factors_of(model)}
    for name, parameter in model.named_parameters():
        shape, generator = shapes.get(name, tuple(parameter.shape)), torch.Generator().manual_seed(_stream(seed, name))
        factor = of_experts.get(name)
        if ".lora_A." in name or (factor is not None and factor.is_a):
            turned = factor is not None and factor.turned
            if normal:
                yield name, torch.empty(shape).normal_(std=1 / shape[-1 if turned else -2], generator=generator)
            else:
                bound = 1 / math.sqrt(shape[-2 if turned else -1])  # kaiming_uniform_ with a = sqrt(5)
                yield name, torch.empty(shape).uniform_(-bound, bound, generator=generator)
        elif ".lora_embedding_B." in name:
            yield name, torch.empty(shape).normal_(generator=generator)
        elif ".lora_B." in name or ".lora_embedding_A." in name or factor is not None:
            yield name, torch.zeros(shape)


def adapted_layers(model: nn.Module) -> tuple[list[str], list[str]]:
    """Of a model with adapters the layers that have some, and the linear ones and experts that have none: ends of
    names."""
    beside: dict[str, bool] = {}
    for name, module in cast("Iterator[tuple[str, Any]]", model.named_modules()):
        end = ".".join(name.split(".")[-2:])
        if ".modules_to_save." in name or name.endswith(".original_module"):  # trained whole, and what that stands for
            continue
        if isinstance(module, expert_adapters.AdaptedExperts):
            beside |= {f"{name.rpartition('.')[2]}.{weight}": True for weight in module.lora_left}
        elif hasattr(module, "lora_A"):
            beside[end] = True
        elif isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name and not name.endswith(".base_layer"):
            beside.setdefault(end, False)
    for name in expert_adapters.stacked_weights(model):
        beside.setdefault(".".join(name.replace(".base_layer.", ".").split(".")[-2:]), False)
    return [name for name, has in beside.items() if has], [name for name, has in beside.items() if not has]


def _linear(model: nn.Module, names: Mapping[str, nn.Module]) -> list[str]:
    """The linear layers but the head."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return [name for name, one in names.items() if isinstance(one, nn.Linear | Conv1D) and one is not head]


def _all_linear(model: nn.Module, names: Mapping[str, nn.Module]) -> list[str]:
    """The linear layers but the head, so far as peft can load adapters of them: names that layers of experts had before
    they lay in one tensor it takes for that tensor, those of dense layers and shared experts, too; and it refuses
    layers of scans whose weights kernels read."""
    from peft.tuners import tuners_utils as tuners
    from peft.utils import transformers_weight_conversion as weights

    config = peft_module().LoraConfig(target_modules=[name for name in _linear(model, names) if name != "lm_head"])
    if hasattr(model, "config"):
        conversions = weights.get_model_conversion_mapping(cast(Any, model))
        weights.convert_peft_config_for_transformers(config, model, conversions)

    def fits(name: str) -> bool:
        try:
            tuners._check_lora_target_modules_mamba(config, model, name.rpartition(".")[2])  # pyright: ignore[reportPrivateUsage]
        except ValueError:
            return False
        return True

    return sorted(filter(fits, config.target_modules))


def _named(
    targets: Sequence[str], names: Mapping[str, nn.Module], stacked: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The layers, and the weights of experts, that targets name. Raises UserError for modules of another kind."""
    fitting: dict[str, object] = {**names, **dict.fromkeys(stacked)}
    found = dict.fromkeys(name for target in targets for name in named_by(target, "targets", fitting))
    layers = [name for name in found if name in names]
    if unfit := [name for name in layers if not isinstance(names[name], _ADAPTED)]:
        kind = type(names[unfit[0]]).__name__
        raise UserError(
            f"lora.targets names {unfit[0]}, a {kind}: adapters stand beside linear layers and embeddings; a module of "
            "another kind can be trained whole by lora.modules_to_save"
        )
    return layers, [name for name in found if name not in names]


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


def named_by(pattern: str, key: str, names: Mapping[str, object]) -> list[str]:
    """The modules, or weights, of a name's end or a pattern. Raises UserError for none."""
    found = [name for name in names if name and _fits(name, pattern)]
    if not found:
        ends = sorted(
            {name.rpartition(".")[2] for name, one in names.items() if isinstance(one, (*_ADAPTED, NoneType))}
        )
        near = difflib.get_close_matches(pattern.rpartition(".")[2], ends, n=1, cutoff=0.5)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(ends)}"
        raise UserError(f'lora.{key} names "{pattern}", which fits no module of the model: {hint}')
    return found


def _refuse_tied(model: nn.Module, some: set[str], names: dict[str, nn.Module]) -> None:
    owners: dict[int, list[str]] = {}
    for name, module in names.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for tied in owners.values():
        if len(tied) > 1 and (own := some & {*tied}):
            raise UserError(
                f"{min(own)} has its weights together with {min({*tied} - {min(own)})}, and adapters of one would "
                "part them: leave it out of lora.targets and lora.modules_to_save, or part them by "
                "model.change.tie_word_embeddings = false"
            )


def _refuse_experts(config: Any, stacked: Sequence[str]) -> None:
    """peft takes names that layers of experts had before they lay in one tensor for that tensor: those of dense layers
    and shared experts beside them, so that it could not load their adapters."""
    if not config.target_parameters:
        return
    first = next(name for name in stacked if name.endswith(tuple(config.target_parameters)))
    rest = sorted({name.rpartition(".")[2] for name in config.target_modules} or ("q_proj", "v_proj"))
    ends = sorted({".".join(name.split(".")[-2:]) for name in stacked})
    raise UserError(
        f"{first} has all experts of a layer, for which peft takes targets that are dense layers or shared experts: "
        f"give others, as lora.targets = {json.dumps(rest + ends)}"
    )


def _stream(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest())


def peft_module() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError(
            'adapters are made by peft, which is not installed: pip install "tangram-train[tune]"'
        ) from None
    return peft
