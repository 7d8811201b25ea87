"""Public reports about text, tokens and samples, rebuilt small."""

import gc
import gzip
import json
from pathlib import Path

import pytest
import torch

from tangram.errors import UserError
from tangram.schema.job import SourcePlan
from tangram.training.data import Stream, Tokens, load_tokens, open_corpus, prepare
from tangram.training.data.files import list_files
from tests.training.data.texts import corpus_of, data_plan, ignore, texts_of, write_tokenizer

WORDS = ("a", "b", "c", "<", "s", ">", "</", "user", "hi")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), WORDS, bos_token="<s>", eos_token="</s>")


def texts(folder: Path, **files: bytes) -> list[bytes]:
    """The documents of bytes of files in a folder; "__" in a name is a dot."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return sorted(texts_of(corpus_of(data_plan(folder.parent / "cache", folder, held_out=0.0))))


def rows(folder: Path, text: str, tokenizer: Path, special: str) -> list[str]:
    """The tokens of one document."""
    (folder / "a.txt").write_text(text)
    plan = data_plan(folder / "c", folder / "a.txt", tokenizer=str(tokenizer), special_tokens=special, held_out=0.0)
    tokens = load_tokens(plan, None)
    (split,) = corpus_of(plan, tokens).training
    names = ["[UNK]", *WORDS, "<s>", "</s>"]
    return [names[token] for token in split.read(0, split.size).tolist()]


def refused(path: Path, content: bytes, why: str, **changes: object) -> None:
    path.write_bytes(content)
    plan = data_plan(path.parent / "cache", path, held_out=0.0, **changes)
    with pytest.raises(UserError, match=why):
        corpus_of(plan, load_tokens(plan, None))


def test_packed_documents_do_not_see_one_another(tmp_path: Path) -> None:
    """axolotl#1375: (and trl#1230) attention and labels leak from one packed document into the next."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number * 11} abc"[: 3 + number])
    plan = data_plan(
        tmp_path / "cache", tmp_path, held_out=0.0, sequence=17, global_batch=1, micro_batch=1, packing="packed"
    )
    (batch,) = next(Stream(corpus_of(plan), plan)).micro
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes)).eval()
    assert batch.positions_BS is not None
    begins = [at for at, place in enumerate(batch.positions_BS[0].tolist()) if place == 0]
    assert len(begins) >= 3
    with torch.no_grad():
        packed = model(batch.inputs_BS, position_ids=batch.positions_BS, use_cache=False).logits[0]
        for begin, end in zip(begins, [*begins[1:], 17], strict=True):
            alone = model(batch.inputs_BS[:, begin:end]).logits[0]
            torch.testing.assert_close(packed[begin:end], alone, rtol=0, atol=1e-5)
            assert batch.labels_BS[0, end - 1] == -100 or end == 17
        leaked = model(batch.inputs_BS).logits[0]  # the check can fail: one long document, positions that go on
        assert (leaked[begins[1] : begins[2]] - packed[begins[1] : begins[2]]).abs().max() > 1e-4


def test_a_changed_file_is_tokenised_anew(tmp_path: Path) -> None:
    """axolotl#1265: a prepared data set is reused after its files changed."""
    plan = data_plan(tmp_path / "cache", tmp_path / "a.jsonl", held_out=0.0)
    for text in ("one", "two!"):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
        assert texts_of(corpus_of(plan)) == [text.encode()]


def test_other_rules_have_another_cache(tmp_path: Path, tokenizer: Path) -> None:
    """open-instruct#1818: the key of the cache lacks what decides the tokens."""
    text = "a </s> b"
    assert rows(tmp_path, text, tokenizer, "parse") == ["<s>", "a", "</s>", "b", "</s>"]
    assert rows(tmp_path, text, tokenizer, "text") == ["<s>", "a", "</", "s", ">", "b", "</s>"]
    assert rows(tmp_path, text, tokenizer, "parse") == ["<s>", "a", "</s>", "b", "</s>"]


