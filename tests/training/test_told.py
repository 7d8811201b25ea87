"""What a model is told of its tokens, and the order it is given them in; plans that cannot be told so are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tangram.errors import UserError
from tangram.kernels.attention import Seen
from tangram.models.capturing.attention import numbers_of
from tangram.planner.local.show import rows
from tangram.schema.plan import Plan
from tangram.training.data import Batch
from tangram.training.objective.packing import balanced, model_inputs, token_order
from tests.training.small import small_tables, write_text
from tests.training.strategies import GATHERED

TABLES = {"mesh": "dp=1 cp=2", "axes": {"data": ["dp"], "context": ["cp"]}}
LAYOUTS = {"layouts": {"parameters": {"*": "..."}, "marks": GATHERED}}


def planned(folder: Path, **changes: Any) -> Plan:
    return Plan.model_validate({**small_tables(write_text(folder / "text")), **TABLES, **LAYOUTS, **changes})


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_equal_parts_have_as_much_to_attend_to(parts: int) -> None:
    length = 24 * parts
    order = balanced(length, parts)
    assert order.sort()[0].tolist() == [*range(length)]
    numbers = numbers_of(torch.arange(length)[None])[:, order]
    everything = slice(None)
    work = [int(Seen(part, numbers).mask(everything, everything).sum()) for part in numbers.chunk(parts, 1)]
    assert len({*work}) == 1
    in_order = numbers_of(torch.arange(length)[None])
    uneven = [int(Seen(part, in_order).mask(everything, everything).sum()) for part in in_order.chunk(parts, 1)]
    assert uneven[-1] > (2 * parts - 1) * uneven[0] * 0.9  # of what it is good for


class ByTokens(nn.Module):
    """A model of which nothing is asked but how it attends."""

    def __init__(self, attends: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=attends)


def test_labels_positions_and_numbers_go_with_their_tokens(tmp_path: Path) -> None:
    model = ByTokens("tangram_tokens")
    run = {**small_tables(write_text(tmp_path / "text"))["run"], "attention": "tokens"}
    tokens = token_order(model, planned(tmp_path, run=run, context={"order": "balanced"}))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    batch = Batch(torch.arange(8)[None], torch.arange(8)[None] + 100, positions)
    seen = model_inputs(tokens, batch)
    assert seen.batch.inputs_BS.tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
    assert (seen.batch.labels_BS - seen.batch.inputs_BS == 100).all()
    assert torch.equal(seen.in_order(seen.keywords["position_ids"]), positions)
    assert torch.equal(seen.in_order(seen.keywords["attention_mask"][:, 0]), numbers_of(positions))
    odd = model_inputs(tokens, Batch(torch.arange(6)[None], torch.arange(6)[None], None))  # no four equal pieces
    assert odd.order is None
    assert odd.keywords["attention_mask"].shape == (1, 1, 6, 2)


def test_what_is_shown_of_it(tmp_path: Path) -> None:
    run = {**small_tables(write_text(tmp_path / "text"))["run"], "attention": "tokens"}
    said = dict(rows(planned(tmp_path, run=run, context={"keys": "ring", "order": "balanced"})))
    ways = "keys go round over cp; tokens in a balanced order"
    assert said["attention"] == f"by documents and places of tokens; {ways}"


@pytest.mark.parametrize(("attends", "said"), [("sdpa", "does not attend by tokens"), ("tangram_tokens", "attends")])
def test_a_model_that_attends_otherwise_than_planned(tmp_path: Path, attends: str, said: str) -> None:
    usual = small_tables(write_text(tmp_path / "text"))["run"]
    plan = planned(tmp_path, run={**usual, "attention": "tokens" if attends == "sdpa" else "model"})
    with pytest.raises(UserError, match=said):
        token_order(ByTokens(attends), plan)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context": {"keys": "ring"}}, 'set run.attention = "tokens"'),
        ({"context": {"order": "balanced"}}, '"balanced" needs attention by tokens'),
        ({"context": {"keys": "around"}}, "keys"),
        (
            {"context": {"order": "balanced"}, "tokens": True, "sequence": 30},
            "no 4 equal pieces.*take 32",
        ),
        (
            {"context": {"keys": "ring"}, "tokens": True, "mesh": "dp=2", "axes": {"data": ["dp"]}, "marks": False},
            "axes.context names none",
        ),
    ],
)
def test_plans_that_cannot_be(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    tables = small_tables(write_text(tmp_path / "text"))
    if changes.pop("tokens", False):
        changes["run"] = {**tables["run"], "attention": "tokens"}
    if "sequence" in changes:
        changes["data"] = {**tables["data"], "sequence": changes.pop("sequence")}
    if not changes.pop("marks", True):
        changes["layouts"] = {"parameters": {"*": "..."}}
    with pytest.raises(ValidationError, match=said):
        planned(tmp_path, **changes)
