"""What a resume may change of the run that wrote the checkpoint: every key of a plan, by one table.

    free      the same training: when it ends, what is measured and saved meanwhile
    reported  the same training within rounding, or another answer to what may go wrong later: printed
    refused   another training from the next step on: printed, and refused unless `--allow` names the key

The past is the checkpoint's plan. Some keys are refused under a condition only, else reported; files go by content.
"""

import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from pydantic import BaseModel
from transformers import PreTrainedConfig

from tangram.checkpoint.inspect.verify import verify
from tangram.checkpoint.store.commits import committed
from tangram.checkpoint.store.retention import torn
from tangram.errors import UserError
from tangram.models.building.build import read_source
from tangram.planner.local.own_rules import code_digest
from tangram.schema.files import loads
from tangram.schema.plan import Plan
from tangram.schema.tuning import DistillPlan, LoraPlan, PreferencePlan
from tangram.training.data import Corpus
from tangram.training.observe.events import Note, TableEvent
from tangram.training.run.run_folder import CHECKPOINTS, SUMMARY_FILE
from tangram.training.run.uploads import mended
from tangram.training.state.restore import Description, describe
from tangram.training.step.optimiser_step import lr_at

Kind = Literal["free", "reported", "refused"]
Condition = Literal["", "learning rate", "text", "configuration", "code", "global micro-batch", "unreadable"]


@dataclass(frozen=True)
class ResumeRule:
    """What becomes of a change of a key."""

    kind: Kind
    condition: Condition = ""
    """Of a refusal: only where this is another. Elsewhere the change is reported."""


_FREE, _REPORTED, _REFUSED = ResumeRule("free"), ResumeRule("reported"), ResumeRule("refused")
_RATE, _TEXT = ResumeRule("refused", "learning rate"), ResumeRule("refused", "text")
_MODEL, _MICRO = ResumeRule("refused", "configuration"), ResumeRule("refused", "global micro-batch")