@pytest.mark.parametrize("end", ["", "</s>", "</s>\n"])
def test_rendered_text_has_one_begin_and_one_end(end: str, tmp_path: Path, tokenizer: Path) -> None:
    """OpenRLHF#393: text that a template rendered begins with BOS and gets a second one."""
    text = f"<s>user hi{end}"
    assert rows(tmp_path, text, tokenizer, "parse") == ["<s>", "user", "hi", "</s>"]
    tokens = load_tokens(data_plan(tmp_path, tmp_path, tokenizer=str(tokenizer)), None)
    doubled = [tokens.begin, *ids_of(tokens, text)]
    assert doubled[:2] == [tokens.begin, tokens.begin]  # what was trained on before


def test_special_tokens_in_text_are_asked_about(tmp_path: Path, tokenizer: Path) -> None:
    """dolma#176: the text of a special token in a document becomes the token."""
    why = r'document 1 of ".*a\.txt" holds .</s>., a special token .*: set data.special_tokens to "parse" if'
    refused(tmp_path / "a.txt", b"a </s> b", why, tokenizer=str(tokenizer))
    plan = data_plan(tmp_path / "c", tmp_path / "a.txt", tokenizer=str(tokenizer), special_tokens="text", held_out=0.0)
    (line,) = corpus_of(plan, load_tokens(plan, None)).read
    assert line.endswith("1 </s> in the text read as characters (data.special_tokens)")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """datasets#8241: a file of JSON lines that begins with a byte order mark is read in another way."""
    mark = b"\xef\xbb\xbf"
    assert texts(
        tmp_path / "in", a__txt=mark + b"text", b__jsonl=mark + b'{"text": "lines"}\r\n{"text": "more"}',
        c__json=mark + b'[{"text": "array"}]', d__csv=mark + b"text,n\ncells,1\n",
    ) == [b"array", b"cells", b"lines", b"more", b"text"]  # fmt: skip


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    """inspect_ai#5474: the first column of a CSV file that a spreadsheet wrote is not found."""
    assert texts(tmp_path / "in", a__csv='\ufefftext;id\r\n"a;""b""";1\r\n'.encode()) == [b'a;"b"']


def test_line_ends_within_quotes_are_text(tmp_path: Path) -> None:
    """turicreate#907: a cell that holds a line end loses its text, or a row."""
    assert texts(tmp_path / "in", a__csv=b'id,text\n1,fine\n2,"not\nso, fine"\n') == [b"fine", b"not\nso, fine"]
    refused(tmp_path / "b.csv", b'id,text\n1,"torn\n2,b\n', r'row 1 of ".*b\.csv" cannot be read: .*quotes above all')
    refused(tmp_path / "c.csv", b"id,text\n1,a,b\n", r"row 1 of .* has 3 cells under 2 names")


def test_long_cells_are_read(tmp_path: Path) -> None:
    """agate#485: a cell of more than 131,072 characters is refused by the csv module."""
    import csv

    before = csv.field_size_limit()
    assert texts(tmp_path / "in", a__tsv=b"n\ttext\n1\t" + b"x" * 200_000 + b"\n") == [b"x" * 200_000]
    assert csv.field_size_limit() == before


def test_arrays_of_objects_are_rows(tmp_path: Path) -> None:
    """flan-alpaca#5: a data set that is one JSON array is read as if it had an object a line."""
    array = json.dumps([{"text": "one"}, {"text": "two"}], indent=1).encode()
    assert (
        texts(tmp_path / "in", a__json=array, b__jsonl=array, c__json__gz=gzip.compress(array))
        == [b"one"] * 3 + [b"two"] * 3
    )
    refused(tmp_path / "d.json", array[:-2], r'd\.json" is no JSON: Expecting')
    refused(tmp_path / "e.json", array + array, r'e\.json" is no JSON: Expecting one array and nothing after it')


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_packed_files_are_unpacked_by_content(ending: str, tmp_path: Path) -> None:
    """datasets#6851: a file that is packed and does not say so is decoded as text."""
    import bz2
    import lzma

    import pyarrow

    def zstd(content: bytes) -> bytes:
        return pyarrow.compress(content, codec="zstd", asbytes=True)

    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}[ending]
    lines = pack(b'{"text": "one"}\n{"text": "two"}\n')
    assert texts(tmp_path / "in", **{f"a.jsonl{ending}": lines, "b.jsonl": lines, f"c.txt{ending}": pack(b"text")}) == [
        b"one", b"one", b"text", b"two", b"two",
    ]  # fmt: skip
    refused(tmp_path / f"d.txt{ending}", pack(b"text")[:-3], "cannot be read")


