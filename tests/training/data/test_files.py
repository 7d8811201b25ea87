"""Which files a source takes: links are followed and no file is taken twice; what is left out is counted."""

import os
from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.schema.job import SourcePlan
from tangram.training.data.files import ROW, list_files
from tangram.training.data.sources import documents
from tests.training.data.texts import corpus_of, data_plan, texts_of


def names(path: Path, pattern: str | None = None) -> list[str]:
    return [file.name for file in list_files(SourcePlan(path=str(path), pattern=pattern)).files]


def linked(folder: Path) -> Path:
    """A folder with links to files and folders, in and out of it, two of them loops, one to nothing."""
    for name in ("corpus/deep/a.txt", "corpus/b.txt", "outside/c.txt", "outside/more/d.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the text of {name}")
    for name, to in {
        "1st": "../outside", "2nd": "../outside", "deep/up": "..", "self": "self", "a-link.txt": "deep/a.txt",
        "no.txt": "nowhere", "deep/e.txt": "../../outside/c.txt",
    }.items():  # fmt: skip
        (folder / "corpus" / name).symlink_to(to)
    (folder / "outside" / "back").symlink_to("../corpus/deep")
    return folder / "corpus"


@pytest.mark.parametrize("pattern", [None, "**/*.txt", "**/**/*.txt"])
def test_links_are_followed_and_no_file_is_taken_twice(pattern: str | None, tmp_path: Path) -> None:
    found = list_files(SourcePlan(path=str(linked(tmp_path)), pattern=pattern))
    texts = sorted(document.text.decode() for document in documents(found, "text"))
    assert texts == [
        f"the text of {name}" for name in ("corpus/b.txt", "corpus/deep/a.txt", "outside/c.txt", "outside/more/d.txt")
    ]
    assert {"b.txt", "deep/a.txt"} < {file.name for file in found.files}  # real names come before links
    assert found.left_out["by a second link to a file"] == 2
    assert found.left_out["by a broken link"] == 1 + (pattern is None)  # "self" is no .txt
    assert found.left_out["by a second link to a folder"] == 3


