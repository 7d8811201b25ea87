"""What the sweep once found, each in a case of its own; planted mistakes are seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from tangram.sharding.derive.marking.marks import Mark
from tangram.training.mesh.tensor_parallel import DerivedModel
from tangram.training.run.launch import run_ranks
from tests.sweep import modules, published
from tests.sweep.ranks import Case, Result, run_all
from tests.training.oracle.warm import once


class Elsewhere(nn.Module):
    """Code that reads what other modules have: a table for logits, and one of a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.more = nn.ParameterList([torch.randn(8, 8)])

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.middle(self.embed(ids)) @ self.more[0], self.embed.weight)


class Nested(nn.Module):
    """Results within results, as of a model of two towers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.embed(ids)
        inner = self.up(x)
        return {"logits": self.down(inner), "tower": {"hidden": inner.tanh()}, "hidden_states": (x, inner)}


class Begun(nn.Module):
    """Code that makes a module, whose weights begin by functions that write without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(nn.Linear(8, 8)(self.embed(ids)))


class Again(nn.Module):
    """A module of torch's own modules, as which nobody's code has lines, that is computed again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.reentrant = nn.Embedding(16, 8), reentrant
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Any, checkpoint)(self.inner, self.embed(ids), use_reentrant=self.reentrant)


def bare() -> nn.Module:
    """Torch's own modules and nothing around them: whoever calls it is the nearest line of code."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))


def bags(mode: str) -> nn.Module:
    """Bags of embeddings, and a layer above."""
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(16, 8, mode=mode), nn.Linear(8, 4))


def _ids(_: nn.Module) -> Mapping[str, Any]:
    return {"ids": torch.arange(16).view(4, 4)}


def _input(_: nn.Module) -> Mapping[str, Any]:
    return {"input": torch.arange(16).view(4, 4)}


def _marks(texts: Sequence[str], _: nn.Module, __: Mapping[str, Any]) -> list[Mark]:
    return [Mark.parse(text) for text in texts]


def _unsummed(held: DerivedModel) -> None:
    held.sums.through = lambda name, part: part  # type: ignore[method-assign]


def _same_masks(held: DerivedModel) -> None:
    """Each call draws what the first one drew."""
    model = held._model  # pyright: ignore[reportPrivateUsage]
    forward = model.forward

    def again(**inputs: Any) -> Any:
        torch.manual_seed(5)
        return forward(**inputs)

    model.forward = again


def _masks_left_out(held: DerivedModel) -> None:
    """Keys and values are not repeated for queries where attention makes the mask."""
    planned = held._planned  # pyright: ignore[reportPrivateUsage]

    def other(given: Mapping[str, Any]) -> Any:
        now = planned(given)
        vars(now.program)["cuts_queries"] = False
        return now

    held._planned = other  # type: ignore[method-assign]


CUT = ("embed.weight: v/tp h", "more.0: h/tp o")
GATHERED = ("embed.weight: v/tp h -> v h", "more.0: h/tp o -> h o")
AGAIN = ("inner.0.weight: o/tp i", "embed: b s/tp h")
LEFT_OUT = "was called when the model was captured, and is not now"
EQUAL = (
    "read elsewhere",
    "gathered elsewhere",
    "nested",
    "begun",
    "again",
    "again, reentrant",
    "bare",
    "bags, sum",
    "bags, mean",
    "phi3",
    "llava",
    "Fold",
)


def cases() -> list[Case]:
    """The task of the ranks."""
    (phi3, llava, gpt2), (fold,) = published.cases(["phi3", "llava", "gpt2"]), modules.cases(["Fold"])
    return [
        Case("read elsewhere", Elsewhere, _ids, partial(_marks, CUT)),
        Case("gathered elsewhere", Elsewhere, _ids, partial(_marks, GATHERED)),
        Case("nested", Nested, _ids, partial(_marks, ("up.weight: o/tp i", "up.bias: o/tp", "down.weight: o i/tp"))),
        Case("begun", Begun, _ids, partial(_marks, ("embed.weight: v/tp h",))),
        Case("again", partial(Again, False), _ids, partial(_marks, AGAIN)),
        Case("again, reentrant", partial(Again, True), _ids, partial(_marks, AGAIN)),
        Case("bare", bare, _input, partial(_marks, ("1.weight: o/tp i",))),
        *(
            Case(f"bags, {m}", partial(bags, m), _input, partial(_marks, ("0.weight: v h/tp",)))
            for m in ("sum", "mean")
        ),
        Case("unsummed", fold.model, fold.inputs, fold.marks, _unsummed),
        Case("same masks", gpt2.model, gpt2.inputs, gpt2.marks, _same_masks),
        Case("masks left out", phi3.model, phi3.inputs, phi3.marks, _masks_left_out),
        phi3,
        llava,
        fold,
    ]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return once(tmp_path_factory, "swept", lambda _: _run())


def _run() -> dict[str, Result]:
    (first, _) = run_ranks(run_all, cases, world=2, on_event=lambda _: None, device="cpu")
    return {one.name: one for one in first}


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_are_as_one_process(ran: dict[str, Result], name: str) -> None:
    assert ran[name] == Result(name, "equal")


def test_planted_mistakes_are_seen(ran: dict[str, Result]) -> None:
    assert ran["unsummed"].what == "wrong"
    assert ran["same masks"].what == "wrong"
    assert ran["same masks"].why.startswith(("train again", "gradient"))
    assert ran["masks left out"].what == "refused"
    assert LEFT_OUT in ran["masks left out"].why