@pytest.mark.parametrize("pattern", [None, "**/*.txt"])
def test_linked_folders_are_entered(pattern: str | None, tmp_path: Path) -> None:
    """ir_datasets#160: "**" does not enter folders that are links, and their files are missing without a word."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "d.txt").write_text("linked")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b").symlink_to(tmp_path / "real")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    corpus = corpus_of(data_plan(tmp_path / "c", SourcePlan(path=str(tmp_path / "in"), pattern=pattern), held_out=0.0))
    assert texts_of(corpus) == [b"linked"]
    assert "left out: 1 by a second link to a folder" in corpus.read[0]


def test_text_that_is_not_utf8_is_named(tmp_path: Path, tokenizer: Path) -> None:
    """speechbrain#1238: text in another encoding ends in a decoder's stack trace."""
    own = {"tokenizer": str(tokenizer)}
    refused(tmp_path / "a.txt", "käse".encode("latin-1"), r'a\.txt" is no UTF-8 text \(byte 1 is 0xe4\)', **own)
    refused(tmp_path / "b.txt", "text".encode("utf-16"), r'b\.txt" is UTF-16 text: write it as UTF-8', **own)
    refused(tmp_path / "b.txt", "text".encode("utf-32"), r"is UTF-32 text: write it as UTF-8 \(iconv -f UTF-32", **own)
    refused(tmp_path / "c.csv", "text\nkäse\n".encode("latin-1"), r'c\.csv" is no UTF-8 text', **own)
    refused(tmp_path / "d.jsonl", '{"text": "käse"}'.encode("latin-1"), r'line 1 of ".*d\.jsonl" is no JSON', **own)