def test_braces_choose_as_those_of_a_shell(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "c.py", "deep/d.md", "deep/part-0.txt", "deep/part-1.txt", "e{1}.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert names(tmp_path, "**/*.{md,py}") == ["b.md", "c.py", "deep/d.md"]
    assert names(tmp_path, "{deep/part-?,a}.{txt,md}") == ["a.txt", "deep/part-0.txt", "deep/part-1.txt"]
    assert names(tmp_path, "deep/part-{1..3}.txt") == ["deep/part-1.txt"]
    assert names(tmp_path, "e{1}.txt") == ["e{1}.txt"]


def test_many_links_to_one_another_end(tmp_path: Path) -> None:
    folders = [tmp_path / f"{number:02d}" for number in range(12)]
    for folder in folders:
        folder.mkdir()
        (folder / "a.txt").write_text(folder.name)
    for folder in folders:
        for other in folders:
            (folder / f"to{other.name}").symlink_to(other)
    assert names(tmp_path) == [f"{number:02d}/a.txt" for number in range(12)]


@pytest.mark.parametrize(
    "pattern", ["*.txt", "**/*.txt", "*/*.txt", "deep/*.txt", "d*/?.txt", "../corpus/[bc].txt", "**/d*/*"]
)
def test_patterns_choose_as_those_of_the_standard_library(pattern: str, tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    for name in (
        "a.txt",
        "b.txt",
        "c.md",
        "deep/a.txt",
        ".hidden/a.txt",
        "deep/.b.txt",
        "deep/down/c.txt",
        "d.txt/e.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    expected = sorted({os.path.normpath(path) for path in root.glob(pattern) if path.is_file()})
    assert sorted(os.path.normpath(root / name) for name in names(root, pattern)) == expected


def test_a_folder_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "in").mkdir(mode=0)
    with pytest.raises(UserError, match='in" cannot be read: Permission denied'):
        names(tmp_path)


def test_one_line_says_what_was_taken_and_left_out(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    (root / "a.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (root / "rows.json").write_text('[{"text": "one"},\n {"text": "two"}, {"text": null}]')
    (root / "rows.csv").write_text('id;text\n1;"three;\nand more"\n2;four\n')
    (root / "package.json").write_text('{"name": "a tool", "version": 3}')
    (root / "numbers.csv").write_text("x,y\n1,2\n")
    (root / "empty.txt").write_text("")
    (root / "picture.png").write_bytes(b"\x89PNG\0")
    (root / ".hidden.txt").write_text("hidden")
    plan = data_plan(tmp_path / "cache", root, held_out=0.0)
    for _ in range(2):  # also from the cache
        corpus = corpus_of(plan)
        assert sorted(texts_of(corpus)) == [b"four", b"one", b"three;\nand more", b"two", b"with a mark"]
        (line,) = corpus.read
        assert line.startswith("4 taken (2 text, 1 JSON, 1 cells), 5 documents; left out: 2 documents without text, ")
        for what in ('1 .json without "text"', '1 .csv without "text"', "1 of another kind (.png)", "1 hidden"):
            assert what in line
    for strict, why in {
        "*.json": 'line 1 of .*package.json" has no "text"',
        "*.csv": 'numbers.csv" has no "text"',
    }.items():
        source = SourcePlan(path=str(root), pattern=strict)
        with pytest.raises(UserError, match=why):
            corpus_of(data_plan(tmp_path / "cache", source, held_out=0.0))
    corpus = corpus_of(data_plan(tmp_path / "cache", SourcePlan(path=str(root), pattern="*[gt]"), held_out=0.0))
    assert corpus.read == ("3 taken (3 text), 2 documents; left out: 1 binary, 1 documents without text",)
    with pytest.raises(UserError, match="is no text by its first bytes"):
        corpus_of(data_plan(tmp_path / "cache", root / "picture.png", held_out=0.0))


def test_what_was_counted_before_a_kill_is_counted_once(tmp_path: Path) -> None:
    from tangram.training.data import BYTES, open_corpus, prepare
    from tangram.training.observe.events import Working

    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(9):
        (root / f"{number}.txt").write_text("" if number % 3 == 1 else f"{number} " * 50)
        (root / f"{number}.bin").write_bytes(b"\0")
    source = SourcePlan(path=str(root), pattern="*")
    whole, killed = (data_plan(tmp_path / name, source, held_out=0.0) for name in ("one", "two"))
    prepare(whole, BYTES, lambda _: None)

    def stop(event: object) -> None:
        if isinstance(event, Working) and event.done > 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(killed, BYTES, stop, part_bytes=1)
    prepare(killed, BYTES, lambda _: None, part_bytes=1)
    assert open_corpus(killed, BYTES).read == open_corpus(whole, BYTES).read
    assert (
        "9 taken (9 text), 6 documents; left out: 9 binary, 3 documents without text" in open_corpus(whole, BYTES).read
    )


def test_cells_of_every_ending_are_rows(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    (root / "a.tab").write_text("id\ttext\n1\tby tabs\n")
    (root / "b.psv").write_text("id|text\n1|by bars, alone\n")
    for source in (root, root / "a.tab", root / "b.psv"):
        got = texts_of(corpus_of(data_plan(tmp_path / "cache", source, held_out=0.0)))
        assert sorted(got) == [
            text for name, text in (("b", b"by bars, alone"), ("a", b"by tabs")) if source.stem in (name, "in")
        ]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id,text\none,1,two\n")
    for field in ("text", ROW):
        with pytest.raises(UserError, match=r'a\.csv" has 2 columns "text": give each a name of its own'):
            list(documents(list_files(SourcePlan(path=str(tmp_path / "a.csv"))), field))
    (tmp_path / "b.csv").write_text("text,id,id\none,1,2\n")  # those that are not read may be alike
    assert texts_of(corpus_of(data_plan(tmp_path / "cache", tmp_path / "b.csv", held_out=0.0))) == [b"one"]
