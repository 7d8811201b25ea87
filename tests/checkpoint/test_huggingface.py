"""Hugging Face directories as pieces: the tensors that safetensors wrote, and only the bytes that are wanted."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  typed in part
from torch import Tensor

from tangram.checkpoint.formats.huggingface import INDEX, SINGLE, has_weights, mapped_reader, read_index
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec, bind, execute, plan

MIB = 1 << 20


def write(folder: Path, *files: dict[str, Tensor]) -> Path:
    """A directory as transformers leaves it: one file, or several with an index."""
    folder.mkdir()
    if len(files) == 1:
        save_file(files[0], folder / SINGLE)
        return folder
    table: dict[str, str] = {}
    for number, tensors in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / name)
        table |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def read(folder: Path, name: str, region: Region) -> Tensor:
    """A region of a tensor through relayout."""
    index = read_index(folder)
    spec = {name: index.specs[name]}
    out = torch.empty(region.local_shape or (), dtype=getattr(torch, spec[name].dtype))
    pieces = [piece for piece in index.pieces if piece.tensor == name]
    copies = plan(bind("{name*} -> {name*}", spec, spec), pieces, [Piece("here", name, region)])
    execute(copies, mapped_reader(folder), {("here", name): out})
    return out


TENSORS: dict[str, Tensor] = {
    "w": torch.arange(35.0).view(7, 5),
    "half": torch.randn(4, 3).to(torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "numbers": torch.arange(6).view(2, 3),
    "eight": torch.randn(8).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "yes": torch.tensor([True, False]),
}


@pytest.mark.parametrize("shards", [1, 2])
def test_what_safetensors_wrote(tmp_path: Path, shards: int) -> None:
    files = [dict(list(TENSORS.items())[part::shards]) for part in range(shards)]
    folder = write(tmp_path / "model", *files)
    assert has_weights(folder)
    index = read_index(folder)
    assert index.specs == {
        name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in TENSORS.items()
    }
    for name, tensor in TENSORS.items():
        found = read(folder, name, Region.full(tensor.shape))
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.uint8) if name == "eight" else found, _bits(name, tensor))
    assert torch.equal(read(folder, "w", Region.parse("[2:5 1:4]")), TENSORS["w"][2:5, 1:4])


def _bits(name: str, tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if name == "eight" else tensor


def resident(file: Path) -> int:
    """How many bytes of a mapped file this process has touched."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts touched pages as Linux does")
def test_only_the_wanted_bytes_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"big": torch.arange(16 * MIB, dtype=torch.int32).view(4096, 4096)})
    index, reader = read_index(folder), mapped_reader(folder)
    touched: list[int] = []
    for rows in ((1024, 1280), (0, 4096)):
        region = Region.box((rows[0], 0), (rows[1] - rows[0], 4096))
        out = torch.empty(region.local_shape or 0, dtype=torch.int32)
        copies = plan(bind("{n*} -> {n*}", index.specs, index.specs), index.pieces, [Piece("here", "big", region)])
        execute(copies, reader, {("here", "big"): out})
        assert out[0, 0] == rows[0] * 4096
        touched.append(resident(folder / SINGLE))
    assert 4 * MIB <= touched[0] <= 12 * MIB, "a sixteenth of the rows; the kernel maps up to 2 MiB around a page"
    assert touched[1] >= 64 * MIB, "all of them: the meter moves"


# ---------------------------------------------------------------- directories that are wrong

FIRST = "model-00001-of-00002.safetensors"


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def index_with(folder: Path, **table: Any) -> None:
    fields = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": {**fields["weight_map"], **table}}))


HARMS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: rewrite(f / FIRST, lambda data: data[:-1]), rf'".*{FIRST}" is damaged or cut off: .*not fully covered'),
    (lambda f: rewrite(f / FIRST, lambda data: data[:5]), rf'".*{FIRST}" is damaged or cut off: .*too small'),
    (lambda f: rewrite(f / FIRST, lambda _: b""), rf'".*{FIRST}" is damaged or cut off'),
    (lambda f: rewrite(f / FIRST, lambda data: b"\xff" * 8 + data[8:]), rf'".*{FIRST}" is damaged .*too large'),
    (lambda f: rewrite(f / FIRST, lambda data: data[:8] + b"?" + data[9:]), rf'".*{FIRST}" is damaged .*invalid JSON'),
    (lambda f: (f / FIRST).unlink(), rf'"{{folder}}" is not whole: its file {FIRST} is not there'),
    (lambda f: index_with(f, nobody=FIRST), rf"says that nobody is in {FIRST}, but it is not"),
    (
        lambda f: index_with(f, a="../x.safetensors"),
        r"a is in '../x.safetensors', which is no name of a file beside it",
    ),
    (lambda f: index_with(f, a=3), r"a is in 3, which is no name"),
    (lambda f: (f / INDEX).write_text("{"), r"the index \".*\" cannot be read"),
    (lambda f: (f / INDEX).write_text("[1]"), r"the index \".*\" has no table weight_map"),
    (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), r"the index \".*\" has no table weight_map"),
    (lambda f: save_file({"b": torch.ones(2)}, f / FIRST), rf"says that a is in {FIRST}, but it is not"),
    (lambda f: (f / INDEX).unlink(), r"has no model.safetensors and no model.safetensors.index.json$"),
]


@pytest.mark.parametrize(("harm", "message"), HARMS)
def test_harm_is_found(tmp_path: Path, harm: Callable[[Path], Any], message: str) -> None:
    folder = write(tmp_path / "model", {"a": torch.ones(3)}, {"b": torch.ones(2)})
    assert read_index(folder).specs.keys() == {"a", "b"}
    harm(folder)
    with pytest.raises(UserError, match=message.replace("{folder}", str(folder))):
        read_index(folder)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert not has_weights(tmp_path)
    with pytest.raises(UserError, match=r"its pytorch_model.bin is pickled and is not read"):
        read_index(tmp_path)
