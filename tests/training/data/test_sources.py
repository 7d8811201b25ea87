"""Documents of every kind of file, from any one on; and what is said of files that are wrong."""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tangram.errors import UserError
from tangram.schema.job import SourcePlan
from tangram.training.data.files import list_files
from tangram.training.data.sources import documents

ROWS = [{"text": f"row {number}", "other": "x"} for number in range(7)]
EXPECTED = [f"row {number}".encode() for number in range(7)]


def read(path: Path, pattern: str | None = None, field: str = "text") -> list[bytes]:
    """All documents; every tail of them must be found alone."""
    files = list_files(SourcePlan(path=str(path), pattern=pattern))
    whole = list(documents(files, field))
    for at, document in enumerate(whole):
        assert list(documents(files, field, (document.file, document.number))) == whole[at:]
        assert list(documents(files, field, (document.file, document.number + 1))) == whole[at + 1 :]
    done = [document.done for document in whole]
    assert done == sorted(done)
    assert all(0 < part <= files.size for part in done)
    return [document.text for document in whole]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path: Path, columns: dict[str, list[Any]], group: int = 3) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=group)
    return path


def write_dataset(path: Path, *, split: str | None = None) -> Path:
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict({split: table}) if split else table).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_jsonl(name: str, tmp_path: Path) -> None:
    assert read(write_jsonl(tmp_path / name, ROWS)) == EXPECTED
    assert read(tmp_path / name, field="other") == [b"x"] * 7


def test_jsonl_without_text_in_some_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": null}\n{"text": ""}\n{"text": "b"}')
    assert read(path) == [b"a", b"b"]


def test_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": [row["text"] for row in ROWS], "n": list(range(7))})
    assert read(path) == EXPECTED
    holes = write_parquet(tmp_path / "b.parquet", {"text": ["a", None, "", "b"]}, group=2)
    assert read(holes) == [b"a", b"b"]


def test_datasets_directories(tmp_path: Path) -> None:
    assert read(write_dataset(tmp_path / "plain")) == EXPECTED
    assert read(write_dataset(tmp_path / "split", split="train")) == EXPECTED
    with pytest.raises(UserError, match='no split "train" but test: give the directory of one'):
        read(write_dataset(tmp_path / "test", split="test"))
    with pytest.raises(UserError, match=r'has no "texts": did you mean "text"\? Set the source'):
        read(tmp_path / "plain", field="texts")


def test_a_folder_gives_every_known_file_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"b.txt": "b", "deep/a.md": "a", "c.bin": "c", "empty.txt": "", ".git/d.txt": "d"}.items():
        (tmp_path / name).write_text(text)
    write_jsonl(tmp_path / "a.jsonl", ROWS[:2])
    write_parquet(tmp_path / "p.parquet", {"text": ["p"]})
    assert read(tmp_path) == [b"row 0", b"row 1", b"b", b"a", b"p"]
    assert read(tmp_path, "**/*.bin") == [b"c"]
    assert read(tmp_path / "c.bin") == [b"c"]


def test_the_standard_library_is_its_sources_without_its_tests() -> None:
    names = [file.name for file in list_files(SourcePlan(path="stdlib", pattern="j*/**/*.py")).files]
    assert "json/decoder.py" in names
    every = list_files(SourcePlan(path="stdlib", pattern="[a-e]*/**/*.py")).files
    assert not [file.name for file in every if "/test/" in file.name or "/tests/" in file.name]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ('{"text": "a"}\n{"text": \n', r'line 2 of ".*a\.jsonl" is no JSON'),
        ('{"text": "a"}\n[1]\n', r'line 2 of ".*a\.jsonl" is no JSON object'),
        ('{"txt": "a"}\n', r'line 1 of ".*a\.jsonl" has no "text": did you mean "txt"\?'),
        ('{"content": "a", "url": "b"}\n', r'line 1 of ".*a\.jsonl" has no "text": it has content, url'),
        ('{"text": 3}\n', r'"text" in line 1 of ".*a\.jsonl" is int, not text'),
        ('{"text": "\\ud800"}\n', r'"text" in line 1 of ".*a\.jsonl" is no text'),
        ('{"text": "\udcff"}\n', r'line 1 of ".*a\.jsonl" is no JSON'),
    ],
)
def test_a_line_that_is_wrong_is_named(lines: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=why):
        read(tmp_path)


def test_a_parquet_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"txt": ["a"], "n": [1]})
    with pytest.raises(UserError, match=r'a\.parquet" has no "text": did you mean "txt"\?'):
        read(path)
    with pytest.raises(UserError, match=r'"n" in row 1 of ".*a\.parquet" is int, not text'):
        read(path, field="n")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r'a\.parquet" cannot be read: .*Leave it out by the pattern'):
        read(path)


def test_a_torn_gzip_file_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.gz", ROWS)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UserError, match=r'a\.jsonl\.gz" cannot be read'):
        read(path)
    path.write_bytes(b"no gzip at all")
    with pytest.raises(UserError, match=r'a\.jsonl\.gz" cannot be read'):
        read(path)


def test_a_broken_datasets_directory_is_named(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "plain")
    next(folder.glob("*.arrow")).unlink()
    with pytest.raises(UserError, match='plain" cannot be read'):
        read(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(UserError, match=r'a\.txt" cannot be read: Permission denied'):
        read(tmp_path)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    files = list_files(SourcePlan(path=str(tmp_path)))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r'a\.txt" cannot be read: No such file'):
        list(documents(files, "text"))


def test_sources_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"x")
    for path, pattern, why in [
        (tmp_path / "nowhere", None, "does not exist: give a file, a folder"),
        (tmp_path, None, r"is of a known kind \(\.txt"),
        (tmp_path, "*.txt", r'no file under .* matches "\*\.txt"'),
        (tmp_path, "/etc/*", "cannot be used: .*Give one relative"),
        (tmp_path, "**.py", "cannot be used"),
        (tmp_path, "", "cannot be used"),
        (tmp_path, "*.zip", r'a\.zip" is no text: unpack it'),
    ]:
        with pytest.raises(UserError, match=why):
            read(path, pattern)


@pytest.mark.parametrize(("package", "write"), [("pyarrow", "parquet"), ("datasets", "directory")])
def test_a_missing_extra_is_named(package: str, write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if write == "parquet":
        path = write_parquet(tmp_path / "a.parquet", {"text": ["a"]})
    else:
        path = write_dataset(tmp_path / "set")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf'{package}, which is not installed: pip install "tangram-train\[data\]"'):
        read(path)