ON_RESUME: Mapping[str, ResumeRule] = MappingProxyType(
    {
        "version": ResumeRule("refused", "unreadable"),
        "task": _REFUSED,
        "seed": _REFUSED,
        "model.preset": _MODEL,
        "model.path": _MODEL,
        "model.code": ResumeRule("refused", "code"),
        "model.rules": _REPORTED,
        "model.change": _MODEL,
        "model.freeze": _REFUSED,
        **{f"preference.{key}": _REFUSED for key in PreferencePlan.model_fields},
        **{
            f"distill.{key}": _REPORTED if key in ("teacher", "cache") else _REFUSED for key in DistillPlan.model_fields
        },
        **{f"lora.{key}": _REFUSED for key in LoraPlan.model_fields},
        "data.sources.path": _TEXT,
        "data.sources.pattern": _TEXT,
        "data.sources.field": _TEXT,
        "data.sources.weight": _REFUSED,
        **{f"data.evaluation.{key}": _TEXT for key in ("path", "pattern", "field", "weight")},
        **{f"data.{key}": _TEXT for key in ("tokenizer", "special_tokens", "held_out", "too_long", "date")},
        "data.held_out_samples": _REPORTED,
        "data.sequence": _REFUSED,
        "data.global_batch": _REFUSED,
        "data.micro_batch": _MICRO,
        "data.packing": _REFUSED,
        "data.cache": _FREE,
        "optimiser.name": _REFUSED,
        "optimiser.lr": _RATE,
        "optimiser.lr_of": _REFUSED,
        **{
            f"optimiser.{key}": _REFUSED
            for key in ("betas", "eps", "momentum", "adjust_lr", "weight_decay", "no_decay")
        },
        "optimiser.clip_norm": _REFUSED,
        "optimiser.schedule": _RATE,
        "optimiser.warmup_steps": _RATE,
        "optimiser.decay_steps": _RATE,
        "optimiser.final_lr": _RATE,
        "optimiser.states": _REPORTED,
        "optimiser.moments": _REFUSED,
        "optimiser.moments_skip": _REFUSED,
        "optimiser.rounding": _REFUSED,
        "optimiser.in_backward": _FREE,
        "precision.compute": _REFUSED,
        "precision.parameters": _REFUSED,
        "precision.masters": _REFUSED,
        "precision.accumulate": _REFUSED,
        "precision.reduce": _REFUSED,
        "precision.scale.initial": _REPORTED,
        "precision.scale.every": _REPORTED,
        "precision.scale.growth": _REPORTED,
        "precision.scale.backoff": _REPORTED,
        "checkpoint.every_steps": _FREE,
        "checkpoint.keep": _REPORTED,
        "checkpoint.also": _REPORTED,
        "checkpoint.asynchronous": _FREE,
        "checkpoint.store": _FREE,
        "run.steps": _RATE,
        "run.max_seconds": _FREE,
        "run.evaluate_every": _FREE,
        "run.patience": _FREE,
        "run.count_experts": _FREE,
        "run.router_loss": _REFUSED,
        "run.expert_capacity": _REFUSED,
        "run.drop_by": _REFUSED,
        "run.device": _REPORTED,
        "run.deterministic": _REPORTED,
        "run.attention": _REFUSED,
        "run.compile": _REPORTED,
        "run.recompute": _REPORTED,
        "run.stream_layers": _FREE,
        "run.recompute_keep": _REPORTED,
        "run.reshard": _REPORTED,
        "run.reduce_every": _REPORTED,
        "run.on_nonfinite": _REPORTED,
        "run.trace": _FREE,
        "run.hang_seconds": _FREE,
        "run.boards": _FREE,
        "run.skips_in_a_row": _REPORTED,
        "run.diverged.above": _REPORTED,
        "run.diverged.steps": _REPORTED,
        "run.diverged.window": _REPORTED,
        "mesh": _MICRO,
        "axes.data": _MICRO,
        **{f"axes.{role}": _REPORTED for role in ("tensor", "context", "expert", "pipeline")},
        "layouts.parameters": _REPORTED,
        "layouts.marks": _REPORTED,
        "layouts.sizes": _REPORTED,
        "pipeline.schedule": _REPORTED,
        "pipeline.table": _REPORTED,
        "pipeline.stages": _REPORTED,
        "pipeline.tied": _REPORTED,
        "context.keys": _REPORTED,
        "context.order": _REPORTED,
    }
)
"""Every key of a plan; a key of `data.sources` stands for that key of each source."""


@dataclass(frozen=True)
class ResumeChange:
    """A key whose value is not that of the run that wrote the checkpoint."""

    key: str
    old: str
    new: str
    refused: bool
    """Unless it is named."""
    why: str = ""


Unlike = Mapping[Condition, str]
"""How what is compared by what it comes to is another; empty or without the condition: it is the same."""


def refuse_unknown(allow: Sequence[str]) -> None:
    """Raise UserError for what is no key of a plan and no table of keys."""
    known = {".".join(key.split(".")[:parts]) for key in ON_RESUME for parts in range(1, key.count(".") + 2)}
    for name in allow:
        if _without_numbers(name) not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"--allow {name}: this is no key of a plan" + (f'; did you mean "{near[0]}"?' if near else "")
            )


def checkpoint_to_resume(
    out: Path,
    plan: Plan,
    corpus: Corpus,
    config: PreTrainedConfig,
    allow: Sequence[str],
    tell: Callable[[object], None],
) -> Path | None:
    """The newest good checkpoint of a run, if this plan can go on from it; None where the run has written none yet.

    Every byte of it is checked (`newest_good`). What the plan changes is told. Raises UserError for a change that is
    refused and not in `allow`, and where the run went further than the plan does.
    """
    folder = out / CHECKPOINTS
    if not committed(folder) and not torn(folder) and not (out / SUMMARY_FILE).exists():
        tell(Note(f'"{out}" has no checkpoint yet: training starts with step 1'))
        return None
    found = newest_good(out, tell, plan.checkpoint.store)
    if found is None:
        raise UserError(f'there is no good checkpoint in "{folder}" to resume from')
    about = describe(found)
    step = about.progress.step
    if step > plan.run.steps:
        raise UserError(
            f'the newest checkpoint in "{out}" is of step {step}, and run.steps is {plan.run.steps}: raise it with '
            "--set run.steps=N"
        )
    made = changes(found, about, plan, corpus, config, allow)
    _refuse(found, [change for change in made if change.refused and not _named(change.key, allow)])
    if made:
        rows = tuple((change.key, change.old, change.new, change.why) for change in made)
        tell(TableEvent("This resume changes", ("key", "was", "is", ""), rows))
    return found


