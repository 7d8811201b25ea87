"""torch's distributed checkpoints: what we write its own reader reads, and what it writes we read."""

import contextlib
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tangram.checkpoint.formats import dcp
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.dcp import Chunk, WrittenChunk, mapped_chunks, read_index, write_index
from tangram.checkpoint.saving.file_writer import FileStream, Ring
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec, bind, execute, plan

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
TENSORS: dict[str, Tensor] = {
    "w": torch.arange(35.0).view(7, 5),
    "half": torch.arange(4.0).to(torch.bfloat16),
    "step": torch.tensor(3.0),
    "none": torch.zeros(0, 4),
}


def read(path: Path, name: str) -> Tensor:
    index = read_index(path)
    spec = {name: index.specs[name]}
    out = torch.empty(spec[name].shape, dtype=getattr(torch, spec[name].dtype))
    pieces = [piece for piece in index.pieces if piece.tensor == name]
    copies = plan(bind("{n*} -> {n*}", spec, spec), pieces, [Piece("here", name, Region.full(out.shape))])
    execute(copies, mapped_chunks(Maps(path)), {("here", name): out})
    return out


def write_chunks(file: Path, chunks: list[Chunk]) -> list[WrittenChunk]:
    with FileStream(file, Ring()) as stream:
        written = dcp.write_chunks(stream, file.name, chunks)
        stream.finish()
    return written


@ALONE
def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    w = TENSORS["w"]
    first = [Chunk("w", (0, 0), w[:4].clone()), Chunk("step", (), TENSORS["step"])]
    second = [Chunk("w", (4, 3), w[4:, 3:].contiguous()), Chunk("half", (0,), TENSORS["half"])]
    second.append(Chunk("w", (4, 0), w[4:, :3].contiguous()))
    written = write_chunks(tmp_path / "__0_0.distcp", first) + write_chunks(tmp_path / "__1_0.distcp", second)
    specs = {name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in TENSORS.items()}
    write_index(tmp_path, specs, written)
    theirs = {name: torch.full_like(tensor, -1) for name, tensor in TENSORS.items()}
    torch_dcp.load(theirs, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(theirs[name], tensor), name
        assert torch.equal(read(tmp_path, name), tensor), name


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A checkpoint by torch."""
    torch_dcp.save({**TENSORS, "note": "opaque"}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    return tmp_path / "theirs"


@ALONE
def test_we_read_what_torch_writes(theirs: Path) -> None:
    index = read_index(theirs)
    assert index.opaque == ("note",)
    for name, tensor in TENSORS.items():
        assert torch.equal(read(theirs, name), tensor), name


@ALONE
def test_a_missing_chunk_is_named_with_its_region(theirs: Path) -> None:
    metadata: Metadata = torch_dcp.FileSystemReader(str(theirs)).read_metadata()
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.pop()
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"(?s)w.*0:7"):
        read(theirs, "w")


@ALONE
def test_a_cut_off_file_is_named(theirs: Path) -> None:
    file = next(theirs.glob("__0_*.distcp"))
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(UserError, match=rf"{file.name}.*is cut off"):
        [read(theirs, name) for name in TENSORS]


def test_a_full_disk_is_an_error_like_any_other(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_chunks(
                tmp_path / "f", [Chunk("w", (0,), torch.zeros(500_000)), Chunk("v", (0,), torch.zeros(500_000))]
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("content", "message"), [(None, "not a complete DCP checkpoint"), (b"junk", "is damaged")])
def test_a_folder_without_sound_metadata(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_index(tmp_path)


class Runs:
    """Would run where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def test_metadata_is_read_and_nothing_of_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():  # torch says that there is one process only
        warnings.simplefilter("ignore")
        torch_dcp.save({"w": torch.ones(2, 3), "n": 5}, checkpoint_id=tmp_path / "x", no_dist=True)
    metadata = torch_dcp.FileSystemReader(str(tmp_path / "x")).read_metadata()
    metadata.planner_data = {"evil": Runs()}
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    index = read_index(tmp_path / "x")
    assert (index.specs, index.opaque) == ({"w": TensorSpec((2, 3))}, ("n",))
    assert not (tmp_path / "ran").exists()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=4), st.integers(0, 10_000))
def test_damaged_metadata_is_refused_or_read(tmp_path: Path, noise: bytes, at: int) -> None:
    file = tmp_path / ".metadata"
    if not (tmp_path / "good").exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch_dcp.save({"w": torch.ones(2, 3), "n": 5}, checkpoint_id=tmp_path / "good", no_dist=True)
    data = bytearray((tmp_path / "good" / ".metadata").read_bytes())
    at %= len(data)
    data[at : at + len(noise)] = noise
    file.write_bytes(data)
    with contextlib.suppress(UserError):  # and nothing else is raised
        read_index(tmp_path)
