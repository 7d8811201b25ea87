"""Public reports about the checksums that torch's archives have, and that torch does not look at."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.checkpoint import state_dict_saver
from torch.utils.serialization import config

from tangram.cli import main

Capture = pytest.CaptureFixture[str]
WEIGHTS = {f"{i}.weight": torch.arange(100.0).reshape(10, 10) + i for i in range(3)}


@pytest.fixture
def without_sums() -> Iterator[None]:
    """torch as some programs have it, since checksums take time."""
    before = config.save.compute_crc32
    config.save.compute_crc32 = False
    yield
    config.save.compute_crc32 = before


def saved(kind: str, folder: Path) -> Path:
    """The weights, and the largest file of them."""
    if kind == "dcp":
        with warnings.catch_warnings():  # torch says that it is alone
            warnings.simplefilter("ignore", UserWarning)
            state_dict_saver.save(dict(WEIGHTS), checkpoint_id=folder / kind, no_dist=True)
        return folder / kind
    torch.save(WEIGHTS, folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_one_byte_is_another(kind: str, tmp_path: Path, capsys: Capture) -> None:
    """pytorch/pytorch#126952, thu-spmi/CAT#105: a damaged file is loaded as if nothing were."""
    path = saved(kind, tmp_path)
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert "its checksums (CRC-32) agree" in capsys.readouterr().out
    file = next(path.glob("*.distcp")) if path.is_dir() else path
    data = bytearray(file.read_bytes())
    at = data.index(WEIGHTS["1.weight"].numpy().tobytes()) + 41
    data[at] ^= 0x10
    file.write_bytes(data)
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert "are not those of its checksum" in capsys.readouterr().out


@pytest.mark.usefixtures("without_sums")
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_archives_without_checksums(kind: str, tmp_path: Path, capsys: Capture) -> None:
    """tracel-ai/burn#5712: their checksums are 0, and a reader that compares them takes the file for a damaged one."""
    path = saved(kind, tmp_path)
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert "it has no checksums" in capsys.readouterr().out
    assert main(["checkpoint", "convert", str(path), str(tmp_path / "hf"), "--to", "hf"]) == 0
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], value) for name, value in WEIGHTS.items())