def test_a_torn_line_is_named(tmp_path: Path) -> None:
    """GEAR#2: the last line of a file of JSON lines is torn."""
    refused(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "b', r'line 2 of ".*a\.jsonl" is no JSON')


def test_empty_documents_are_none(tmp_path: Path) -> None:
    """Megatron-LM#62: a document without text, as the first one, ends the preparation."""
    assert texts(tmp_path / "in", a__jsonl=b'{"text": ""}\n{"text": null}\n{"text": "a"}\n', b__txt=b"") == [b"a"]
    refused(tmp_path / "b.txt", b"", "has no text to train on: its files are empty")


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    """Megatron-LM#1774: a tokenizer without an end token is not refused in a sentence."""
    folder = write_tokenizer(tmp_path / "model")
    refused(tmp_path / "a.txt", b"a", "has no end-of-sequence token", tokenizer=str(folder))
    refused(tmp_path / "a.txt", b"a", "there is no tokenizer in", tokenizer=str(tmp_path))


def test_chats_are_refused_with_the_columns_that_are_there(tmp_path: Path) -> None:
    """autotrain-advanced#753: what of a row is trained on, and what is put around it, is not said."""
    refused(tmp_path / "a.jsonl", b'{"messages": []}\n', r'line 1 of .* has no "text": it has messages')


def memory(field: str) -> int:
    """Resident memory of this process in bytes: now ("VmRSS"), or the most since it was last reset ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def test_a_long_line_takes_little_memory(tmp_path: Path, tokenizer: Path) -> None:
    """marin#5231: one long document takes a hundred times its size of memory."""
    words = "user hi a-b " * 80_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": words}))
    plan = data_plan(tmp_path / "c", tmp_path / "a.jsonl", tokenizer=str(tokenizer), held_out=0.0)
    tokens = load_tokens(plan, None)
    more: list[float] = []
    whole: list[int] = []
    for work in (lambda: prepare(plan, tokens, ignore), lambda: whole.extend(ids_of(tokens, words))):
        gc.collect()
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the most memory is measured anew
        work()
        more.append((memory("VmHWM") - before) / len(words))
    assert more[0] < 35 < 70 < more[1]  # what it was before: the tokenizer itself on all of the text
    (split,) = open_corpus(plan, tokens).training
    assert split.read(1, split.size - 1).tolist() == whole


def ids_of(tokens: Tokens, text: str) -> list[int]:
    """What the tokenizer itself gives."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tokens.folder))([text], add_special_tokens=False)["input_ids"][0]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a", "a.dat"])
@pytest.mark.parametrize("rows", [b'{"text": "one"}\n{"text": "two"}\n', b'[{"text": "one"},\n {"text": "two"}]'])
def test_rows_are_rows_whatever_the_file_is_called(name: str, rows: bytes, tmp_path: Path) -> None:
    """ru-gpts#30: are lines of JSON text or rows, where the name of their file does not say it?"""
    (tmp_path / name).write_bytes(rows)
    corpus = corpus_of(data_plan(tmp_path / "cache", tmp_path / name, held_out=0.0))
    assert sorted(texts_of(corpus)) == [b"one", b"two"]


NO_TEXT = (
    b"%PDF-1.7\n%\xe2\xe3", b"\x89PNG\r\n\x1a\n", b"PK\x03\x04abc", b"\x04\x22\x4d\x18abc", b"\x1f\x9dabc",
    b"\x80\x04\x95abc", b"\x93NUMPY", b"\xff\xd8\xff\xe0", b"7z\xbc\xaf", b"Rar!\x1a\x07", b"Obj\x01abc", b"ARROW1abc",
)  # fmt: skip


@pytest.mark.parametrize("begin", NO_TEXT)
def test_what_is_no_text_is_not_trained_on(begin: bytes, tmp_path: Path) -> None:
    """lltk#1: files that end in .txt are no text."""
    refused(tmp_path / "a", begin, "is no text")
    (tmp_path / "b.txt").write_bytes(b"b")
    folder = data_plan(tmp_path / "cache", tmp_path, held_out=0.0)
    folder = folder.model_copy(update={"sources": (SourcePlan(path=str(tmp_path), pattern="*"),)})
    corpus = corpus_of(folder)
    assert texts_of(corpus) == [b"b"]
    assert "left out: 1 binary" in corpus.read[0]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.csv", "a"])
def test_a_pointer_of_git_lfs_is_no_text(name: str, tmp_path: Path) -> None:
    """benedekrozemberczki/datasets#10: the CSV files of a data set are three lines of git-lfs each."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
    refused(tmp_path / name, pointer, "is a pointer of git-lfs, not the file itself: run `git lfs pull`")


def test_json_lines_that_are_called_json(tmp_path: Path) -> None:
    """levanter#394: files that end in .json have an object in each line, and one more line that is empty."""
    assert texts(tmp_path / "in", a__json=b'{"text": "one"}\n{"text": "two"}\n\n') == [b"one", b"two"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_column_that_is_there_twice(name: str, tmp_path: Path) -> None:
    """spark#17758: of two columns by one name the last was taken, in JSON, in cells and in tables."""
    path = tmp_path / name
    if name == "a.parquet":
        arrow = pytest.importorskip("pyarrow")
        table = arrow.Table.from_arrays([arrow.array(["one"]), arrow.array(["two"])], names=["text", "text"])
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        path.write_text("text,text\none,two\n" if name == "a.csv" else '{"text": "one", "text": "two"}\n')
    refused(path, path.read_bytes(), "twice|2 columns")


def test_another_column_that_is_there_twice(tmp_path: Path) -> None:
    """spark#17758: a column that nobody reads is no reason to refuse a file."""
    assert texts(tmp_path / "in", a__jsonl=b'{"text": "one", "meta": {"a": 1, "a": 2}, "b": 1, "b": 2}\n') == [b"one"]


@pytest.mark.parametrize("layout", ["{}.jsonl", "data/{}-00000-of-00001.jsonl", "{}/part_0.jsonl"])
def test_the_split_that_is_for_tests_is_not_trained_on(layout: str, tmp_path: Path) -> None:
    """marin#2381: (and OpenRLHF#367) the splits of a data set lie in one folder, and all of them were trained on."""
    for split in ("train", "test", "validation"):
        path = tmp_path / "in" / layout.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": split}) + "\n")
    source = SourcePlan(path=str(tmp_path / "in"))
    found = list_files(source)
    assert [file.name for file in found.files] == [layout.format("train")]
    assert found.left_out == {'of the split "test" beside "train"': 1, 'of the split "validation" beside "train"': 1}
    assert len(list_files(SourcePlan(path=str(tmp_path / "in"), pattern="**/*.jsonl")).files) == 3
    (tmp_path / "in" / layout.format("train")).unlink()
    assert len(list_files(source).files) == 2
