"""Kernels compile for a Hopper device, which need not be there, and use its matrix units."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
MOST_SHARED = 232448
"""Bytes of shared memory that a block of a Hopper device can have."""
SPILLED = {"forward": 128, "keys_owed": 256}
"""Bytes of a thread that do not fit in its registers."""
CASES = [
    ("fp8", 128, 128),
    pytest.param("bf16", 128, 128, marks=pytest.mark.slow),
    pytest.param("fp8-fwd", 128, 128, marks=pytest.mark.slow),
    pytest.param("nvfp4-emulated", 128, 128, marks=pytest.mark.slow),
    *(
        pytest.param(mode, *w, marks=pytest.mark.slow)
        for mode in ("bf16", "fp8")
        for w in ((64, 64), (192, 128), (256, 256))
    ),
]


@pytest.mark.parametrize(("mode", "width", "values"), CASES)
def test_compiles(mode: str, width: int, values: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = [str(ROOT / "src"), str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "tests.kernels.compiled.compiling", mode, str(width), str(values)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = [json.loads(line) for line in ran.stdout.splitlines()]
    by_name = {one["kernel"]: one for one in found}
    assert {"forward", "queries_owed", "keys_owed"} <= by_name.keys()
    assert all(one["shared"] <= MOST_SHARED for one in found)
    assert set(by_name["forward"]["units"]) == {"wgmma e4m3" if mode.startswith("fp8") else "wgmma bf16"}
    assert all("wgmma" in unit for one in found for unit in one["units"])
    if mode == "fp8":
        assert all(one["units"] in ([], ["wgmma e4m3"]) for one in found)
    if width <= 128:  # of wider heads no tile was found that fits
        assert [one["kernel"] for one in found if one["spilled"] > SPILLED.get(one["kernel"], 0)] == []
