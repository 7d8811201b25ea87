"""The example of a whole chain: two meshes, an adapter, a merge and an export, with digests that prove what stayed."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.checkpoint.saving.rank_parts import About
from tangram.layout import Mesh, region
from tangram.planner.legality.check_plan import bound_layout
from tangram.schema.files import load as read_plan
from tests.checkpoint.making import make

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "chain.py"


@pytest.fixture(scope="module")
def chain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chain", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # transformers of peft
def test_from_what_eight_ranks_have_saved_to_what_generates(
    tmp_path: Path, chain: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the training: the pieces are those of the example's first mesh."""
    config = AutoConfig.for_model(**chain.MODEL)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(config)
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    (tmp_path / "wide.toml").write_text(chain.WIDE.format(experts=2) + chain.JOB.format(folder=tmp_path, steps=1))
    plan: Any = read_plan(tmp_path / "wide.toml")
    mesh = Mesh.parse(plan.mesh)
    cuts = {
        f"model.{name}": list(dict.fromkeys(region(bound_layout(plan, name, p.shape), mesh, rank) for rank in range(8)))
        for name, p in model.named_parameters()
    }
    cuts = {name: [one for one in held if one] for name, held in cuts.items()}  # what other stages have
    assert len(cuts["model.model.layers.0.mlp.experts.down_proj"]) == 4
    beside = {"config.json": (tmp_path / "config.json").read_text()}
    make(tmp_path / "trained", tensors, cuts, writers=8, about=About(beside=beside))

    chain.tune(tmp_path, tmp_path / "trained")
    assert "merged: 6 tensors with an adapter; 19 others have the digests of trained" in capsys.readouterr().out
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    saved = chain.digests(tmp_path / "trained")
    down = merged["model.layers.1.mlp.experts.down_proj"]
    assert chain.digest_of(down) == saved["model.layers.1.mlp.experts.down_proj"]
    down[7, 31, 23] = down[7, 31, 23].nextafter(torch.tensor(9.0))
    assert chain.digest_of(down) != saved["model.layers.1.mlp.experts.down_proj"]  # a proof that can fail


@pytest.mark.slow
def test_the_example_runs_as_it_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "chain"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained: pp=2 ep=2 tp=2, then dp=2; not changed: the 3 frozen tensors of 25" in done.stdout
    assert "merged: 6 tensors with an adapter; 19 others have the digests of step-00000002" in done.stdout
    assert re.search(r"generated: \[\d+(, \d+){15}\]", done.stdout)
