"""Whatever is wrong with a checkpoint is found, all of it, and named; what is right is called so."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tangram.checkpoint.inspect import verify
from tangram.checkpoint.inspect.verify import Finding
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.saving.save import save
from tangram.checkpoint.store import commits, digest, manifest
from tangram.checkpoint.store.commits import MANIFEST, MARKER
from tangram.checkpoint.store.manifest import BLOCK, StoredFile
from tangram.errors import UserError
from tangram.layout import Region
from tests.checkpoint.making import flip, make, recommit, regions

SHAPE = (1100, 1024)  # two files of a little more than half of 4.5 MB each, so one block and a whole column cut
LARGE = (2300, 1024)  # some blocks a file

TENSORS = {
    "model.embed": torch.randn(LARGE),
    "model.norm": torch.randn(1024),
    "model.scale": torch.tensor(3.0),
    "model.cut": torch.arange(33 * 7, dtype=torch.int8).reshape(33, 7),
    "model.none": torch.empty(0, 4),
    "optim.embed.exp_avg": torch.randn(SHAPE).to(torch.bfloat16),
    "optim.step": torch.tensor(7, dtype=torch.int64),
    "rng.odd": torch.randn(5, dtype=torch.complex128),
}
CUTS = {
    "model.embed": regions(LARGE, "rows/tp cols", "tp=2"),
    "model.cut": [Region.flat((33, 7), 0, 45), Region.flat((33, 7), 45, 231)],
    "optim.embed.exp_avg": regions(SHAPE, "rows cols/tp", "tp=2"),
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
OPTIM = "optim-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for step in (1, 2):
        about = About(step=step, beside={"config.json": "{}"})
        make(folder / f"step-{step}", TENSORS, CUTS, writers=2, objects={"progress.step": step}, about=about)
    return folder


@pytest.fixture
def good(runs: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with two checkpoints of the same tensors."""
    shutil.copytree(runs / "step-1", tmp_path / "runs" / "step-1", copy_function=os.link)
    shutil.copytree(runs / "step-2", tmp_path / "runs" / "step-2")
    yield tmp_path / "runs" / "step-2"
    shutil.rmtree(tmp_path / "runs")


def found(path: Path) -> list[tuple[str, str]]:
    return [(one.kind, one.file) for one in verify.verify(path).findings]


def only(path: Path, kind: str, file: str) -> Finding:
    report = verify.verify(path)
    assert [(one.kind, one.file) for one in report.findings] == [(kind, file)], report.findings
    assert not report.sound
    return report.findings[0]


def test_a_sound_checkpoint_is_read_once_and_called_sound(good: Path) -> None:
    counted: list[int] = []
    report = verify.verify(good, counted.append)
    assert report.findings == ()
    assert report.sound
    assert (report.step, report.tensors) == (2, len(TENSORS))
    sizes = sum(file.stat().st_size for file in good.iterdir() if file.name not in (MARKER, MANIFEST))
    assert report.nbytes == sum(counted) == sizes == verify.size_of(good)


def test_what_save_writes_is_sound(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 50)
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimiser.step()
    save({"model": model, "optim": optimiser, "progress": {"step": 3}}, tmp_path / "a")
    assert verify.verify(tmp_path / "a").sound


@pytest.mark.parametrize("threads", [1, 7])
def test_the_number_of_threads_changes_nothing(good: Path, threads: int) -> None:
    flip(good / FIRST, 5000)
    flip(good / SECOND, 5000)
    assert [f.file for f in verify.verify(good, threads=threads).findings] == [FIRST, SECOND]


def test_a_flipped_bit_in_the_data_is_found_with_its_block_and_tensors(good: Path) -> None:
    flip(good / FIRST, BLOCK + 17, bit=3)
    finding = only(good, "block", FIRST)
    assert (finding.start, finding.stop) == (BLOCK, (good / FIRST).stat().st_size)
    assert finding.tensors[0] == "model.embed"
    flip(good / OPTIM, 4096 + 5)
    assert found(good) == [("block", FIRST), ("block", OPTIM)]


