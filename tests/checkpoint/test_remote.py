"""Checkpoints on object stores, on a real S3 server of this machine: read in ranges, written whole or not at all."""

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tangram.checkpoint.conversion import object_store
from tangram.checkpoint.conversion.convert import IDENTITY, ConvertOptions, restructure
from tangram.checkpoint.conversion.object_store import opening
from tangram.checkpoint.formats.common.outgoing import WriteTask
from tangram.checkpoint.formats.detect import TARGETS, WriteFormat, open_any
from tangram.checkpoint.saving.save import save as save_own
from tangram.cli import main
from tangram.relayout import bind
from tests.checkpoint.peers.models import save
from tests.s3 import point_to, serve


@pytest.fixture(scope="module")
def server() -> Generator[str]:
    yield from serve()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"b{abs(hash(monkeypatch)) % 10**9}"
    point_to(server, monkeypatch, name)
    return name


def objects(server: str, bucket: str) -> dict[str, int]:
    found = boto3.client("s3", endpoint_url=server).list_objects_v2(Bucket=bucket).get("Contents", [])
    return {one["Key"]: one["Size"] for one in found}


def convert(*arguments: object) -> int:
    return main(["checkpoint", "convert", *map(str, arguments)])


def test_there_between_formats_and_back(server: str, bucket: str, tmp_path: Path) -> None:
    model = save("qwen3", tmp_path / "hf")
    assert convert(tmp_path / "hf", f"s3://{bucket}/core", "--to", "torch_dist") == 0
    assert convert(f"s3://{bucket}/core", f"s3://{bucket}/a/hf", "--to", "hf", "--shard-size", "50KB") == 0
    keys = objects(server, bucket)
    assert {"core/.metadata", "core/source/config.json", "a/hf/model.safetensors.index.json"} <= keys.keys()
    assert len([key for key in keys if key.startswith("a/hf/model-")]) == 3
    assert convert(f"s3://{bucket}/a/hf", tmp_path / "back", "--to", "hf") == 0
    before, after = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_a_checkpoint_of_tangram_with_its_states(server: str, bucket: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimiser.step()
    save_own({"model": model, "optim": optimiser}, tmp_path / "own")
    assert convert(tmp_path / "own", f"s3://{bucket}/own", "--to", "tangram") == 0
    with opening(f"s3://{bucket}/own") as found:
        assert set(found.states) == {"exp_avg", "exp_avg_sq", "step"}
    assert convert(f"s3://{bucket}/own", tmp_path / "again", "--to", "tangram") == 0
    assert main(["checkpoint", "verify", str(tmp_path / "again")]) == 0


def test_only_what_is_looked_at_is_fetched_and_it_is_let_go(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "WHOLE", 1000)
    monkeypatch.setattr(object_store, "PIECE", 1 << 16)
    (tmp_path / "hf").mkdir()
    big = {f"t{i}": torch.randn(512, 256) for i in range(8)}
    save_file(big, tmp_path / "hf/model.safetensors")
    assert convert(tmp_path / "hf", f"s3://{bucket}/big", "--to", "dcp", "--shard-size", "1MB") == 0
    with opening(f"s3://{bucket}/big") as found:
        assert len({piece.place.file for piece in found.pieces}) > 3  # pyright: ignore
        maps: Any = found.release.__self__  # pyright: ignore[reportFunctionMemberAccess]
        piece = next(piece for piece in found.pieces if piece.tensor == "t3")
        assert torch.equal(found.read(piece.place, "t3"), big["t3"])
        once = maps.fetched
        assert once < 3 * big["t3"].nbytes
        found.read(piece.place, "t3")
        assert maps.fetched == once
        found.release()
        assert sum(file.stat().st_blocks for file in found.path.iterdir() if file.stat().st_size > 1000) < 100
        assert torch.equal(found.read(piece.place, "t3"), big["t3"])
        assert maps.fetched > once


def test_what_fails_on_the_way_leaves_nothing(
    server: str, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save("qwen3", tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"

    def breaks(task: WriteTask) -> list[str]:
        TARGETS["hf"].write(task)
        raise OSError(28, "No space left on device", "x")

    found = open_any(tmp_path / "hf")
    bound, target = bind(IDENTITY, found.specs), WriteFormat("one that breaks", breaks, states=False, structure="hf")
    with monkeypatch.context() as patch:
        patch.setattr("tangram.checkpoint.conversion.convert.TARGETS", {"hf": target})
        with pytest.raises(OSError, match="No space"):
            restructure(found, bound, f"s3://{bucket}/x", "hf", ConvertOptions(shard=50_000))
    assert objects(server, bucket) == {}
    capsys.readouterr()
    assert convert(tmp_path / "hf", f"s3://{bucket}/x", "--to", "hf") == 0
    for arguments, words in (
        ((tmp_path / "hf", f"s3://{bucket}/x", "--to", "hf"), "is there already"),
        ((f"s3://{bucket}/nothing", tmp_path / "y", "--to", "hf"), "is not there, or empty"),
        (("s3://no-such-bucket/x", tmp_path / "y", "--to", "hf"), "there is no such bucket: make it"),
        (("abc://x/y", tmp_path / "y", "--to", "hf"), "is no address of an object store"),
    ):
        capsys.readouterr()
        assert convert(*arguments) == 2
        told = capsys.readouterr().err
        assert words in told
        assert told.count("\n") == 1
    boto3.client("s3", endpoint_url=server).put_object(
        Bucket=bucket, Key="cut/model.safetensors", Body=file.read_bytes()[:-100]
    )
    assert convert(f"s3://{bucket}/cut", tmp_path / "y", "--to", "dcp") == 2
    assert "is damaged or cut off" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "qwen3"


def test_without_the_library_it_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    assert convert("s3://bucket/x", "y", "--to", "hf") == 2
    assert "needs the extra `remote`" in capsys.readouterr().err
