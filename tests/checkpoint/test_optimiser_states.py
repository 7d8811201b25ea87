"""Optimiser states go along with their parameters between formats, by the peers' own optimisers and readers."""

import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.loading.load import load
from tangram.checkpoint.loading.scatter import holds
from tangram.checkpoint.saving.save import save as save_own
from tangram.cli import main
from tangram.errors import UserError
from tests.checkpoint.peers.megatron_optimiser import SETTINGS
from tests.checkpoint.peers.models import save

ROOT = Path(__file__).parents[2]


def megatron(name: str, folder: Path, *options: object) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.peers.megatron_optimiser", name, *options]
    command += ["--meet", folder / f"meet-{len(list(folder.iterdir()))}"]
    done = subprocess.run([str(one) for one in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def convert(*arguments: object) -> None:
    assert main(["checkpoint", "convert", *map(str, arguments)]) == 0


def values_of(source: OpenCheckpoint) -> dict[str, Tensor]:
    found = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in source.specs.items()}
    for piece in source.pieces:
        box = tuple(slice(a, b) for ((a, b),) in piece.region.boxes[0]) if piece.region.boxes else ()
        found[piece.tensor][box] = source.read(piece.place, piece.tensor)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "ep"),
    [("qwen3", "float32", 1), ("qwen3", "bfloat16", 1), ("qwen3_moe", "float32", 1), ("qwen3_moe", "float32", 2)],
)
def test_megatrons_distributed_optimiser_here_and_back(tmp_path: Path, name: str, dtype: str, ep: int) -> None:
    """Three steps of theirs are torch's three steps; what is written for them they load, and save the same again.

    Experts that are cut over ranks have an optimiser of their own there.
    """
    model: Any = save(name, tmp_path / "hf", dtype=getattr(torch, dtype))
    core, three, again = (tmp_path / one for one in ("core", "three", "again"))
    ranks = ["--tp", 2, "--ep", ep, "--dtype", dtype]
    local = ["--to", "torch_dist", "--transformer-impl", "local"]
    convert(tmp_path / "hf", core, *local)
    megatron(name, tmp_path, *ranks, "--load", core, "--steps", 3, "--save", three)
    convert(three, tmp_path / "own", "--to", "tangram", "--config", tmp_path / "hf")
    assert main(["checkpoint", "verify", str(tmp_path / "own")]) == 0
    own = values_of(open_any(tmp_path / "own"))
    for key, value in trained(model, 3).items():
        assert value.dtype == own[key].dtype, key
        torch.testing.assert_close(own[key], value, rtol=1e-6, atol=1e-9)

    convert(tmp_path / "own", again, *local, *(["--one-optimiser"] if ep == 1 else []))
    assert same(values_of(open_any(again)), values_of(open_any(three)))
    megatron(name, tmp_path, *ranks, "--load", again, "--states", "--save", tmp_path / "on")
    on = values_of(open_any(tmp_path / "on"))
    assert same(on, values_of(open_any(three)))
    assert float(on["output_layer.weight.step"]) == 3


def trained(model: Any, steps: int) -> dict[str, Tensor]:
    """Weights and states after steps of torch's AdamW on float32 copies, as megatron-core's peer script takes them."""
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in model.named_parameters()}
    optimiser = torch.optim.AdamW(masters.values(), **SETTINGS, foreach=False)
    for _ in range(steps):
        for name, p in model.named_parameters():
            masters[name].grad = 0.5 * masters[name].detach().to(p.dtype).sign().float()
        optimiser.step()
    found = {name: masters[name].detach().to(p.dtype) for name, p in model.named_parameters()}
    if model.dtype != torch.float32:
        found |= {f"{name}.master": p.detach() for name, p in masters.items()}
    return found | {f"{n}.{key}": value for n, p in masters.items() for key, value in optimiser.state[p].items()}


def stepped(name: str = "llama", folder: Path | None = None) -> tuple[Any, torch.optim.AdamW]:
    """A model and its optimiser after two steps."""
    assert folder is not None
    model: Any = save(name, folder)
    optimiser = torch.optim.AdamW(model.parameters(), **SETTINGS)
    for _ in range(2):
        for p in model.parameters():
            p.grad = 0.5 * p.detach().sign() + 0.25 * p.detach()
        optimiser.step()
    return model, optimiser