def newest_good(out: Path, tell: Callable[[object], None], store: str = "") -> Path | None:
    """The checkpoint that was committed last, of those whose every byte is as it was written, or is so in a store."""
    for why in torn(out / CHECKPOINTS):
        tell(Note(f"{why}; it is passed over"))
    for path, _ in reversed(committed(out / CHECKPOINTS)):
        findings = [one for one in verify(path).findings if one.kind != "extra"]
        if not findings or mended(store, path, tell):
            return path
        tell(Note(f'the checkpoint "{path}" is damaged and passed over: {findings[0].text}'))
    return None


def changes(
    path: Path, past: Description, plan: Plan, corpus: Corpus, config: PreTrainedConfig, allow: Sequence[str]
) -> list[ResumeChange]:
    """What a plan changes of the run that wrote the checkpoint at `path`, but for what is free."""
    try:
        before = loads(str(past.about.get("plan", "")))
    except UserError as error:
        if _named("version", allow):
            return [
                ResumeChange("version", f"of Tangram {past.about.get('tangram')}", str(plan.version), True, str(error))
            ]
        raise UserError(
            f'the plan in "{path}", of Tangram {past.about.get("tangram")}, cannot be compared: {error}; go on without '
            "a comparison by --allow version"
        ) from None
    if not isinstance(before, Plan):
        raise UserError(f'the plan in "{path}" has no mesh: it is of no `tangram train`')
    stream: Mapping[str, Any] = past.about.get("stream", {})
    step = past.progress.step
    unlike: Unlike = {
        "learning rate": other_rate(before, plan, step),
        "text": "" if stream.get("text") == corpus.digest else "the tokens of the text are others",
        "configuration": _other_configuration(path, config),
        "code": "" if past.about.get("code", code := code_digest(plan)) == code else "the code is another",
        "global micro-batch": other_micro_batch(before, plan),
    }
    return compared(before, plan, unlike, f"the learning rate of step {step + 1} stays {_rate(plan, step):.3g}")


def compared(before: Plan, now: Plan, unlike: Unlike, same_rate: str = "") -> list[ResumeChange]:
    """Every key that differs and is not free. What is another although no key says so is a change of its first key.

    `same_rate` is told where keys of the schedule change and the learning rate does not.
    """
    if now.data.packing == "auto":  # it goes on as it was, and the run knew what that is
        now = now.model_copy(update={"data": now.data.model_copy(update={"packing": before.data.packing})})
    old, new = leaves(before), leaves(now)
    found: list[ResumeChange] = []
    for key in dict.fromkeys((*old, *new)):
        rule = ON_RESUME[_without_numbers(key)]
        if old.get(key) == new.get(key) or rule.kind == "free":
            continue
        why = unlike.get(rule.condition, "")
        refused = rule.kind == "refused" and (not rule.condition or bool(why))
        if rule.condition == "learning rate" and not refused and same_rate not in (one.why for one in found):
            why = same_rate
        found.append(ResumeChange(key, *_unlike(old.get(key), new.get(key)), refused, why))
    for condition, key in _OF_FILES.items():
        why = unlike.get(condition, "")
        if why and not any(change.why == why for change in found):
            found.append(ResumeChange(key, "as it was", "changed in its place", True, why))
    return found


_OF_FILES: Mapping[Condition, str] = MappingProxyType(
    {"text": "data.sources", "configuration": "model.path", "code": "model.code"}
)
"""What may be another without a key that says so, and the key by which that is allowed."""


def leaves(table: BaseModel, above: str = "") -> dict[str, Any]:
    """The values of all keys of a table and of those below it, by dotted key; items of arrays of tables by number."""
    found: dict[str, Any] = {}
    for name in type(table).model_fields:
        value: Any = getattr(table, name)
        items = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()
        if isinstance(value, BaseModel):
            found |= leaves(value, f"{above}{name}.")
        elif items and isinstance(items[0], BaseModel):
            for number, item in enumerate(items):
                found |= leaves(item, f"{above}{name}.{number}.")
        elif value is not None:
            found[f"{above}{name}"] = value
    return found


