"""Stages of a model: its own code, with some of its modules gone, of which the names and places stay.

A module of another stage becomes one that gives what it takes. So a stage runs the model's unchanged forward. The first
takes token ids; in the others the module before the cut gives what flows in (`Entry`), and what the forward does before
it, such as adding positions or dropping embeddings, is done to zeros and goes nowhere. The last gives logits, the
others what the module behind the cut takes (`Exit`). Names of parameters are those of the whole model, whatever the
stage.

A rank may have several stages: its model is what holds their modules and does not run, and each stage a model of its
own around the same modules. What no stage names has no parameters, and each stage has its own of it.

Nothing of this is true of every model, so it is looked up in a captured graph (`refuse_unlike_chain`): at a cut, what
one module gives has to be what the next one takes, and nothing else that depends on tokens may pass. A model that hands
its embeddings to all blocks, or does something between those of a cut, is refused, with what stands in the way.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tangram.errors import UserError
from tangram.models.capturing.called import caller, line_of
from tangram.models.capturing.graph import Graph, Node, Run

Stages = Sequence[Sequence[str]]
"""For each stage the modules whose parameters it has, in the order in which they run."""


class ElsewhereError(UserError, AttributeError):
    """A part of a module that another stage has; code that asks whether there is one finds none."""


class Through(nn.Module):
    """In the place of a module of another stage: gives what it takes. The settings that others read of it stay."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        kept = {key: value for key, value in vars(module).items() if key not in vars(self)}
        vars(self).update({key: value for key, value in kept.items() if not key.startswith("_")})
        self.more_results = _more_results(module)

        self.width = module.embedding_dim if isinstance(module, nn.Embedding) else None
        if isinstance(module, Through):
            self.width = module.width

    def __getattr__(self, name: str) -> Any:
        """As of any module; what only the module itself has is refused by the line that asks for it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            line = line_of(caller(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage]
            raise ElsewhereError(
                f"{line} looks up {name} in a module that another stage of the pipeline has: this version cuts no such "
                "model into stages, so make a plan without them (--stages 1)"
            ) from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first tensor; in a tuple where the module has one, of which its caller takes the first."""
        x = self.instead(next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)))
        return x if self.more_results is None else (x, *(None for _ in range(self.more_results)))

    def instead(self, x: Tensor) -> Tensor:
        """What is given for a tensor: itself; for numbers of rows, zeros of the shape of rows."""
        if self.width is None or x.dim() == HIDDEN:  # a mask of tokens may be as wide as a row
            return x
        return x.new_zeros((*x.shape, self.width), dtype=torch.get_default_dtype())


class Entry(Through):
    """In the place of the last module before a stage: gives what flows into the stage, whatever it takes."""

    inflow: Tensor | None = None
    """While the stage runs, until it is given."""

    def instead(self, x: Tensor) -> Tensor:
        """What flows in, once."""
        if self.inflow is None:
            raise RuntimeError("the module before a stage runs twice in a forward")
        found, self.inflow = self.inflow, None
        return found


class Exit(Through):
    """In the place of the first module behind a stage: keeps what it takes."""

    outflow: Tensor | None = None
    """While the stage runs, from when it is taken."""

    def instead(self, x: Tensor) -> Tensor:
        """Itself."""
        self.outflow = x
        return super().instead(x)


