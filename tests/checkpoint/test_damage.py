"""Any one byte that is not as it was written is found, named and refused; so are files cut off, gone or of others."""

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.checkpoint import commits, verify
from tangram.checkpoint.commits import MANIFEST, MARKER
from tangram.checkpoint.loading.load import load
from tangram.errors import UserError
from tests.checkpoint.hostile import TENSORS, make_small
from tests.checkpoint.making import flip
from tests.checkpoint.stored import same

BESIDE = "config.json"  # which no load reads


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for step, name in enumerate(("older", "damaged", "newer"), 1):
        make_small(folder / name, step)
    return folder


@pytest.fixture
def path(runs: Path, tmp_path: Path) -> Path:
    shutil.copytree(runs, tmp_path / "runs")
    return tmp_path / "runs" / "damaged"


def loaded(path: Path) -> dict[str, torch.Tensor]:
    into = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    state: dict[str, dict[str, Any]] = {}
    for name, tensor in into.items():
        section, _, rest = name.partition(".")
        state.setdefault(section, {})[rest] = tensor
    load(state | {"progress": {}}, path)
    return into


def check(path: Path, name: str, tensors: set[str]) -> None:
    """What is wrong with a file is found, with what lies in it, and refused with the way back."""
    findings = verify.verify(path).findings
    assert name in {one.file for one in findings}
    assert tensors <= {tensor for one in findings for tensor in one.tensors}
    if name == BESIDE:
        return
    with pytest.raises(UserError) as refused:
        loaded(path)
    said = str(refused.value)
    assert "\n" not in said
    assert name in said or name == MARKER, "a marker may say another format, or the sum of another manifest"
    assert said.endswith(way_back(path, name)), said
    assert not tensors or any(tensor in said for tensor in tensors), said


def way_back(path: Path, name: str) -> tuple[str, ...]:
    """What a refusal ends with: without its marker nobody knows when a checkpoint was written."""
    before, whole = (f'"{path.with_name(other)}"' for other in ("older", "newer"))
    known = f"; the one before it is {before}"
    return (known, f"; one that is whole is {whole}") if name == MARKER else (known,)


def holders(path: Path) -> dict[str, set[str]]:
    """The tensors of each file."""
    manifest = commits.read_manifest(path)
    found: dict[str, set[str]] = {name: set() for name in (*manifest.files, MARKER, MANIFEST)}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            found[piece.file].add(name)
    return found


def check_bytes(path: Path, choose: Callable[[int], Iterable[int]]) -> int:
    """Turn over a bit of each of these bytes of each file, one at a time; how many they were."""
    count = 0
    for name, tensors in holders(path).items():
        for at in choose((path / name).stat().st_size):
            flip(path / name, at, bit=at % 8)
            check(path, name, tensors)
            flip(path / name, at, bit=at % 8)
            count += 1
    assert all(same(tensor, TENSORS[name]) for name, tensor in loaded(path).items()), "all was turned back"
    return count


def test_bytes_of_every_region_of_every_file(path: Path) -> None:
    def choose(size: int) -> list[int]:
        ends = [0, 1, 7, 8, 9, 40, 300, 4095, 4096, 4097, size - 2, size - 1]
        return sorted({at for at in (*ends, *range(11, size, 701)) if at < size})

    assert check_bytes(path, choose) > 100


@pytest.mark.slow
def test_every_byte_of_every_file(path: Path) -> None:
    assert check_bytes(path, range) > 10_000


HARMS: dict[str, Callable[[Path], Any]] = {
    "cut off": lambda file: os.truncate(file, file.stat().st_size - 1),
    "cut off after a page": lambda file: os.truncate(file, min(4096, file.stat().st_size - 1)),
    "emptied": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b" "),
    "gone": Path.unlink,
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "of another save": lambda file: shutil.copy(file.parent.with_name("newer") / file.name, file),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_file(path: Path, harm: str) -> None:
    for name, tensors in holders(path).items():
        if (name, harm) == (BESIDE, "of another save"):  # which says the same
            continue
        kept = (path / name).read_bytes()
        HARMS[harm](path / name)
        if name not in (MARKER, MANIFEST) and harm not in ("zeros", "of another save"):
            assert verify.verify(path).findings
            with pytest.raises(UserError, match=re.escape(name)) as refused:
                loaded(path)  # the sizes are in the marker, so that one look is enough
            assert str(refused.value).endswith(way_back(path, name))
        else:
            check(path, name, tensors)
        (path / name).write_bytes(kept)
    assert verify.verify(path).sound


def test_files_that_are_exchanged(path: Path) -> None:
    data = [name for name in holders(path) if name.endswith(".safetensors")]
    for one in data:
        for other in data:
            sizes = {(path / name).stat().st_size for name in (one, other)}
            if one < other and len(sizes) == 1:
                _exchange(path, one, other)
                assert {one, other} <= {finding.file for finding in verify.verify(path).findings}
                with pytest.raises(UserError, match="damaged"):
                    loaded(path)
                _exchange(path, one, other)
    assert verify.verify(path).sound


def _exchange(path: Path, one: str, other: str) -> None:
    (path / one).rename(path / "aside")
    (path / other).rename(path / one)
    (path / "aside").rename(path / other)


def test_the_first_has_none_before_it(path: Path) -> None:
    first = path.with_name("older")
    flip(first / MANIFEST, 10)
    with pytest.raises(UserError) as refused:
        loaded(first)
    assert "before it" not in str(refused.value)