@pytest.mark.parametrize("at", [0, 9, 40, 200])
def test_a_flipped_bit_in_a_header_is_found(good: Path, at: int) -> None:
    flip(good / FIRST, at)
    assert ("block", FIRST) in found(good)


def test_every_flipped_byte_of_marker_and_manifest_is_found_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "small"
    make(path, {"model.w": torch.ones(3)}, about=About(step=3))
    for name in (MARKER, MANIFEST):
        size = (path / name).stat().st_size
        for at in range(size):
            flip(path / name, at, bit=at % 8)
            if at % 7 == 0:
                assert any(one.file == name for one in verify.verify(path).findings), (name, at)
            with pytest.raises(UserError):
                commits.read_manifest(path)
            flip(path / name, at, bit=at % 8)
    assert verify.verify(path).sound


def test_a_flipped_bit_of_the_file_beside_is_found(good: Path) -> None:
    flip(good / "config.json", 1)
    assert only(good, "block", "config.json").tensors == ()


def test_a_truncated_file_is_found_with_all_that_it_lacks(good: Path) -> None:
    size = (good / FIRST).stat().st_size
    os.truncate(good / FIRST, size - 1)
    finding = only(good, "size", FIRST)
    assert (finding.start, finding.stop) == (BLOCK, size)
    assert "model.embed" in finding.tensors
    os.truncate(good / FIRST, 0)
    assert found(good) == [("header", FIRST), ("size", FIRST)]


def test_a_file_that_grew_is_found(good: Path) -> None:
    with (good / FIRST).open("ab") as stream:
        stream.write(b"more")
    assert only(good, "size", FIRST).text.endswith("4 more than were written")


def test_missing_and_extra_files_are_found_together(good: Path) -> None:
    (good / FIRST).unlink()
    (good / "model.safetensors").write_bytes(b"")
    assert found(good) == [("missing", FIRST), ("extra", "model.safetensors")]


def test_swapped_files_are_found(good: Path) -> None:
    (good / FIRST).rename(good / "third")
    (good / SECOND).rename(good / FIRST)
    (good / "third").rename(good / SECOND)
    assert {("header", FIRST), ("header", SECOND), ("block", FIRST), ("block", SECOND)} <= set(found(good))


def test_a_file_of_another_save_with_the_same_shapes_is_found(good: Path) -> None:
    shutil.copyfile(good.parent / "step-1" / FIRST, good / FIRST)
    report = verify.verify(good)
    assert [one.kind for one in report.findings] == ["block", "header"]  # the values are the same, the id is not
    assert "is of another save" in report.findings[1].text


@pytest.mark.parametrize("target", ["../step-1", "/etc/hostname", "nowhere"])
def test_a_link_is_not_followed(good: Path, target: str) -> None:
    (good / FIRST).unlink()
    (good / FIRST).symlink_to(Path(target) / FIRST if target.startswith("..") else target)
    assert only(good, "link", FIRST).text.endswith("it is not followed")


