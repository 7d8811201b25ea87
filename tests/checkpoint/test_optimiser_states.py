"""Optimiser states go along with their parameters between formats, by the peers' own optimisers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.formats.opened import Opened
from tangram.cli import main
from tests.checkpoint.peers.megatron_optimiser import SETTINGS
from tests.checkpoint.peers.models import save

ROOT = Path(__file__).parents[2]


def megatron(folder: Path, *options: object) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.peers.megatron_optimiser", "qwen3", *options]
    command += ["--meet", folder / f"meet-{len(list(folder.iterdir()))}"]
    done = subprocess.run([str(one) for one in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def convert(*arguments: object) -> None:
    assert main(["checkpoint", "convert", *map(str, arguments)]) == 0


def values_of(source: Opened) -> dict[str, Tensor]:
    found = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in source.specs.items()}
    for piece in source.pieces:
        box = tuple(slice(a, b) for ((a, b),) in piece.region.boxes[0]) if piece.region.boxes else ()
        found[piece.tensor][box] = source.read(piece.place, piece.tensor)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_megatrons_distributed_optimiser_here_and_back(tmp_path: Path, dtype: str) -> None:
    """Three steps of theirs are torch's three steps; what is written for them they load, and save the same again."""
    model: Any = save("qwen3", tmp_path / "hf", dtype=getattr(torch, dtype))
    convert(tmp_path / "hf", tmp_path / "core", "--to", "torch_dist", "--transformer-impl", "local")
    three = tmp_path / "three"
    megatron(tmp_path, "--tp", 2, "--dtype", dtype, "--load", tmp_path / "core", "--steps", 3, "--save", three)
    convert(three, tmp_path / "own", "--to", "tangram", "--config", tmp_path / "hf")
    assert main(["checkpoint", "verify", str(tmp_path / "own")]) == 0
    own = values_of(open_any(tmp_path / "own"))
    for name, value in trained(model, 3).items():
        assert value.dtype == own[name].dtype, name
        torch.testing.assert_close(own[name], value, rtol=1e-6, atol=1e-9)

    convert(tmp_path / "own", tmp_path / "again", "--to", "torch_dist", "--transformer-impl", "local")
    assert same(values_of(open_any(tmp_path / "again")), values_of(open_any(three)))
    megatron(tmp_path, "--tp", 2, "--dtype", dtype, "--load", tmp_path / "again", "--states", "--save", tmp_path / "on")
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
    found |= {f"{name}.master": p.detach() for name, p in masters.items()}
    return found | {f"{n}.{key}": value for n, p in masters.items() for key, value in optimiser.state[p].items()}
