"""An operator of a user's own, from nothing to training: discovered, its rule in a file, sharded, run on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tangram.cli import main
from tangram.errors import UserError
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.discover import own_rules
from tangram.training.mesh.eager_marks import eager
from tangram.training.mesh.tensor_parallel import parallel
from tangram.training.run.launch import Rank, run_ranks
from tests.training import own_operator
from tests.training.small import SMALL_MODEL, plan_file, write_text

OPERATOR, FILE = "tangram_gate::gated", own_operator.__file__
LINE = "tangram_gate.gated : a _, _ b, _ b -> a b ; each(2)"
ACT = "tangram_gate.act : ... -> ..."


def _input() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def _plain(model: nn.Module) -> dict[str, list[float]]:
    """Three steps of descent on one process."""
    steps = [_step(model, model(_input()).square().mean()) for _ in range(3)]
    return {"losses": steps, **_values(model)}


def _step(model: nn.Module, loss: Tensor) -> float:
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad  # pyright: ignore
            p.grad = None
    return float(loss.detach())


def _values(model: nn.Module) -> dict[str, list[float]]:
    whole = {name: getattr(p, "full_tensor", p.detach)() for name, p in model.named_parameters()}
    return {name: x.detach().flatten().tolist() for name, x in whole.items()}


def run_both(rank: Rank, rules: str) -> dict[str, dict[str, list[float]]]:
    """Both ways on ranks: derived from a graph, and as it runs."""
    devices, marks = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), [Mark.parse("w: i o/tp")]
    one, other = own_operator.Net(), own_operator.Net()
    parallel(one, marks, devices, {"x": _input()}, rules=rules)
    found = {"captured": {"losses": [_step(one, one(_input()).square().mean()) for _ in "123"]}}
    found["captured"] |= _values(one)
    own = [*marks, Mark.parse("v: i o/tp"), Mark.parse("down: o/tp i")]
    held, losses = eager(other, devices, own, rules=rules), list[float]()
    for _ in "123":
        with held:
            loss = held.session.full_tensor(other(_input()).square().mean())
        losses.append(_step(other, loss))
    found["as it runs"] = {"losses": losses, **_values(other)}
    found["proved here"] = {"often": [float(own_rules._prove_drawn.cache_info().misses)]}  # pyright: ignore
    for way in (
        lambda: eager(own_operator.Net(), devices, own, rules=f"{rules}.wrong"),
        lambda: parallel(own_operator.Net(), marks, devices, {"x": _input()}, rules=f"{rules}.wrong"),
    ):
        try:
            way()
        except UserError as error:
            found.setdefault("refused", {}).setdefault(str(error), []).append(0.0)
    return found


def test_from_discovery_to_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "own.rules"
    assert main(["shard", "discover", OPERATOR, "--samples", f"{FILE}:calls"]) == 0
    rules.write_text(capsys.readouterr().out)
    assert rules.read_text().strip() == LINE
    (tmp_path / "own.rules.wrong").write_text("tangram_gate.gated : a _, a b, _ b -> a b")
    given = ["shard", f"{FILE}:model", "--mesh", "tp=2", "--mark", "w: i o/tp", "--json"]
    assert main(given) == 2
    assert "there is no rule for tangram_gate.gated" in capsys.readouterr().err
    assert main([*given, "--rules", str(rules), "--samples", f"{FILE}:calls"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == {
        "w": "_=8 _=16/tp",
        "v": "_=8 _=16/tp",
        "down": "_=16/tp _=8",
    }
    want = _plain(own_operator.Net())
    ranks = [*run_ranks(run_both, str(rules), world=2, on_event=lambda _: None, device="cpu")]
    assert [own.pop("proved here")["often"] for own in ranks] == [[1.0], [0.0]], "once, by the first rank"
    refused = [own.pop("refused") for own in ranks]
    assert refused[0] == refused[1], "one sentence on all ranks, and in both ways"
    ((sentence, times),) = refused[0].items()
    assert "the rule of tangram_gate::gated is wrong" in sentence
    assert len(times) == 2
    for own in ranks:
        for way, found in own.items():
            for name, values in want.items():
                assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-6), (way, name)


def test_a_job_trains_a_model_with_the_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_text(tmp_path / "text")
    rules = tmp_path / "own.rules"
    rules.write_text(ACT)
    change = {**SMALL_MODEL, "hidden_act": "tangram_gate_act"}
    marks = {
        "parameters": {"*.gate_proj.weight": "_/tp _", "*.up_proj.weight": "_/tp _", "*.down_proj.weight": "_ _/tp"},
        "marks": {"*.gate_proj.weight": "o/tp i"},
    }
    marks["parameters"]["*"] = "..."
    losses: dict[str, dict[str, float]] = {}
    for name, mesh, axes, layouts in (
        ("one", "dp=1", {"data": ["dp"]}, {"parameters": {"*": "..."}}),
        ("two", "tp=2", {"data": [], "tensor": ["tp"]}, marks),
    ):
        model = {"preset": "qwen3-1m", "change": change, "code": FILE, "rules": "own.rules"}
        plan = plan_file(tmp_path / f"{name}.toml", text, mesh=mesh, axes=axes, layouts=layouts, model=model)
        code, shown = main(["train", str(plan), "--out", str(tmp_path / name), "--json"]), capsys.readouterr()
        assert code == 0, shown.err
        losses[name] = json.loads(shown.out)
    for key in ("train_loss", "eval_loss"):
        assert losses["two"][key] == pytest.approx(losses["one"][key], rel=1e-5)
    rules.write_text("tangram_gate.act : a b -> a")
    assert main(["train", str(tmp_path / "two.toml"), "--out", str(tmp_path / "no")]) == 2
    assert "the rule of tangram_gate::act is wrong" in capsys.readouterr().err
