"""The counter of `tangram bench memory`, and the bench itself."""

import json

import pytest
import torch

from bench._memory.counter import FlowCounter
from tangram.cli import main


def test_what_operators_make_is_counted_until_it_is_gone() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with FlowCounter([weight]) as counter:
        one = weight * 2  # 4,000 bytes
        two = one.view(10, 100)  # a view
        weight.data.mul_(1.0)  # in place
        three = two.exp()  # 4,000 more, which the backward keeps
        assert counter.flow.now == 8000
        del one, two
        assert counter.flow.now == 4000
        three.sum().backward()
    assert counter.flow.peaks["forward"] == 8000
    assert counter.flow.peaks["backward"] >= 8000
    assert counter.flow.peaks["update"] == 0
    assert weight.grad is not None
    del three
    assert counter.flow.now == weight.grad.nbytes


def test_what_is_taken_from_a_storage_does_not_count() -> None:
    """As FSDP takes away what it has gathered, and gives it back."""
    with FlowCounter([]) as counter:
        one = torch.ones(1000)
        one.untyped_storage().resize_(0)
        assert counter.flow.now == 0
        two = torch.ones(500)
        assert counter.flow.peaks["forward"] == 4000
        one.untyped_storage().resize_(4000)
        one.fill_(1.0)
        assert counter.flow.peaks["forward"] == counter.flow.now == 4000 + two.nbytes


@pytest.mark.slow
def test_the_bench_predicts_states(capsys: pytest.CaptureFixture[str]) -> None:
    rounded = "AdamW in bfloat16, rounded stochastically"
    policies = ("AdamW in float32", "AdamW in 8 bits", rounded, "LoRA on NF4")
    words = [word for name in policies for word in ("--only", name)]
    assert main(["bench", "memory", "--quick", "--repeats", "1", *words, "--json"]) == 0
    rows = {row["figure"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["LoRA on NF4: states"]["ours"] < 0.25 * rows["AdamW in float32: states"]["ours"]
    assert rows["AdamW in 8 bits: states"]["ours"] < 0.6 * rows["AdamW in float32: states"]["ours"]
    assert rows[f"{rounded}: states"]["ours"] < 0.51 * rows["AdamW in float32: states"]["ours"]
    for policy in policies:
        assert rows[f"{policy}: states, prediction off by"]["met"]
