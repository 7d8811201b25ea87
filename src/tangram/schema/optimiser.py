"""The optimiser of a job: which one, its learning rates and how they go, what it keeps of each parameter."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import isfinite, prod
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from tangram.schema.tables import Beta, Count, Mistake, Share, TomlTable

Moments = Literal["as masters", "8-bit"]
"""Of AdamW."""
Rounding = Literal["nearest", "stochastic"]
"""Of what is updated in bfloat16."""
LEAST_CODED = 4096
"""Numbers of a parameter whose moments become codes: few bytes are saved by others."""
OptimiserName = Literal["adamw", "sgd", "adafactor", "muon"]
RuleName = Literal["adamw", "adamw-8bit", "sgd", "sgd-momentum", "adafactor", "muon"]
"""How one parameter is updated (`training.updates.update_rules`)."""
_USED: Mapping[OptimiserName, frozenset[str]] = MappingProxyType(
    {
        "adamw": frozenset({"betas", "eps", "moments", "moments_skip"}),
        "sgd": frozenset({"momentum"}),
        "adafactor": frozenset(),
        "muon": frozenset({"betas", "eps", "momentum", "adjust_lr"}),
    }
)
"""The keys that not every optimiser has."""
SHARED_UPDATES = frozenset[RuleName]({"adafactor", "muon"})
"""The rules by which ranks update what they have together."""
_ONLY = frozenset[str]().union(*_USED.values())
MOMENTUM: Mapping[OptimiserName, float] = MappingProxyType({"sgd": 0.0, "muon": 0.95})
"""Where a job says none: those of torch."""
TITLES: Mapping[OptimiserName, str] = MappingProxyType(
    {"adamw": "AdamW", "sgd": "SGD", "adafactor": "Adafactor", "muon": "Muon for matrices of layers, else AdamW"}
)
_OF_KIND: Mapping[RuleName, Mapping[str, Any]] = MappingProxyType(
    {
        "adamw": {"name": "adamw", "moments": "as masters"},
        "adamw-8bit": {"name": "adamw", "moments": "8-bit"},
        "sgd": {"name": "sgd", "momentum": None},
        "sgd-momentum": {"name": "sgd", "momentum": 0.9},
        "adafactor": {"name": "adafactor"},
        "muon": {"name": "muon", "momentum": None},
    }
)
"""What a job says of each."""

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class OptimiserPlan(TomlTable):
    """What updates the parameters, with a linear warm-up."""

    name: OptimiserName = "adamw"
    """As torch.optim has it. Muon is for matrices of layers; all else of its model is AdamW's."""
    lr: Rate
    lr_of: dict[str, Rate] = Field(default_factory=dict[str, float])
    """Another peak rate for parameters of some name patterns, instead of `lr`; the first that fits a name counts. It
    warms up and falls as `lr` does."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    momentum: Beta | None = None
    """Of "sgd", which has none unless it is said, and of "muon" (0.95)."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Of "muon": how a matrix's rate follows from its shape. By the first an update is as large as one of AdamW, so
    that one `lr` fits both."""
    weight_decay: Share = 0.0
    no_decay: tuple[str, ...] = ("*norm*", "*.bias", "bias")
    """Name patterns of parameters without weight decay, beside vectors, biases, norms, scans and sinks, which have none
    by what they are: `tangram plan show` lists them."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """The largest norm of the whole gradient that is applied unscaled; inf applies every one."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After the warm-up: half a cosine; or linear; or constant and then (wsd) linear over the last `decay_steps`."""
    warmup_steps: Count = 0
    decay_steps: Count = 0
    """Of "wsd": the steps at the end in which the rate falls."""
    final_lr: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The rate at the last step, as a share of `lr`; of "linear" at the one that would follow it."""
    states: Literal["as parameters"] = "as parameters"
    """How the optimiser's states lie: cut like their parameters."""
    moments: Moments = "as masters"
    """In which numbers AdamW's two moments are kept: in the type of precision.masters, or as codes of 8 bits with a
    float32 for each 256 of them."""
    moments_skip: tuple[str, ...] = ()
    """Name patterns of parameters whose moments are as masters all the same; those of fewer than 4,096 numbers are."""

    rounding: Rounding = "nearest"
    """How updated numbers become bfloat16, where precision.masters is that: "stochastic" is right on average, so small
    updates are not lost; it is drawn by seed, step, parameter and place, alike on any mesh."""

    in_backward: bool = False
    """Whether a parameter is updated, and its gradient freed, as soon as the backward has made it: at most one gradient
    is there at a time. Of one micro-batch a step, and without what needs all gradients before an update."""

    def has_codes(self, name: str, shape: Iterable[int]) -> bool:
        """Whether the moments of a parameter, of this shape in all, are codes of 8 bits."""
        small = self.moments != "8-bit" or prod(shape) < LEAST_CODED
        return not small and not any(fnmatchcase(name, pattern) for pattern in self.moments_skip)

    @property
    def momentum_used(self) -> float:
        """Of an optimiser that has one."""
        return MOMENTUM.get(self.name, 0.0) if self.momentum is None else self.momentum

    @property
    def kind(self) -> RuleName:
        """How parameters are updated but for those that a rule is not for."""
        if self.name == "sgd":
            return "sgd-momentum" if self.momentum_used else "sgd"
        return "adamw-8bit" if self.moments == "8-bit" else self.name

    def rule_of(self, name: str, shape: Sequence[int], *, in_layer: bool) -> RuleName:
        """How a parameter of this shape in all is updated. `in_layer`: of the model's repeated blocks."""
        if self.name == "muon" and not (in_layer and len(shape) in (2, 3) and min(shape[-2:]) > 1):
            return "adamw"
        return "adamw" if self.moments == "8-bit" and not self.has_codes(name, shape) else self.kind

    def lends_lr(self, kind: RuleName) -> bool:
        """Whether its learning rate is one for another kind, too: an update of both is as large."""
        like_adamw = {"adamw", "adamw-8bit", *(["muon"] if self.adjust_lr == "match_rms_adamw" else [])}
        return kind == self.kind or like_adamw >= {kind, self.kind}

    def of_kind(self, kind: RuleName) -> dict[str, Any]:
        """The table of another kind, without the keys that it has not."""
        if kind == self.kind:
            return self.model_dump()
        own = _OF_KIND[kind]
        lost = _ONLY - _USED[own["name"]]
        return {**{key: value for key, value in self.model_dump().items() if key not in lost}, **own}

    @property
    def words(self) -> str:
        """What it is, and the settings that it has."""
        used, said = _USED[self.name], [TITLES[self.name]]
        if self.moments == "8-bit":
            said.append("moments of 8 bits")
        if "momentum" in used and self.momentum_used:
            said.append(f"momentum {self.momentum_used:g}")
        if "betas" in used:
            said.append(f"betas {', '.join(map(str, self.betas))}")
        if self.in_backward:
            said.append("updates in the backward")
        return ", ".join(said)

    def peak_lr(self, name: str) -> float:
        """The highest learning rate of a parameter."""
        return next((rate for pattern, rate in self.lr_of.items() if fnmatchcase(name, pattern)), self.lr)

    def mistake_in_backward(self, on_nonfinite: str, compute: str) -> Mistake | None:
        """What cannot be beside updates in the backward, which come before the whole gradient is known."""
        if not self.in_backward:
            return None
        early = "optimiser.in_backward updates parameters before the whole gradient is known"
        if isfinite(self.clip_norm):
            return Mistake("optimiser.clip_norm", f"{early}, so nothing is clipped: set optimiser.clip_norm = inf")
        if compute == "float16":
            return Mistake("precision.compute", f"{early}, so no overflow is undone: take bfloat16")
        if on_nonfinite == "skip":
            return Mistake("run.on_nonfinite", f'{early}, so no step is skipped: set run.on_nonfinite = "stop"')
        return None

    def mistake(self, steps: int) -> Mistake | None:
        """What makes no sense of it together, in a run of so many steps."""
        for key in sorted(_ONLY - _USED[self.name]):
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                others = " or ".join(f'"{name}"' for name, keys in _USED.items() if key in keys)
                return Mistake(f"optimiser.{key}", f"only the optimiser {others} has {key}: leave it out")
        if self.warmup_steps >= steps:
            return Mistake(
                "optimiser.warmup_steps",
                f"warming up takes {self.warmup_steps} steps of the {steps} in run.steps: take fewer than {steps}",
            )
        if self.schedule == "wsd" and not self.decay_steps:
            return Mistake(
                "optimiser.schedule", 'the schedule "wsd" needs decay_steps, the steps at the end that decay'
            )
        if self.schedule != "wsd" and self.decay_steps:
            return Mistake(
                "optimiser.decay_steps", f'only the schedule "wsd" has decay_steps; this is "{self.schedule}"'
            )
        if self.warmup_steps + self.decay_steps > steps:
            return Mistake(
                "optimiser.decay_steps",
                f"warming up and decaying take {self.warmup_steps} + {self.decay_steps} steps, more than the "
                f"{steps} in run.steps",
            )
        return None
