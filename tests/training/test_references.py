"""Modules that keep functions or tensors beside their parameters: run as one process runs them, or refused by name.

As x-transformers ties its logits (`self.to_logits = lambda t: t @ self.token_emb.emb.weight.t()`): deepcopy leaves the
function as it is, and what is captured is a copy.
"""

from __future__ import annotations

import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.models.building.aliases import refuse_aliases
from tangram.models.building.twin import without_memory
from tangram.models.capturing.called import named_results
from tangram.sharding.derive.marking.marks import Mark
from tangram.training.run.launch import run_ranks
from tests.sweep.ranks import Case, Result, run_all
from tests.training.oracle.warm import once

MARKS = ("up.weight: o/tp i", "down.weight: o i/tp", "emb.weight: v/tp h", "head.weight: o/tp i")


class Net(nn.Module):
    """Ends with what `give` makes of it and its hidden states."""

    def __init__(self, keep: Callable[[Any], None], give: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head, self.give = nn.Linear(8, 16, bias=False), give
        keep(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.give(self, self.down(torch.relu(self.up(self.emb(x)))))

    def by_method(self, t: Tensor) -> Tensor:
        return self.head(t)


def _to_head(m: Any, t: Tensor) -> Tensor:
    return m.head(t)


def _call(module: nn.Module, t: Tensor) -> Tensor:
    return module(t)


def _all_of(m: Any, t: Tensor) -> Tensor:
    for function in m.kept:
        t = function(t)
    return t


def _tie(m: Any) -> None:
    m.kept = lambda t: t @ m.emb.weight.t()


def _replace(m: Any) -> None:
    before = m.down.forward
    m.down.forward = lambda t: 2 * before(t)


def _nested(m: Any) -> None:
    def twice(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda t: function(t) * 2

    m.kept = {"a": (twice(lambda t: m.head(t)), 1)}


def _recursive(m: Any) -> None:
    def again(t: Tensor, turn: int = 0) -> Tensor:
        return m.head(t) if turn else again(t, 1)

    m.kept = again


def _hook(m: Any) -> None:
    m.down.register_forward_hook(lambda _, given, result: result + m.up(given[0][..., :8]).sum(-1, keepdim=True))


def _keep(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda m: vars(m).update(kept=make(m))


def _kept(m: Any, t: Tensor) -> Tensor:
    return m.kept(t)


class Frozen(dict[str, Any]):
    """As the configuration that diffusers' models keep."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")


def _names(m: Any, t: Tensor) -> Any:
    return {"x": m.head(t), "head": 2 * m.head(t), "up.weight": t, "table": m.up(t), "result.x": 3 * m.head(t)}


WORKS: Mapping[str, tuple[Callable[[Any], None], Callable[[Any, Tensor], Tensor]]] = {
    "a function that ties": (_tie, _kept),
    "a default": (_keep(lambda m: lambda t, own=m: own.head(t)), _kept),
    "a default of a keyword": (_keep(lambda m: lambda t, *, own=m: own.head(t)), _kept),
    "a method": (_keep(lambda m: m.by_method), _kept),
    "a list of functions": (_keep(lambda m: [lambda t: m.head(t), torch.relu]), _all_of),
    "nested functions": (_nested, lambda m, t: m.kept["a"][0](t)),
    "one that calls itself": (_recursive, _kept),
    "a partial of a module": (_keep(lambda m: partial(_call, m.head)), _kept),
    "a partial of a function": (_keep(lambda m: partial(lambda scale, t: m.head(t) * scale, 2.0)), _kept),
    "a list of modules": (_keep(lambda m: [m.head]), lambda m, t: m.kept[0](t)),
    "a weak reference": (_keep(lambda m: weakref.ref(m)), lambda m, t: m.kept().head(t)),
    "a forward around the own one": (_replace, _to_head),
    "a hook that calls another module": (_hook, _to_head),
    "what cannot be written": (_keep(lambda m: Frozen(turns=2, head=m.head)), lambda m, t: m.head(t) * m.kept["turns"]),
    "results whose names meet": (
        _keep(lambda m: None),
        lambda m, t: {1: m.head(t), "1": m.up(t), "a": {"b": t}, "a.b": 2 * t},
    ),
    "results in a container in a dict": (_keep(lambda m: None), lambda m, t: {"all": deque([m.head(t), 2 * t])}),
    # as diffusers' UNets, which take and give a `sample`: the mark that keeps a result whole was the input's
    "results with the names of others": (_keep(lambda m: m.register_buffer("table", torch.ones(2))), _names),
}


def _names(m: Any, t: Tensor) -> Any:
    return {"x": m.head(t), "head": 2 * m.head(t), "up.weight": t, "table": m.up(t), "result.x": 3 * m.head(t)}


def _weight(m: Any) -> Any:
    return m.head.weight


REFUSED: Mapping[str, tuple[Callable[[Any], None], str]] = {
    "a function of a weight": (lambda m: _closed(m, m.emb.weight), r"kept \(weight\) is the memory of emb\.weight"),
    "a list": (_keep(lambda m: [_weight(m)]), r"kept\[0\] is the memory of head\.weight"),
    "a tuple in a dict": (_keep(lambda m: {"a": (_weight(m),)}), r"kept\['a'\]\[0\] is the memory of head\.weight"),
    "a partial": (_keep(lambda m: partial(nn.functional.linear, weight=_weight(m))), r"kept is the memory of head\.w"),
    "an object": (_keep(lambda m: types.SimpleNamespace(w=_weight(m))), r"kept\.w is the memory of head\.weight"),
    "itself": (_keep(_weight), r"kept is the memory of head\.weight beside its name"),
    "a view": (_keep(lambda m: _weight(m).detach()[3:5]), r"kept is the memory of head\.weight beside its name"),
    "data that is shared": (lambda m: setattr(m.head.weight, "data", m.emb.weight.data), r"emb.weight and head.weight"),
}


def _closed(m: Any, weight: Tensor) -> None:
    m.kept = lambda t: t @ weight.t()


def _inputs(_: nn.Module) -> Mapping[str, Any]:
    return {"x": torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(1))}


def _cases() -> list[Case]:
    marks = [Mark.parse(mark) for mark in MARKS]
    works = {**WORKS, **{name: (keep, _to_head) for name, (keep, _) in REFUSED.items()}}
    return [Case(name, partial(Net, *work), _inputs, lambda *_: marks) for name, work in works.items()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Result]:
    def run(_: Path) -> Mapping[str, Result]:
        (found, _) = run_ranks(run_all, _cases, world=2, on_event=lambda _: None, device="cpu")
        return {one.name: one for one in found}

    return once(tmp_path_factory, "references", run)


@pytest.mark.parametrize("name", WORKS)
def test_functions_that_modules_keep_are_those_of_the_copy_in_a_copy(ran: Mapping[str, Result], name: str) -> None:
    assert (ran[name].what, ran[name].why) == ("equal", "")


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_beside_its_name_is_refused(ran: Mapping[str, Result], name: str) -> None:
    _, message = REFUSED[name]
    assert ran[name].what == "refused"
    assert re.search(message, ran[name].why)


def test_what_is_no_parameters_memory_is_not_refused() -> None:
    """Beside buffers: another part of the memory, the list of recurrent layers, and a weight that a hook renews."""
    flat = torch.zeros(24)
    model = nn.Sequential(nn.LSTM(4, 4), nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 3, bias=False))
    model[2].weight = nn.Parameter(flat[:12].view(3, 4))
    vars(model[2])["rest"] = flat[12:]
    model.register_buffer("table", torch.ones(3))
    vars(model)["again"] = [model.table]
    vars(model)["graph"] = torch.eye(3).to_sparse()
    refuse_aliases(model)


@pytest.mark.parametrize("hidden", [{torch.ones(2)}, iter([torch.ones(2)]), types.SimpleNamespace(x=torch.ones(2))])
def test_results_that_torch_does_not_see_are_refused(hidden: Any) -> None:
    for output in (hidden, [hidden], {"all": hidden}):
        with pytest.raises(UserError, match="whose tensors are not seen: give them in a tuple or a dict"):
            named_results(output)


def test_a_copy_has_nothing_of_the_model_and_the_model_keeps_its_own() -> None:
    model: Any = Net(_tie, _kept)
    before = model.kept
    twin: Any = without_memory(without_memory(model))
    assert twin(torch.zeros(2, 3, dtype=torch.long, device="meta")).is_meta
    assert model.kept is before
    assert before.__closure__[0].cell_contents is model
