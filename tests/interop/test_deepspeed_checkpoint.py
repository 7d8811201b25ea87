"""DeepSpeed itself trains and saves on two processes; what is read of it is what its own functions say it holds.

The weights are those of `zero_to_fp32`, the module's those that it computes with, the moments those of
`safe_get_full_optimizer_state`. DeepSpeed comes with the extra `parsers`; `make interop` runs this.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tangram.cli import main
from tests.checkpoint.zero import compare, same

ROOT = Path(__file__).parents[2]
CASES = {
    "ZeRO 1": ("--stage", "1"),
    "ZeRO 1, gradients in float32": ("--stage", "1", "--accumulate", "fp32"),
    "ZeRO 2": ("--stage", "2", "--model", "llama"),
    "ZeRO 2, float32, 3 ranks": ("--stage", "2", "--dtype", "float32", "--ranks", "3"),
    "ZeRO 3": ("--stage", "3", "--model", "llama"),
    "ZeRO 3 in small groups": ("--stage", "3", "--sub-group", "70"),
}


def run(folder: Path, *options: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.peers.deepspeed_save", str(folder), *options]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra `parsers` is not installed")
@pytest.mark.parametrize("name", CASES)
def test_what_deepspeed_saves_is_what_it_holds(name: str, tmp_path: Path) -> None:
    run(tmp_path / "run", *CASES[name])
    opened, compared = compare(tmp_path / "run")
    assert opened.format == "deepspeed"
    assert compared >= 30
    assert main(["checkpoint", "convert", str(tmp_path / "run/saved"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    written = load_file(tmp_path / "hf" / "model.safetensors")
    said = load_file(tmp_path / "run" / "expected.safetensors")
    module = {key.removeprefix("module."): t for key, t in said.items() if key.startswith("module.")}
    assert len(module) >= 9
    for key, value in module.items():
        assert same(written[key].to(value.dtype), value), key