def test_states_are_fused_as_their_parameters_are_and_come_back(tmp_path: Path) -> None:
    model, optimiser = stepped("llama", tmp_path / "hf")
    save_own({"model": model, "optim": optimiser}, tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "core", "--to", "torch_dist", "--config", tmp_path / "hf")
    core = values_of(open_any(tmp_path / "core"))
    own = values_of(open_any(tmp_path / "own"))
    at = "model.layers.1.self_attn"
    q, k, v = (own[f"{at}.{x}_proj.weight.exp_avg_sq"].view(2, -1, 16, 32) for x in "qkv")
    fused = torch.cat([q, k, v], 1).reshape(128, 32)
    assert torch.equal(core["decoder.layers.1.self_attention.linear_qkv.weight.exp_avg_sq"], fused)
    assert torch.equal(core["output_layer.weight.master"], own["lm_head.weight"])
    assert float(core["output_layer.weight.step"]) == 2

    convert(tmp_path / "core", tmp_path / "back", "--to", "tangram", "--shard-size", "100KB")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    assert main(["checkpoint", "verify", str(tmp_path / "back")]) == 0
    back = values_of(open_any(tmp_path / "back"))
    assert same(back, own)  # Megatron's copies of float32 parameters were compared, and are gone
    again, fresh = stepped("llama", tmp_path / "other")
    for p in again.parameters():
        p.data.zero_()
        fresh.state[p]["exp_avg"].zero_()
    load({"model": again, "optim": fresh}, tmp_path / "back")
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(value, fresh.state[q][key]) for key, value in optimiser.state[p].items())
    trail = json.loads((tmp_path / "back" / "provenance.json").read_text())
    assert (trail["from"], trail["before"]["from"]) == ("torch_dist", "tangram")


