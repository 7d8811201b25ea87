"""Fine-tuning in a job: adapters, preferences, a teacher, and what a task takes where its user says nothing.

Adapters are peft's, so tensors have the names that peft gives them: `X.base_layer.weight` is the frozen `X.weight`,
`X.lora_A.default.weight` (rank x in) and `X.lora_B.default.weight` (out x rank) lie beside it. A plan's layouts speak
of the model's own names, and those of adapters follow from them.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from tangram.layout import Layout
from tangram.layout.syntax import REST, VOID, Dim
from tangram.schema.tables import Mistake, PathText, Positive, TomlTable

TaskName = Literal["pretrain", "sft", "dpo", "kto", "distill"]
"""What is trained on: documents from end to end; conversations, of which only the answers are in the loss; pairs of
answers, of which one was preferred; single answers with a label, good or bad; or as the first two, beside a teacher."""
ROWS: Mapping[TaskName, int] = MappingProxyType({"pretrain": 1, "sft": 1, "dpo": 2, "kto": 1, "distill": 1})
"""How many rows of tokens a sample of a task is."""

_ANSWERS = {
    "data": {"sequence": 1024, "global_batch": 16, "held_out": 0.0, "packing": "single"},
    "optimiser": {"lr": 2e-4, "betas": [0.9, 0.999]},
}
_COMPARED = {
    "data": _ANSWERS["data"],
    "optimiser": {"lr": 1e-6, "betas": [0.9, 0.999]},
}
DEFAULTS: Mapping[TaskName, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "pretrain": {},
        "sft": _ANSWERS,
        "distill": {**_ANSWERS, "distill": {}},
        "dpo": {**_COMPARED, "preference": {}},
        "kto": {**_COMPARED, "preference": {"loss_type": "kto"}},
    }
)
"""By task, what stands in a job for keys that its file does not have."""


def with_defaults(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a file with what its task takes for keys that are not there."""
    own = DEFAULTS.get(cast(TaskName, str(tables.get("task"))), {})
    there = {name: tables.get(name, {}) for name in own}
    full = {name: {**own[name], **cast("dict[str, Any]", t)} for name, t in there.items() if isinstance(t, dict)}
    optimiser = there.get("optimiser")
    if isinstance(optimiser, dict) and cast("dict[str, Any]", optimiser).get("name") in ("sgd", "adafactor"):
        for key in {"betas", "lr"} - optimiser.keys():  # which these have not, or not of such a size
            full["optimiser"].pop(key, None)
    return {**tables, **full}


