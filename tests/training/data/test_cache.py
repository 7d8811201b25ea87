"""The cache survives kills at any instruction, never gives out damaged tokens, and is made once."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.schema.job import DataPlan, SourcePlan
from tangram.training.data import BYTES, load_tokens, open_corpus, prepare
from tangram.training.data.store import BLOCK
from tangram.training.observe.events import Note, Working
from tests.training.data.texts import corpus_of, data_plan, ignore, texts_of, write_files, write_tokenizer

PART = 400  # bytes of text: a dozen parts
FILES = ("training.tokens", "training.ends", "held_out.tokens", "held_out.ends", "journal", "manifest")


@pytest.fixture
def plan(tmp_path: Path) -> DataPlan:
    return data_plan(tmp_path / "cache", write_files(tmp_path / "source"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DataPlan:
    """A plan whose cache is there; tests that change it put it back."""
    folder = tmp_path_factory.mktemp("made")
    plan = data_plan(folder / "cache", write_files(folder / "source"))
    prepare(plan, BYTES, ignore, part_bytes=PART)
    return plan


def only_folder(plan: DataPlan) -> Path:
    (folder,) = Path(plan.cache or "").iterdir()
    return folder


def content(plan: DataPlan) -> tuple[str, list[bytes], list[bytes]]:
    corpus = open_corpus(plan, BYTES)
    return corpus.digest, texts_of(corpus), texts_of(corpus, held_out=True)


@contextmanager
def put_back(folder: Path) -> Iterator[None]:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    try:
        yield
    finally:
        for name, whole in before.items():
            (folder / name).write_bytes(whole)


def test_every_document_is_on_one_side(plan: DataPlan) -> None:
    corpus = corpus_of(plan)
    written = sorted(path.read_bytes() for path in Path(plan.sources[0].path).rglob("*.txt"))
    assert sorted(texts_of(corpus) + texts_of(corpus, held_out=True)) == written
    assert corpus.summary().count("documents") == 2
    assert 0 < len(texts_of(corpus, held_out=True)) < 20


def test_the_size_of_parts_changes_nothing_but_the_digest_of_checksums(plan: DataPlan, tmp_path: Path) -> None:
    prepare(plan, BYTES, ignore, part_bytes=PART)
    other = plan.model_copy(update={"cache": str(tmp_path / "other")})
    prepare(other, BYTES, ignore)
    assert content(plan)[1:] == content(other)[1:]


def test_what_is_there_is_not_made_again(plan: DataPlan) -> None:
    corpus_of(plan)
    events: list[object] = []
    prepare(plan, BYTES, events.append)
    assert events == []


def test_copies_go_to_one_side_and_new_files_move_none(plan: DataPlan) -> None:
    source = Path(plan.sources[0].path)
    before = corpus_of(plan)
    for path in list(source.rglob("*.txt")):
        shutil.copy(path, path.with_name(f"copy {path.name}"))
    (source / "new.txt").write_text("new")
    after = corpus_of(plan)
    for held_out in (False, True):
        old, new = texts_of(before, held_out=held_out), texts_of(after, held_out=held_out)
        assert sorted([*old, *old]) == sorted(text for text in new if text != b"new")
    assert before.digest != after.digest


def test_what_decides_the_tokens_decides_the_folder(plan: DataPlan, tmp_path: Path) -> None:
    corpus_of(plan)
    tokens = load_tokens(plan, str(write_tokenizer(tmp_path / "model", eos_token="</s>")))
    source = plan.sources[0]
    for changed in (
        plan.model_copy(update={"held_out": 0.4}),
        plan.model_copy(update={"sources": (source.model_copy(update={"pattern": "[01]/*"}),)}),
        plan.model_copy(update={"sources": (source.model_copy(update={"field": "other"}),)}),
    ):
        with pytest.raises(UserError, match=r"are not in the cache .*: prepare them first"):
            open_corpus(changed, BYTES)
    with pytest.raises(UserError, match="are not in the cache"):
        open_corpus(plan, tokens)
    os.utime(Path(source.path) / "0" / "file000.txt", ns=(1, 1))
    with pytest.raises(UserError, match="are not in the cache"):
        open_corpus(plan, BYTES)


def test_touched_files_make_the_same_corpus(plan: DataPlan) -> None:
    digest = corpus_of(plan).digest
    os.utime(Path(plan.sources[0].path) / "0" / "file000.txt", ns=(1, 1))
    assert corpus_of(plan).digest == digest


def test_two_sources_each_have_their_own(plan: DataPlan, tmp_path: Path) -> None:
    second = SourcePlan(path=str(write_files(tmp_path / "second", 5)), weight=2.0)
    both = plan.model_copy(update={"sources": (*plan.sources, second)})
    corpus = corpus_of(both)
    assert len(corpus.training) == len(corpus.held_out) == 2
    assert len(list(Path(plan.cache or "").iterdir())) == 2


def test_a_tokenizers_begin_and_end_stand_around_every_document(plan: DataPlan, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", ("document", "word"), bos_token="<s>", eos_token="</s>")
    tokens = load_tokens(plan, str(folder))
    split = corpus_of(plan, tokens).training[0]
    begins, ends = [0, *split.end_D.tolist()[:-1]], split.end_D.tolist()
    documents = [split.read(begin, end).tolist() for begin, end in zip(begins, ends, strict=True)]
    assert {document[0] for document in documents} == {tokens.begin}
    assert {document[-1] for document in documents} == {tokens.end}
    assert {document[1] for document in documents} == {1}  # "document"


def test_a_large_vocabulary_takes_wide_tokens(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(1 << 16)]
    folder = write_tokenizer(tmp_path / "model", words, eos_token="</s>")
    (tmp_path / "a.txt").write_text("w1 w65535 w65534")
    plan = data_plan(tmp_path / "cache", tmp_path / "a.txt", held_out=0.0, tokenizer=str(folder))
    split = corpus_of(plan, load_tokens(plan, None)).training[0]
    assert split.read(0, 4).tolist() == [2, 65536, 65535, 65537]


def test_a_kill_at_any_sync_is_mended(plan: DataPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is certain to be on disk but what a sync has put there, so the moments around syncs are all there are."""
    sync, left = os.fsync, 0

    def killing(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise KeyboardInterrupt
        sync(descriptor)

    prepare(plan, BYTES, ignore, part_bytes=2 * PART)
    expected = open_corpus(plan, BYTES).digest
    monkeypatch.setattr(os, "fsync", killing)
    kept: list[int] = []
    for syncs in range(1000):
        left = syncs
        own = plan.model_copy(update={"cache": f"{plan.cache}/{syncs}"})
        try:
            prepare(own, BYTES, ignore, part_bytes=2 * PART)
        except KeyboardInterrupt:
            events: list[object] = []
            prepare(own, BYTES, events.append, part_bytes=2 * PART)
            kept.append(cast(Working, events[0]).done if events else -1)
            assert open_corpus(own, BYTES).digest == expected
        else:
            break
    assert len(kept) > 20
    assert len(set(kept)) > 3  # each whole part was kept
    assert kept[:-1] == sorted(kept[:-1])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.sampled_from(FILES), st.integers(0, 10**9), st.sampled_from(["cut", "flip", "add", "gone"]))