@pytest.mark.parametrize("make_it", [lambda file: file.mkdir(), os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_plain_file_is_not_opened(good: Path, make_it: Callable[[Path], None]) -> None:
    (good / FIRST).unlink()
    make_it(good / FIRST)
    assert only(good, "link", FIRST)


def test_what_the_disk_does_not_give_is_a_finding(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails for one file: the rest is read all the same."""
    plain = os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == FIRST and offset >= BLOCK:
            raise OSError(5, "Input/output error")
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    flip(good / SECOND, 5000)
    assert found(good) == [("unreadable", FIRST), ("block", SECOND)]


@pytest.mark.parametrize("name", [MARKER, MANIFEST])
def test_without_marker_or_manifest_the_rest_is_still_looked_at(good: Path, name: str) -> None:
    (good / name).unlink()
    (good / SECOND).unlink()
    assert found(good) == [("missing", name), ("missing", SECOND)]


def test_a_manifest_of_another_save_is_found(good: Path) -> None:
    shutil.copyfile(good.parent / "step-1" / MANIFEST, good / MANIFEST)
    kinds = found(good)
    assert ("manifest", MANIFEST) in kinds
    assert ("marker", MARKER) in kinds
    assert ("header", FIRST) in kinds


def test_a_wrong_digest_is_found_though_every_block_is_right(good: Path) -> None:
    def change(old: manifest.Manifest) -> manifest.Manifest:
        name, other = "model.embed", digest.digest("float32", LARGE, digest.NOTHING)
        return replace(old, tensors={**old.tensors, name: replace(old.tensors[name], digest=other)})

    recommit(good, change)
    assert only(good, "digest", "").tensors == ("model.embed",)


def test_pieces_that_name_each_others_bytes_are_found(good: Path) -> None:
    """Every byte is right, but the manifest takes one column shard for the other."""

    def change(old: manifest.Manifest) -> manifest.Manifest:
        tensor = old.tensors["optim.embed.exp_avg"]
        one, other = tensor.pieces
        pieces = (
            manifest.StoredPiece(other.region, one.file, one.offset),
            manifest.StoredPiece(one.region, other.file, other.offset),
        )
        return replace(old, tensors={**old.tensors, tensor.name: replace(tensor, pieces=pieces)})

    recommit(good, change)
    assert {one.kind for one in verify.verify(good).findings} == {"header", "digest"}


def test_a_tensor_that_is_not_covered_is_found(good: Path) -> None:
    def change(old: manifest.Manifest) -> manifest.Manifest:
        tensor = old.tensors["model.embed"]
        return replace(old, tensors={**old.tensors, tensor.name: replace(tensor, pieces=tensor.pieces[:1])})

    recommit(good, change)
    assert "the pieces of model.embed lack [1150:2300 0:1024]" in only(good, "manifest", MANIFEST).text


def test_a_manifest_that_leads_out_of_the_folder_is_refused(good: Path) -> None:
    recommit(good, lambda old: replace(old, files={**old.files, "../outside": StoredFile(0, ())}))
    listed, marker = verify.verify(good).findings
    assert "leads out of the folder" in marker.text
    assert "'../outside', which is no plain name" in listed.text


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda path: None, "there is no checkpoint"),
        (lambda path: path.mkdir(), "is no checkpoint and holds none"),
        (lambda path: path.write_text("x"), "there is no checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, build: Callable[[Path], object], words: str) -> None:
    build(tmp_path / "foreign")
    with pytest.raises(UserError, match=words):
        verify.checkpoints_in(tmp_path / "foreign")


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.mkdir()
    (path / MARKER).write_text(json.dumps({"format": 1}))
    with pytest.raises(UserError, match="has the format 1; this version reads 2"):
        verify.verify(path)


def test_a_folder_gives_its_checkpoints_in_the_order_of_their_commits(good: Path) -> None:
    older = good.parent / "step-1"
    (good.parent / "latest").symlink_to("step-2")
    (good.parent / "notes").mkdir()
    assert verify.checkpoints_in(good.parent) == [older, good]
    os.truncate(good / FIRST, 5)
    assert set(verify.checkpoints_in(good.parent)) == {older, good}
    assert verify.checkpoints_in(good) == [good]


def test_the_newest_sound_older_checkpoint_is_offered(good: Path) -> None:
    third = good.parent / "step-3"
    make(third, {"model.w": torch.ones(2)})
    flip(third / "model-00001-of-00001.safetensors", 4097)
    assert verify.newest_sound(third) == good
    assert verify.newest_sound(third, passed=(good,)) == good.parent / "step-1"
    flip(good / FIRST, 5000)
    assert verify.newest_sound(third) == good.parent / "step-1"
    assert verify.newest_sound(good.parent / "step-1") is None
    (third / MARKER).unlink()
    assert verify.newest_sound(third) == good.parent / "step-1"
