"""What docs/extending.md tells people to write is taken from the page and tried."""

import json
import re
import tomllib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.cli import main
from tangram.hardware.catalogue.devices import tables
from tangram.hardware.measuring.rates import WHOLE, catalogue
from tangram.models.building import build
from tangram.models.building.build import build_on_meta, make_config
from tangram.models.building.code import run_code
from tangram.planner.local import derived_layouts, strategies
from tangram.planner.local import rank as ranking
from tangram.planner.local.own_rules import rules_of
from tangram.schema import schedules
from tangram.schema.job import Job
from tangram.schema.schedule_table import Action, check, simulate
from tangram.sharding.derive.marking.marks import Mark
from tangram.training.data.files import TextRow, text_of
from tests.house.doc_blocks import Block, commands_of
from tests.planner.machine import rates

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def block(kind: str, holds: str) -> str:
    """The one block of code on the page that holds some words."""
    (found,) = [text for text in re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL) if holds in text]
    assert found.count("\n") < 20
    return found


def test_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    added = tomllib.loads(block("toml", "# presets.toml"))
    known = {**build.presets(), **added}
    monkeypatch.setattr(build, "presets", lambda: known)
    (name,) = added
    model = build_on_meta(make_config(name, {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}))
    assert f"{sum(one.numel() for one in model.parameters()) / 1e6:.0f}m" == name.rpartition("-")[2]


def test_marks_of_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"d_model": 32, "ffn_dim": 64, "max_position_embeddings": 64, "num_layers": 2, "attention_heads": 4}
    config: Any = AutoConfig.for_model("xglm", **more, vocab_size=64, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = build_on_meta(config)
    graph = derived_layouts.sample_graph(model, 16, torch.float32)

    def cut() -> set[str]:
        found = derived_layouts.tensor_layouts(config, model, graph, ("tp", 2), None)
        assert isinstance(found, derived_layouts.TensorLayouts), found
        return {name.rpartition(".layers.*.")[2] for name in found.parameters}

    assert not any("fc" in name for name in cut())
    marks = [Mark.parse(line) for line in block("text", "# xglm.marks").splitlines()[1:]]
    monkeypatch.setattr(derived_layouts, "marks_known_for", lambda model: {"xglm": marks}[model.config.model_type])
    assert cut() >= {"fc1.weight", "fc2.weight", "self_attn.out_proj.weight", "model.embed_tokens.weight"}


def test_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(schedules.MAKERS)
    names = {"Action": Action, "Maker": schedules.Maker, "MAKERS": known}
    exec(block("python", '"LastFirst"'), names)  # noqa: S102  the page's own words
    monkeypatch.setattr(schedules, "MAKERS", known)
    for ranks, micros in ((1, 1), (2, 3), (4, 8)):
        table = schedules.schedule("LastFirst", ranks, ranks, micros)
        assert check(table) == []
        assert max(simulate(table).alive) == micros


def test_a_device() -> None:
    (added,) = tomllib.loads(block("toml", "# devices.toml")).values()
    kinds = {key: type(value) for known in tables().values() for key, value in known.items()}
    assert {key: type(value) for key, value in added.items()}.items() <= kinds.items()
    assert all(set(known) & set(added) >= WHOLE for known in catalogue().values())


def test_a_kind_of_source(tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "Path": Path,
        "BinaryIO": BinaryIO,
        "Generator": Generator,
        "TextRow": TextRow,
        "text_of": text_of,
    }
    exec(block("python", "line_rows"), names)  # noqa: S102
    path = tmp_path / "a.log"
    path.write_text("first\n\nthird\n")
    for first, expected in enumerate(([(0, b"first"), (1, b""), (2, b"third")], [(1, b""), (2, b"third")])):
        with path.open("rb") as stream:
            rows = [(row.number, row.text) for row in names["line_rows"](path, stream, "text", first)]
        assert rows == expected


def test_an_op_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(f"import torch\n{block('python', 'own::gated')}{block('python', '# own.py, further')}")
    given = ["own::gated", "--samples", "own.py:calls"]
    assert main(["shard", "discover", *given]) == 0
    line = capsys.readouterr().out
    assert line in block("console", "shard discover own::gated")
    Path("own.rules").write_text(line)
    assert main(["shard", "check", *given, "--rules", "own.rules"]) == 0
    assert "proved" in capsys.readouterr().out
    (shard,) = commands_of(Block("extending.md", 1, "console", block("console", "shard own.py:model")))
    assert main([*shard.arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == dict.fromkeys("wv", "_=8 _=16/tp")
    keys = tomllib.loads(block("toml", "model.rules"))["model"]
    data = {"sources": [{"path": "stdlib"}], "sequence": 16, "global_batch": 8}
    job = {"model": {"preset": "qwen3-2m", **keys}, "data": data, "optimiser": {"lr": 1e-3}, "run": {"steps": 3}}
    assert rules_of(Job.model_validate(job)) == line.strip()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        names = {"devices": init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), "x": torch.randn(4, 8)}
        exec(block("python", 'rules="own.rules"'), {**run_code("own.py", "own"), **names})  # noqa: S102
    finally:
        torch.distributed.destroy_process_group()


def test_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("python", "Strategy(")
    names: dict[str, Any] = {"Strategy": strategies.Strategy, "TENSOR": strategies.TENSOR}
    exec(f"def added():\n    {code}", names)  # noqa: S102

    def some(processes: int) -> Iterator[Any]:
        yield from names["added"]()

    monkeypatch.setattr(ranking, "_strategies", some)
    change = {**SMALL, "head_dim": 8, "num_key_value_heads": 2}
    job = Job.model_validate(
        {
            "model": {"preset": "qwen3-2m", "change": change},
            "data": {"sources": [{"path": "stdlib"}], "sequence": 16, "global_batch": 8},
            "optimiser": {"lr": 1e-3},
            "run": {"steps": 3},
        }
    )
    found = ranking.rank(job, 8, rates(8), make_config("qwen3-2m", change))
    assert {(one.name, one.mesh, one.why_not) for one in found} == {("HSDP x TP", "dp=2 fsdp=2 tp=2", "")}


def test_a_family_of_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the page types gives what it shows, but for how fast it was."""
    monkeypatch.chdir(tmp_path)
    config: Any = AutoConfig.for_model(
        "arcee", **SMALL | {"vocab_size": 128, "intermediate_size": 48}, num_key_value_heads=2, head_dim=16
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained("arcee")
    empty, whole = block("console", "printf"), block("console", "family core arcee.toml")
    (line, *shown) = empty.splitlines(keepends=True)
    Path("arcee.toml").write_text(line.split("'")[1].replace("\\n", "\n"))
    typed(shown, capsys)
    Path("arcee.toml").write_text(block("toml", "# arcee.toml"))
    typed(whole.splitlines(keepends=True), capsys)
    loaded = AutoModelForCausalLM.from_pretrained("back").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def typed(lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Commands after `$ tangram`, each with what it prints; 1 where something does not fit."""
    capsys.readouterr()
    for text in "".join(lines).removeprefix("$ tangram ").split("$ tangram "):
        command, _, shown = text.partition("\n")
        code = main(command.split())
        said, wanted = (re.sub(r"[\d.]+ [KMG]B/s", "N/s", one) for one in (capsys.readouterr().out, shown))
        assert said == wanted
        assert code == ("it does not fit" in said)