def _more_results(module: nn.Module) -> int | None:
    """How many results a module's code has beside the first; None where it gives a tensor and no tuple.

    Code as `x = block(x)[0]` would take the first sample of a tensor.
    """
    if isinstance(module, Through):
        return module.more_results
    forward = inspect.unwrap(type(module).forward)
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    nodes = [*ast.walk(code)]
    kept = {
        target.id: node.value
        for node in reversed(nodes)  # the first assignment of a name
        if isinstance(node, ast.Assign) and _count(node.value) is not None
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    values = [node.value for node in nodes if isinstance(node, ast.Return)]
    found = [_count(kept.get(value.id) if isinstance(value, ast.Name) else value) for value in values]
    counts = [count - 1 for count in found if count]
    return min(counts) if counts and len(counts) == len(values) else None


def _count(value: ast.expr | None) -> int | None:
    """How many results a tuple or a list has at least, such as `[x] + more`; None of anything else."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _count(value.left)
    return len(value.elts) if isinstance(value, ast.Tuple | ast.List) else None


class Stage:
    """Part of the class of each stage."""

    in_parts: bool = False
    """Whether its code runs on parts of tensors, which say nothing of how many samples there are."""


def keep_stages(model: nn.Module, stages: Stages, numbers: Sequence[int], tied: Sequence[str] = ()) -> list[nn.Module]:
    """The stages of these numbers of a Hugging Face model, of which only their modules are left.

    Each takes one tensor, by position, and gives one. The first of all takes token ids, shape (batch, sequence), the
    others hidden states, shape (batch, sequence, hidden); the last gives logits, the others hidden states. The model
    has all of them and cannot be called. `tied`: modules of other stages that the last one keeps and does not run, as
    its head has their weights. Raises UserError for a module that the model lacks.
    """
    refuse_unlike_modules(model, stages, tied)
    last = len(stages) - 1
    found = [_stage(model, stages, number, tied if number == last else ()) for number in numbers]
    kept = {*itertools.chain(*(stages[number] for number in numbers)), *(tied if last in numbers else ())}
    for name in itertools.chain(*stages):
        if name not in kept:
            model.set_submodule(name, Through(model.get_submodule(name)))
    _call_instead(model, "Stages", _is_not_called)
    return found


def _stage(model: nn.Module, stages: Stages, number: int, tied: Sequence[str]) -> nn.Module:
    kinds: dict[str, type[Through]] = dict.fromkeys((name for stage in stages for name in stage), Through)
    entry = stages[number - 1][-1] if number else ""
    if entry and model.get_submodule(entry) is cast("Any", model).get_input_embeddings():
        entry = ""  # for which what flows in stands already
    end = stages[number + 1][0] if number < len(stages) - 1 else ""
    kinds |= {name: kind for name, kind in ((entry, Entry), (end, Exit)) if name}
    found = _around(model, "", {*stages[number], *tied}, kinds, {})
    _call_instead(found, f"Stage{number}", _forward_of(type(model), entry, end, first=not number))
    return found


def _around(
    module: nn.Module, name: str, own: set[str], kinds: Mapping[str, type[Through]], made: dict[nn.Module, nn.Module]
) -> nn.Module:
    """The same module where it is a stage's own; else another, with the parts that are the stage's own.

    What a module has itself, parameters and buffers, both have: of one that is given memory so is the other.
    """
    if name in own:
        return module
    if name in kinds:
        return kinds[name](module)
    if module not in made:
        made[module] = found = type(module).__new__(type(module))
        for key, value in vars(module).items():
            shared = key in ("_parameters", "_buffers") or not isinstance(value, dict)
            vars(found)[key] = value if shared else cast("dict[Any, Any]", value).copy()
        prefix = f"{name}." if name else ""
        parts: dict[str, nn.Module | None] = module._modules  # pyright: ignore[reportPrivateUsage]
        vars(found)["_modules"] = {
            key: part and _around(part, f"{prefix}{key}", own, kinds, made) for key, part in parts.items()
        }
    return made[module]


def _call_instead(model: nn.Module, word: str, forward: Any) -> None:
    """As FSDP2 does: a class of its own, so that it is still the model, and a copy of it still a stage."""
    kind = type(model)
    model.__class__ = type(f"{word}Of{kind.__name__}", (kind, Stage), {"forward": forward})


def _is_not_called(self: Any, *args: Any, **told: Any) -> Any:
    raise UserError("a rank of a pipeline has stages of a model only: let all ranks call what runs them together")


def _forward_of(kind: type[nn.Module], entry: str, end: str, *, first: bool) -> Any:
    """Of a stage behind the module `entry` and before `end`: "" where what flows is the model's own."""
    taken = "input_ids" if first else "inputs_embeds"

    def forward(self: Any, x: Tensor, **told: Any) -> Tensor:
        given = {taken: x, "use_cache": False, **told}
        if entry:
            given[taken] = torch.zeros_like(x)  # not x: code may write into it
            self.get_submodule(entry).inflow = x
        if not end:
            result = cast(Any, kind).forward(self, **given).logits
        else:
            result = _base_of(self)(**given).last_hidden_state
            leave = self.get_submodule(end)
            if leave.outflow is not None:  # the base model has it: what it gives may be something else
                result, leave.outflow = leave.outflow, None
        if entry and self.get_submodule(entry).inflow is not None:
            raise RuntimeError(f"{entry}, the module before a stage, does not run in it")
        result = result if self.in_parts else _of_all(result, x)
        return result.clone() if end else result  # a tensor of its own: a block's may lie otherwise than a stage's

    return forward


def _base_of(model: Any) -> nn.Module:
    """A model without its head. Llama 4's name for it is none of its own, and transformers then gives the model."""
    inside = (one for one in model.children() if isinstance(one, PreTrainedModel))
    return model.base_model if model.base_model is not model else next(inside)


HIDDEN = 3
"""The dims of hidden states and logits: samples, tokens, and what there is of each."""


def _of_all(result: Tensor, x: Tensor) -> Tensor:
    """What a stage gives, which has to be of every sample that it takes, and of its tokens, or of this rank's part.

    A module that is missing may stand for one that gives a tuple, of which its caller then takes the first sample.
    """
    if result.dim() != HIDDEN or result.shape[0] != x.shape[0] or result.shape[1] > x.shape[1]:
        raise UserError(
            f"a stage of the pipeline gives {tuple(result.shape)} for {tuple(x.shape)}: this version cannot leave out "
            "modules of such a model"
        )
    return result


def tied_modules(model: nn.Module, stages: Stages) -> tuple[str, ...]:
    """The modules of earlier stages that have a parameter together with one of the last stage."""
    return tuple(dict.fromkeys(a.module for a, b in _tied_across(model, stages) if b.stage == len(stages) - 1))


class _Owned(NamedTuple):
    """A parameter, and the module of a stage that has it; "" and -1: of none."""

    name: str
    module: str
    stage: int


def _owned(name: str, stages: Stages) -> _Owned:
    found = ((module, stage) for stage, own in enumerate(stages) for module in own if name.startswith(f"{module}."))
    return _Owned(name, *next(found, ("", -1)))


def _tied_across(model: nn.Module, stages: Stages) -> list[tuple[_Owned, _Owned]]:
    """Of each parameter that several stages have its first owner, with each of another stage."""
    owners: dict[nn.Parameter, _Owned] = {}
    found: list[tuple[_Owned, _Owned]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = _owned(name, stages)
        first = owners.setdefault(parameter, own)
        found += [(first, own)] if first.stage != own.stage else []
    return found


def refuse_unlike_modules(model: nn.Module, stages: Stages, tied: Sequence[str] = ()) -> None:
    """Raise UserError where the stages do not name modules that have every parameter once, each stage a trained one.

    `tied`: those that the last stage has beside. They have no other parameters than those of its own modules.
    """
    modules = dict(cast("Any", model).named_modules())
    names = [name for stage in stages for name in stage]
    if unknown := next((name for name in names if name not in modules), None):
        raise UserError(f'pipeline.stages names "{unknown}", which is no module of a {type(model).__name__}')
    for first, other in _tied_across(model, stages):
        if other.stage != len(stages) - 1 or first.module not in tied:
            raise UserError(_tied_otherwise(first, other, stages))
    own = {p for module in stages[-1] for p in cast("Any", model).get_submodule(module).parameters()}
    for module in tied:
        if alone := next((name for name, p in modules[module].named_parameters() if p not in own), None):
            raise UserError(
                f"pipeline.tied names {module}, whose {alone} is no tensor of the last stage: name modules of which "
                "it has all"
            )
    trained: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = _owned(name, stages).stage
        if stage < 0:
            raise UserError(f"{name} is in no stage of the pipeline: name its module in pipeline.stages")
        trained.update([stage] if parameter.requires_grad else [])
    idle = [stage for stage in range(len(stages)) if stage not in trained]
    if idle:
        raise UserError(
            f"nothing of stage {idle[0]} of the pipeline is trained: give it modules that model.freeze leaves"
        )


def _tied_otherwise(first: _Owned, other: _Owned, stages: Stages) -> str:
    if none := next((one.name for one in (first, other) if one.stage < 0), None):
        return f"{none} is in no stage of the pipeline: name its module in pipeline.stages"
    why = (
        f"{first.name} and {other.name} are one tensor, and stage {first.stage} of the pipeline has the one and stage "
        f"{other.stage} the other"
    )
    if other.stage == len(stages) - 1:
        return f'{why}: add pipeline.tied = ["{first.module}"], so that both keep it'
    return f"{why}: weights are tied to those of the last stage only; set model.change.tie_word_embeddings = false"


def refuse_unlike_chain(graph: Graph, stages: Stages) -> None:
    """Raise UserError where the modules of the stages, as the whole model runs them, are no chain that can be cut.

    At a cut, what a module gives has to be what the next one takes first, and nothing else that is made in a stage, or
    of what is made there, may be taken in a later one.
    """
    runs = _runs(graph, stages)
    order = [name for stage in stages for name in stage]
    began = sorted(order, key=lambda name: runs[name].first)
    if began != order:
        late = next(a for a, b in zip(order, began, strict=True) if a != b)
        raise UserError(f'pipeline.stages names "{late}" out of turn: name modules in the order in which they run')
    for last, own in itertools.pairwise(stages):
        before, after = last[-1], own[0]
        given, taken = runs[before].gives, runs[after].takes
        if not given or not taken or given[0] is None or given[0] != taken[0]:
            raise UserError(
                f"what {before} gives is not what {after} takes: this version cuts into stages where one module hands "
                "its result on to the next, and nothing is done in between"
            )
    _refuse_other_ways(graph, stages, runs)


def _runs(graph: Graph, stages: Stages) -> Mapping[str, Run]:
    names = {name for stage in stages for name in stage}
    found: dict[str, Run] = {}
    for run in graph.runs:
        if run.module in names:
            if run.module in found:
                raise UserError(f"{run.module} runs twice in a forward: this version cuts no such model into stages")
            found[run.module] = run
    if missing := next((name for stage in stages for name in stage if name not in found), None):
        raise UserError(f"{missing} does not run in a forward of the model: leave it out of pipeline.stages")
    return found


def _by_shape(node: Node) -> bool:
    """Whether it takes no more of a tensor than its shape, type and device."""
    name = node.operator.overloadpacket.__name__
    return name.startswith("new_") or name.endswith("_like")


def _refuse_other_ways(graph: Graph, stages: Stages, runs: Mapping[str, Run]) -> None:
    """Values that a stage's modules make and those of a later one take, but for what is handed on at the cut.

    Code between modules runs in every stage, so what it makes is where all that it is made of is: token ids in the
    first stage, what a module gives in its own, what is handed on at a cut on both sides.
    """
    stage_of = {i: s for s, own in enumerate(stages) for name in own for i in range(runs[name].first, runs[name].stop)}
    handed = {runs[own[0]].takes[0]: s for s, own in enumerate(stages) if s}
    earliest: dict[int, float] = {v: 0 for v, value in enumerate(graph.values) if value.kind == "input"}
    for i, node in enumerate(graph.nodes):
        made, stage = math.inf, stage_of.get(i)
        for v in node.inputs if not _by_shape(node) else ():
            if stage is not None and earliest.get(v, math.inf) < stage - 0.5:
                raise UserError(
                    f"{node.module} (stage {stage}) takes a tensor that is made in stage {math.floor(earliest[v])}, "
                    "past the modules between them: put both into one stage"
                )
            made = min(made, earliest.get(v, math.inf))
        for v in node.results:
            if v is not None:
                earliest[v] = handed[v] - 0.5 if v in handed else made if stage is None else stage
    # what the last stage gives
    for name, v in graph.outputs.items():
        if name.endswith("logits") and earliest.get(v, math.inf) < len(stages) - 1.5:
            raise UserError(f"{name} is made of more than the last stage has: put the modules into one stage")