def _rate(plan: Plan, step: int) -> float:
    return lr_at(step, plan.run.steps, plan.optimiser)


def other_rate(before: Plan, now: Plan, step: int) -> str:
    """How the learning rate of the step after `step` steps is another, and what to set to keep it."""
    if step >= now.run.steps:  # no step is left
        return ""
    old, new = _rate(before, step), _rate(now, step)
    if math.isclose(old, new, rel_tol=1e-6):
        return ""
    times = f"{new / old:.2g} times " if old else "not "
    said = f"the learning rate of step {step + 1} becomes {new:.3g}, {times}the {old:.3g} of the run so far"
    steady = {"optimiser.schedule": "constant", "optimiser.lr": f"{old:.7g}"}
    steady |= {"optimiser.warmup_steps": "0"} if now.optimiser.warmup_steps > step else {}
    steady |= {"optimiser.decay_steps": "0"} if now.optimiser.decay_steps else {}
    keep = " ".join(f"--set {key}={value}" for key, value in steady.items())
    return f"{said}, which {keep} keeps" if old else said


def _other_configuration(path: Path, config: PreTrainedConfig) -> str:
    """Which fields of the model's configuration are not those of the model in the checkpoint."""
    file = path / "config.json"
    if not file.is_file():
        return ""
    own = str(json.loads(file.read_text(encoding="utf-8")).get("model_type"))
    old = read_source(None, str(file), {}, known={config.model_type, own}).config
    before, now = (_of_the_model(json.loads(one.to_json_string(use_diff=False))) for one in (old, config))
    names = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    told = [f"{name} of the model was {_shown(before.get(name))}, is {_shown(now.get(name))}{more}" for name in names]
    return told[0] if told else ""


_NOT_THE_MODEL = frozenset({"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype"})
"""Fields of a configuration that say nothing of what is computed."""


def _of_the_model(fields: dict[str, Any]) -> dict[str, Any]:
    """Of a configuration, and of those within it (`text_config`), what says what is computed."""
    own = {name: value for name, value in fields.items() if name not in _NOT_THE_MODEL}
    within = {name: cast("dict[str, Any]", value) for name, value in own.items() if isinstance(value, dict)}
    return own | {name: _of_the_model(value) for name, value in within.items()}


def other_micro_batch(before: Plan, now: Plan) -> str:
    """Where the router's loss or the experts' capacity is of what all DP ranks take at a time."""
    if not (now.run.router_loss or now.run.expert_capacity):
        return ""
    old, new = (plan.data.micro_batch * plan.data_ranks for plan in (before, now))
    if old == new:
        return ""
    return f"routers are balanced, or experts filled, over {new} samples at a time, and were over {old}"


def _refuse(path: Path, refused: Collection[ResumeChange]) -> None:
    if not refused:
        return
    told = [
        f"{change.key} {change.old}, and the plan has {change.new}{f' ({change.why})' if change.why else ''}"
        for change in refused
    ]
    names = " ".join(f"--allow {key}" for key in dict.fromkeys(change.key for change in refused))
    raise UserError(
        f'"{path}" was trained with {"; with ".join(told)}: resume with the same, or say that it may change: {names}'
    )


def _named(key: str, allow: Sequence[str]) -> bool:
    """Whether a key is allowed to change, by its name or by that of a table that it is in."""
    return any(name in (key, _without_numbers(key)) or key.startswith(f"{name}.") for name in allow)


def _without_numbers(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdigit())


def _unlike(old: Any, new: Any) -> tuple[str, str]:
    """Two values as they are shown; of tables of free names only what is not alike."""
    if isinstance(old, dict) and isinstance(new, dict):
        before, now = cast("dict[str, object]", old), cast("dict[str, object]", new)
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return _shown(_only(before, names)), _shown(_only(now, names))
    return _shown(old), _shown(new)


def _only(table: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    return {name: table[name] for name in names if name in table}


def _shown(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