def test_torchs_own_checkpoint_of_a_model_and_its_optimiser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimiser = stepped("llama", tmp_path / "hf")
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimiser)}
    with warnings.catch_warnings():  # torch says that there is one process only
        warnings.simplefilter("ignore")
        torch_checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = open_any(tmp_path / "dcp")
    assert set(found.states) == {"exp_avg", "exp_avg_sq", "step"}
    expected = {name: value.detach() for name, value in model.named_parameters()}
    for name, p in model.named_parameters():
        expected |= {f"{name}.{key}": value for key, value in optimiser.state[p].items()}
    assert same(values_of(found), expected)

    capsys.readouterr()
    convert(tmp_path / "dcp", tmp_path / "core", "--to", "torch_dist", "--config", tmp_path / "hf")
    assert "settings of the optimiser are not known" in capsys.readouterr().out
    (tmp_path / "job.toml").write_text("[optimiser]\nlr = 0.5\nbetas = [0.8, 0.9]\n")
    options = ["--config", tmp_path / "hf", "--optimiser", tmp_path / "job.toml"]
    convert(tmp_path / "dcp", tmp_path / "known", "--to", "torch_dist", *options)
    assert "not known" not in capsys.readouterr().out
    assert open_any(tmp_path / "known").objects["settings"] == {"lr": 0.5, "betas": [0.8, 0.9]}
    convert(tmp_path / "core", tmp_path / "again", "--to", "tangram")
    convert(tmp_path / "again", tmp_path / "theirs", "--to", "dcp")
    blank = {"optimizer": {"state": {n: {k: torch.zeros_like(v) for k, v in optimiser.state[p].items()}
                                     for n, p in model.named_parameters()}}}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_checkpoint.load(blank, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for name, p in model.named_parameters():
        assert all(torch.equal(blank["optimizer"]["state"][name][k], v) for k, v in optimiser.state[p].items())


def test_what_cannot_go_along_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimiser = stepped("llama", tmp_path / "hf")
    save_own({"model": model, "optim": optimiser}, tmp_path / "own")
    capsys.readouterr()
    convert(tmp_path / "own", tmp_path / "alone", "--to", "dcp", "--model-only")
    assert "63 tensors of optimiser states not converted" in capsys.readouterr().out
    optimiser.state[model.lm_head.weight]["step"] += 1
    save_own({"model": model, "optim": optimiser}, tmp_path / "later")
    arguments = ["--to", "torch_dist", "--config", str(tmp_path / "hf")]
    assert main(["checkpoint", "convert", str(tmp_path / "later"), str(tmp_path / "x"), *arguments]) == 2
    assert "Megatron-core has one step for all parameters" in capsys.readouterr().err
    optimiser.state[model.lm_head.weight]["step"] -= 1
    del optimiser.state[model.model.layers[0].self_attn.k_proj.weight]
    save_own({"model": model, "optim": optimiser}, tmp_path / "less")
    assert main(["checkpoint", "convert", str(tmp_path / "less"), str(tmp_path / "x"), *arguments]) == 2
    assert "the first that is missing is model.layers.0.self_attn.k_proj.weight.exp_avg" in capsys.readouterr().err
    assert (
        main(["checkpoint", "convert", str(tmp_path / "own"), str(tmp_path / "x"), *arguments, "--dtype", "bfloat16"])
        == 2
    )
    assert "of which bfloat16 would lose bits: add --round" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


HELD = {
    "float8_e4m3fn": ("float16", "bfloat16"), "float8_e5m2": ("float16", "bfloat16"),
    "float8_e4m3fnuz": ("float16", "bfloat16"), "float8_e5m2fnuz": ("float16", "bfloat16"),
    "float16": (), "bfloat16": (), "float32": (), "float64": (),
}  # fmt: skip
"""Of each type the other ones of at most 16 bits that have all its numbers."""


def test_which_types_hold_which_numbers() -> None:
    for narrow, wide in itertools.product(HELD, HELD):
        larger = wide in ("float32", "float64") and getattr(torch, wide).itemsize > getattr(torch, narrow).itemsize
        assert holds(wide, narrow) == (wide == narrow or wide in HELD[narrow] or larger), (wide, narrow)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_as_a_module_has_them_go_to_megatron_and_back(name: str, tmp_path: Path) -> None:
    """What Tangram has trained has transformers' names in memory: experts in one tensor, states too."""
    model, optimiser = stepped(name, tmp_path / "hf")
    save_own({"model": model, "optim": optimiser}, tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "core", "--to", "torch_dist", "--config", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "direct", "--to", "torch_dist")
    core, direct = values_of(open_any(tmp_path / "core")), open_any(tmp_path / "direct").specs
    assert direct == {n: s for n, s in open_any(tmp_path / "core").specs.items() if n in direct}
    experts = next(n for n in direct if n.endswith("layers.1.mlp.experts.experts.linear_fc1.weight"))
    own = dict(model.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(core[experts], own)
    assert torch.equal(core[f"{experts}.exp_avg"], optimiser.state[own]["exp_avg"])
    convert(tmp_path / "core", tmp_path / "back", "--to", "tangram")
    assert same(values_of(open_any(tmp_path / "back")), values_of(open_any(tmp_path / "own")))


@pytest.mark.parametrize(
    ("optimiser", "found"),
    [
        ({"param_groups": [{"lr": torch.tensor(0.5), "betas": (0.8, 0.9), "eps": None, "step": torch.tensor(3.0)}]},
         {"lr": 0.5, "betas": [0.8, 0.9]}),
        ({0: {"optimizer": {"param_groups": [{"lr": 0.1}, {"lr": 0.2, "weight_decay": 0.3}]}}, "x": [1]},
         {"lr": 0.2, "weight_decay": 0.3}),
        ({"param_groups": [3, None]}, "none of Megatron-core's"),
        ({"param_groups": [{"step": 3}, {"step": 4}]}, "are at the steps 3, 4"),
        (None, None),
    ],
)  # fmt: skip
def test_settings_of_megatrons_are_read_or_refused(tmp_path: Path, optimiser: Any, found: Any) -> None:
    save("llama", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "core", "--to", "torch_dist")
    torch.save({"optimizer": optimiser, "args": Path("x")}, tmp_path / "core" / "common.pt")
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            open_any(tmp_path / "core")
    else:
        assert open_any(tmp_path / "core").objects == ({"settings": found} if found else {})