def test_damage_is_never_read_and_always_mended(made: DataPlan, name: str, where: int, how: str) -> None:
    """Whatever happens to a file: it is refused, and the next run makes it whole."""
    expected, folder = content(made), only_folder(made)
    with put_back(folder):
        whole = (folder / name).read_bytes()
        at = where % len(whole)
        changed = {
            "cut": whole[:at],
            "flip": whole[:at] + bytes([whole[at] ^ (1 << where % 8)]) + whole[at + 1 :],
            "add": whole + whole[-at - 1 :],
            "gone": b"",
        }[how]
        if how == "gone":
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(changed)
        try:
            found = content(made)
        except UserError as refused:
            assert "run the same command again" in str(refused) or "prepare them first" in str(refused)  # noqa: PT017
        else:
            assert found == expected
            assert name == "manifest"  # which has words for people, too
        prepare(made, BYTES, ignore, part_bytes=PART)
        assert content(made) == expected


def test_a_flipped_byte_deep_in_a_large_part_is_found_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes((bytes(range(1, 256)) + b"\n") * (4 * BLOCK // 256))
    plan = data_plan(tmp_path / "cache", tmp_path / "a.txt", held_out=0.0)
    corpus_of(plan)
    tokens = only_folder(plan) / "training.tokens"
    with tokens.open("r+b") as file:
        file.seek(5 * BLOCK + 7)
        file.write(b"\xff")
    split = open_corpus(plan, BYTES).training[0]
    assert split.read(0, 5 * BLOCK // 2).tolist()[1:4] == [1, 2, 3]
    with pytest.raises(UserError, match=r'training\.tokens" are damaged: run the same command again'):
        split.read(5 * BLOCK // 2, 5 * BLOCK // 2 + 1)
    assert corpus_of(plan).training[0].read(5 * BLOCK // 2 + 3, 5 * BLOCK // 2 + 4).tolist() == [3]


def start(plan: DataPlan) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.training.data.preparing", plan.model_dump_json(), str(PART)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once_and_the_one_at_work_is_killed(plan: DataPlan, made: DataPlan) -> None:
    processes = [start(plan), start(plan)]
    try:
        lines = [cast("IO[str]", process.stdout).readline().split() for process in processes]
        at_work = 0 if lines[0][0] == "working" else 1
        assert [lines[at_work][0], lines[1 - at_work][0]] == ["working", "waiting"]
        for _ in range(3):
            go_on(processes[at_work])
        processes[at_work].kill()  # SIGKILL, somewhere in the fourth part
        other = processes[1 - at_work]
        said = cast("IO[str]", other.stdout).readline().split()
        assert said[0] == "working"
        assert int(said[1]) >= 3 * PART
        while said[0] == "working":
            said = go_on(other)
        assert said == ["done"]
        assert other.wait() == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert content(plan) == content(made)


def go_on(process: "subprocess.Popen[str]") -> list[str]:
    cast("IO[str]", process.stdin).write("\n")
    cast("IO[str]", process.stdin).flush()
    return cast("IO[str]", process.stdout).readline().split()


def test_what_changes_while_it_is_read_is_refused(plan: DataPlan) -> None:
    def change(event: object) -> None:
        (Path(plan.sources[0].path) / "1" / "file001.txt").write_text("changed")

    with pytest.raises(UserError, match="changed while they were read: run again"):
        prepare(plan, BYTES, change)
    with pytest.raises(UserError, match="are not in the cache"):
        open_corpus(plan, BYTES)
    assert b"changed" in texts_of(corpus_of(plan)) + texts_of(corpus_of(plan), held_out=True)


def test_a_full_disk_is_said_in_a_sentence(plan: DataPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"No space left on device\. Set data\.cache to a folder with room"):
            prepare(plan, BYTES, ignore)
    assert texts_of(corpus_of(plan))


def test_a_cache_that_is_no_folder_is_said_in_a_sentence(plan: DataPlan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be kept in .*Set data\.cache"):
        prepare(plan.model_copy(update={"cache": str(tmp_path / "file")}), BYTES, ignore)


def test_the_cache_is_in_the_users_folder_unless_said(
    plan: DataPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    corpus_of(plan.model_copy(update={"cache": None}))
    assert len(list((tmp_path / "xdg" / "tangram" / "tokens").iterdir())) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    corpus_of(plan.model_copy(update={"cache": None}))
    assert len(list((tmp_path / "home" / ".cache" / "tangram" / "tokens").iterdir())) == 1


def test_a_file_that_is_no_text_is_named(plan: DataPlan, tmp_path: Path) -> None:
    (Path(plan.sources[0].path) / "2" / "latin.txt").write_bytes(b"gr\xfcn")
    tokens = load_tokens(plan, str(write_tokenizer(tmp_path / "model", eos_token="</s>")))
    with pytest.raises(UserError, match=r'latin\.txt" is no UTF-8 text \(byte 2 is 0xfc\).*data\.tokenizer = "bytes"'):
        prepare(plan, tokens, ignore)
    assert b"gr\xfcn" in texts_of(corpus_of(plan)) + texts_of(corpus_of(plan), held_out=True)


@pytest.mark.parametrize(
    ("texts", "share", "why"),
    [
        ([""], 0.3, "has no text to train on: its files are empty"),
        (["one document"], 0.3, r"none of the 1 documents in data\.sources is held out"),
        (["one document"], 0.999999, r"all of its 1 documents are held out: lower data\.held_out"),
    ],
)
def test_too_little_text_is_refused(texts: list[str], share: float, why: str, tmp_path: Path) -> None:
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    with pytest.raises(UserError, match=why):
        prepare(data_plan(tmp_path / "cache", tmp_path, held_out=share), BYTES, ignore)


def test_progress_is_told(plan: DataPlan) -> None:
    events: list[Any] = []
    prepare(plan, BYTES, events.append, part_bytes=PART)
    assert not [event for event in events if isinstance(event, Note)]
    done = [event.done for event in events]
    assert len(done) > 5
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, events[0].total)
    assert {event.unit for event in events} == {"bytes"}
