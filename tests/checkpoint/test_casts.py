"""Values of a wide type as those of a narrow one: rounded where that is asked for, and never made infinite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

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


@pytest.mark.parametrize(
    ("codec", "values", "off"),
    [("add=-1", [0.1, 1.5, 0.0], 0.0146), ("mul=3", [0.1, 1.5, 0.0], 1.6e-3), ("mul=0", [0.1, 1.5, 0.0], 1.0),
     ("add=-1", [0.5, 1.5, 0.0], 0.0), ("mul=2", [0.1, 1.5, 0.0], 0.0)],
)  # fmt: skip
def test_what_a_mapping_rounds_is_measured(
    codec: str, values: list[float], off: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The norm of Qwen3-Next's delta nets, which Megatron-core keeps less one, lost up to all of itself unsaid."""
    stated = torch.tensor(values, dtype=torch.bfloat16)
    save_file({"w": stated, "v": stated + 1}, tmp_path / "model.safetensors")
    (tmp_path / "map").write_text(f"w: a -> w: a; {codec}\nv -> v\n")
    options = ["--to", "hf", "--mapping", str(tmp_path / "map")]
    for folder, more in (("made", ["--json"]), ("again", [])):
        assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / folder), *options, *more]) == 0
    out, printed = capsys.readouterr().out.split("\n}\n")
    rounded = json.loads(out + "}")["rounded"]
    made = load_file(tmp_path / "made" / "model.safetensors")["w"].double()
    sign, number = codec[:3], float(codec[4:])
    back = made - number if sign == "add" else made / number if number else made
    want = float(((back - stated.double()) / stated.double()).abs().nan_to_num().max())
    assert rounded == ({"w": pytest.approx(want)} if off else {})
    assert off / 2 <= want <= off * 2
    assert ("1 tensor rounded by the mapping's add or mul, a value by up to" in printed) == bool(off)
