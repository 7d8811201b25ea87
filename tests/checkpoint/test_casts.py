"""Values of a wide type as those of a narrow one: rounded where that is asked for, and never made infinite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tangram.__main__ import main
from tangram.checkpoint import load, save
from tangram.errors import UserError


def stored(folder: Path, largest: float, form: str) -> Path:
    """A checkpoint of one tensor with a finite number of this size, beside an infinite one."""
    values = torch.tensor([1.0, largest, float("inf")])
    if form == "tangram":
        save({"model": {"w": values}}, folder)
    else:
        folder.mkdir()
        save_file({"w": values}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("to", ["dcp", "hf"])
@pytest.mark.parametrize("form", ["hf", "tangram"])
def test_a_number_that_a_rounded_type_cannot_hold_is_refused(
    form: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of bfloat16's range became infinite in float16 though all went well; infinity itself stays."""
    command = [str(tmp_path / "made"), "--to", to, "--dtype", "float16", "--round"]
    assert main(["checkpoint", "convert", str(stored(tmp_path / "large", 1e6, form)), *command]) == 2
    assert "w: 1 of its numbers are too large for float16" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "made").exists()
    assert main(["checkpoint", "convert", str(stored(tmp_path / "small", 1e3, form)), *command]) == 0


def test_a_load_that_casts_refuses_it_too(tmp_path: Path) -> None:
    folder = stored(tmp_path / "large", 1e6, "tangram")
    for narrow in (torch.float16, torch.float8_e4m3fn):
        with pytest.raises(UserError, match="too large"):
            load({"model": {"w": torch.empty(3, dtype=narrow)}}, folder, cast=True)
    edge = stored(tmp_path / "edge", 65519.0, "tangram")  # is rounded to float16's largest
    rounded = torch.empty(3, dtype=torch.float16)
    load({"model": {"w": rounded}}, edge, cast=True)
    assert rounded.tolist() == [1.0, 65504.0, float("inf")]
    wide = torch.empty(3, dtype=torch.bfloat16)
    load({"model": {"w": wide}}, folder, cast=True)
    assert wide.tolist() == [1.0, 999424.0, float("inf")]