class LoraPlan(TomlTable):
    """Low-rank adapters (Hu et al. 2021) beside frozen weights; defaults are peft's."""

    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 8.0
    """What A and B give is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the inputs of A."""
    targets: str | tuple[str, ...] = "all-linear"
    """Ends of names of linear layers and embeddings, as "q_proj", or patterns of whole names; "all-linear": all linear
    layers but the head."""
    exclude: tuple[str, ...] = ()
    """Ends of names or patterns of what `targets` names and gets none; what is inside of it, too."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Numbers of the layers that have some; none: all."""
    ranks: dict[str, Positive] = Field(default_factory=dict[str, int])
    """Other ranks, by ends of names or patterns, of which the first that fits counts."""
    alphas: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict[str, float])
    """Other alphas, in the same way."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How A is drawn: uniformly by its inputs, or normally, with 1 / rank. B begins as 0."""
    lora_bias: bool = False
    """Add a bias that is trained to what B gives, beside layers that have one."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the model are trained, too, and saved with the adapters: all, or those of layers that have
    adapters."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) (Kalajdzievski 2023)."""
    dora: bool = False
    """Train the length of each output's weights, too (Liu et al. 2024)."""
    modules_to_save: tuple[str, ...] = ()
    """Ends of names of modules that are trained whole, and saved with the adapters."""
    trainable_token_indices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Numbers of tokens whose rows of the embeddings are trained, too, as peft has it."""
    base: Literal["parameters", "nf4", "int8", "fp8"] = "parameters"
    """How the frozen weights of linear layers but the head, and of experts, are kept: as `precision.parameters` says,
    or as codes of 4 or 8 bits with scales (`models.lora.bases`), dequantised whenever a layer is used."""
    base_skip: tuple[str, ...] = ()
    """Ends of names of linear layers and experts, or patterns, whose weights stay numbers beside a quantised base."""
    start: PathText | None = None
    """A directory of adapters as peft writes it, relative to the file, whose values these begin with."""

    @model_validator(mode="after")
    def _peft_has_it(self) -> Self:
        for key, other in (("dora", self.dora), ("init", self.init != "kaiming")):
            if self.lora_bias and other:
                raise ValueError(f"peft knows no bias of adapters with {key}: leave out lora.lora_bias or lora.{key}")
        return self

    @property
    def modules(self) -> dict[str, Any]:
        """The fields of `models.lora.adapters.Adapters`: which modules stand beside which."""
        return self.model_dump(exclude={"start", "base", "base_skip"})


LossType = Literal[
    "sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "apo_zero", "apo_down", "simpo", "orpo", "kto"
]  # fmt: skip
"""Of preferences; `training.objective.preferences` has the formula and the source of each."""
SMOOTHED = ("sigmoid", "robust", "simpo")
ALONE = ("simpo", "orpo")
"""Losses without a reference."""


class PreferencePlan(TomlTable):
    """How a policy learns which of two answers was preferred; names and defaults are TRL's."""

    loss_type: LossType = "sigmoid"
    """"sigmoid" is DPO."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """How much it costs to leave the reference; of "ipo" its tau, of "orpo" the weight of the odds ratio (lambda)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs that are taken to be the wrong way round."""
    simpo_gamma: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """By how much the chosen answer is to be ahead."""
    desirable_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Of "kto": by what the loss of a good answer is multiplied."""
    undesirable_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Of "kto": the same of a bad one."""

    @model_validator(mode="after")
    def _all_is_used(self) -> Self:
        if self.loss_type != "kto" and (self.desirable_weight, self.undesirable_weight) != (1, 1):
            raise ValueError(f'the loss "{self.loss_type}" has no weights of good and bad answers: leave them out')
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise ValueError(
                f'the loss "{self.loss_type}" has no label_smoothing, only {", ".join(SMOOTHED)} have: leave it out'
            )
        return self


def mistake_of_preferences(
    task: TaskName, preference: PreferencePlan | None, packing: str, global_batch: int
) -> Mistake | None:
    """What does not go together of a task and its preferences."""
    compares = task in ("dpo", "kto")
    if compares and packing != "single":
        return Mistake("data.packing", f'answers that are compared share no row: for "{task}" take "single"')
    if compares != (preference is not None):
        return Mistake("preference", 'preferences are what the tasks "dpo" and "kto" learn: give both, or none of them')
    if preference is not None and (task == "kto") != (preference.loss_type == "kto"):
        return Mistake("preference.loss_type", 'the loss "kto" is that of the task "kto", and of no other')
    if task == "kto" and global_batch < 2:
        return Mistake(
            "data.global_batch", '"kto" puts a prompt together with the answer of another sample: take at least 2'
        )
    return None


Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
"""Of a student from its teacher; `kernels.divergence` has the formula and the source of each."""


class DistillPlan(TomlTable):
    """How a student learns what a teacher says of each next token."""

    teacher: PathText | None = None
    """A Hugging Face directory with weights and a tokenizer, relative to the file. Every job has to give one, or
    `cache`."""
    cache: PathText | None = None
    """A folder of what a teacher says of the rows of the job (`tangram data teach`), read in the teacher's place."""
    loss_type: Divergence = "forward_kl"
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of "jsd": the teacher's share of the mixture."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """What the logits of both are divided by."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """The share of the cross-entropy of the data's own tokens in the loss."""
    on: Literal["answers", "text"] = "answers"
    """What is learnt: the answers of conversations, as by the task "sft"; or documents, as by "pretrain"."""

    @model_validator(mode="after")
    def _all_is_used(self) -> Self:
        if self.loss_type != "jsd" and self.beta != 0.5:
            raise ValueError(f'beta is of the loss "jsd" only: leave it out for "{self.loss_type}"')
        return self


def mistake_of_distillation(task: TaskName, distill: DistillPlan | None, packing: str) -> Mistake | None:
    """What does not go together of a task and its teacher, or of answers and how they are packed."""
    if (task == "distill") != (distill is not None):
        return Mistake("distill", 'a teacher is what the task "distill" learns from: give both, or none of them')
    if distill is not None and distill.teacher is distill.cache is None:
        return Mistake("distill.teacher", 'the task "distill" learns from a teacher: give the directory of its weights')
    if packing == "packed" and (task == "sft" or (distill is not None and distill.on == "answers")):
        return Mistake(
            "data.packing",
            f'windows of packed text cut conversations: for the task "{task}" take "best-fit", or "single"',
        )
    return None


COLUMNS: Mapping[str, int] = MappingProxyType({"nf4": 2, "absmax": 64, "int8": 1, "fp8": 1})
"""By what stands behind the name of a quantised weight and a line, in the names of the tensors that keep it: for how
many of its columns one of theirs is."""


def packed(name: str) -> tuple[str, int]:
    """The weight that a tensor keeps, and for how many of its columns one of the tensor's is; itself and 1 for others.

    `X.weight_nf4` and `X.weight_absmax` are of `X.weight`.
    """
    weight, _, kind = name.rpartition("_")
    return (weight, COLUMNS[kind]) if kind in COLUMNS and not weight.endswith(".") else (name, 1)


_OWN = re.compile(
    r"(?P<module>.+?)\.(?:(?:token_adapter\.)?base_layer\.|original_module\.|modules_to_save\.default\.)(?P<rest>.+)"
    r"|(?P<table>.+)\.token_adapter\.trainable_tokens_delta\.default"
    r"|(?P<beside>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)\.default(?P<end>\.weight|\.bias)?"
    r"|(?P<experts>.+)\.lora_(?P<side>left|right)\.(?P<weight>.+)"
)


def base_of(name: str) -> tuple[str, str]:
    """The tensor of the model without adapters that one is, or is beside; and which part it is: "" for the tensor
    itself or a copy that is trained, else "A", "B", "bias" (of B), "embedding_A", "embedding_B", "magnitude_vector",
    "rows" (of embeddings), or "left" or "right" of experts that lie in one tensor."""
    name = packed(name)[0]
    found = _OWN.fullmatch(name)
    if found is None:
        return name, ""
    if found["part"]:
        return f"{found['beside']}.weight", "bias" if found["end"] == ".bias" else found["part"]
    if found["side"]:
        return f"{found['experts']}.{found['weight']}", found["side"]
    if found["table"]:
        return f"{found['table']}.weight", "rows"
    return f"{found['module']}.{found['rest']}", ""


def of_adapters(name: str) -> bool:
    """Whether a tensor is one that the model without adapters has not: a part of one, or a copy that is trained."""
    return bool(base_of(name)[1]) or ".modules_to_save." in name


def layout_beside(text: str, part: str, data: Collection[str]) -> str:
    """The layout of a part of an adapter beside a weight that lies as `text` says: of two dims, or three of experts.

    Each dim that it has in common with the weight is cut like that; `data` axes, by which FSDP cuts, cut its first dim.
    """
    dims = [dim for dim in Layout.parse(text).dims if dim.name != REST]
    dims += [Dim(VOID)] * (3 - len(dims))
    first = [cut for dim in dims for cut in dim.cuts if cut.axis in data]
    one, two, three = (replace(dim, cuts=tuple(cut for cut in dim.cuts if cut.axis not in data)) for dim in dims[:3])
    own = {
        "A": (Dim(VOID), two),
        "B": (one, Dim(VOID)),
        "embedding_A": (Dim(VOID), one),  # of an embedding the first dim is what comes in
        "embedding_B": (two, Dim(VOID)),
        "rows": (Dim(VOID), two),
        "magnitude_vector": (one,),
        "bias": (one,),
        "left": (one, two, Dim(VOID)),
        "right": (one, Dim(VOID), three),
    }[part]
    return str(Layout((replace(own[0], cuts=(*own[0].cuts, *first)), *own[1:])))
