"""The proof as the command runs it: in children that may crash, over samples of torch's own; and planted mistakes."""

import json
import os
import signal
from collections.abc import Callable

import pytest
import torch

from tangram.cli import main
from tangram.hardware.host import workers
from tangram.hardware.host.channel import Json
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import RuleTable, builtin, parse_lines
from tangram.sharding.proof.mutate import mutations, planted
from tangram.sharding.proof.prove import prove_operator

aten = torch.ops.aten
X = torch.arange(30.0, dtype=torch.float64).reshape(6, 5).sin()
CALLS = {
    "mm": [OpCall.of(aten.mm.default, (X, X.T.contiguous()), {})],
    "addmm": [OpCall.of(aten.addmm.default, (X[0], X, torch.ones(5, 5, dtype=torch.float64)), {})],
    "cumsum": [OpCall.of(aten.cumsum.default, (X, 1), {})],
    "mean.dim": [OpCall.of(aten.mean.dim, (X, [0]), {})],
    "_softmax": [OpCall.of(aten._softmax.default, (X, 1, False), {})],
    "native_layer_norm": [OpCall.of(aten.native_layer_norm.default, (X, [5], X[0], X[1], 1e-5), {})],
    "embedding": [OpCall.of(aten.embedding.default, (X, torch.tensor([[0, 5, 3], [2, 2, 4]]), 4), {})],
}


@pytest.mark.parametrize("name", CALLS)
def test_each_planted_mistake_is_found(name: str) -> None:
    table = builtin()
    line = table.find(CALLS[name][0])
    assert line is not None
    assert prove_operator(table, name, CALLS[name]).kind == "proved"
    tried = 0
    for what, rule in mutations(line.rule):
        if "filled" not in what:  # which needs operators that refuse tensors of nothing
            verdict = prove_operator(planted(table, line, rule), name, CALLS[name])
            assert verdict.kind == "refuted", (what, str(rule))
            tried += 1
    assert tried


def test_a_verdict_says_what_has_no_rule_or_no_fit() -> None:
    assert prove_operator(RuleTable(), "mm", CALLS["mm"]).kind == "no rule"
    misfit = RuleTable().with_lines(parse_lines("mm : a b c -> a"))
    verdict = prove_operator(misfit, "mm", CALLS["mm"])
    assert verdict.kind == "refuted"
    assert "has a in a result and in no tensor given" in verdict.why


def _crash() -> Json:
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def _raise() -> Json:
    raise ValueError


def _hang() -> Json:
    signal.pause()
    return None


@pytest.mark.parametrize("act", [_crash, _raise, _hang])
def test_a_child_that_ends_otherwise_costs_nothing(act: Callable[[], Json]) -> None:
    assert workers.forked(act, 0.5) is None
    assert workers.forked(lambda: {"a": [1, 2]}, 10.0) == {"a": [1, 2]}


def test_the_command_proves_some_operators(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("expecttest")
    assert main(["shard", "check", "mm", "amax", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["proved"]
    assert {v["operator"]: v["kind"] for v in found["operators"]} == {
        "mm": "proved",
        "amax": "proved",
        "amax in steps": "proved",
    }
    assert main(["shard", "check", "no_such"]) == 2
    assert "no sample of torch's database reaches an operator no_such" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["matmul", "linear", "einsum", "layer_norm", "matmul.default"])
def test_of_an_operator_that_torch_takes_apart_it_is_said_at_once(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "run", _raise)  # no process runs torch's database
    assert main(["shard", "check", name]) == 2
    assert f"torch takes {name} apart into other operators" in capsys.readouterr().err


def test_the_command_shows_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shard", "rule", "sum"]) == 0
    shown = capsys.readouterr().out
    assert "sum.dim_IntList" in shown
    assert "sum:{dim}" in shown
    assert main(["shard", "rule", "no_such"]) == 2
    assert "torch has no operator aten.no_such" in capsys.readouterr().err
