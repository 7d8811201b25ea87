"""Bytes, and tokenizers of Hugging Face directories."""

from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.training.data import BYTES, END, load_tokens
from tangram.training.data.tokens import NotText
from tests.training.data.texts import data_plan, write_tokenizer


def test_bytes_stand_for_themselves() -> None:
    assert [row.tolist() for row in BYTES.encode([b"ab\xff", b""])] == [[97, 98, 255], []]
    assert BYTES.decode([END, *"grün".encode(), END]) == "grün"
    assert BYTES.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"
    assert (BYTES.vocabulary, BYTES.begin, BYTES.end) == (257, 256, 256)


def test_a_preset_trains_on_bytes(tmp_path: Path) -> None:
    plan = data_plan(tmp_path, tmp_path)
    assert load_tokens(plan, None) is BYTES
    assert load_tokens(plan.model_copy(update={"tokenizer": "bytes"}), str(tmp_path / "model")) is BYTES


def test_the_tokenizer_beside_a_model_or_at_a_path(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", bos_token="<s>", eos_token="</s>")
    (folder / "config.json").write_text("{}")
    beside = load_tokens(data_plan(tmp_path, tmp_path), str(folder))
    tokens = load_tokens(data_plan(tmp_path, tmp_path, tokenizer=str(folder)), None)
    assert tokens == beside == load_tokens(data_plan(tmp_path, tmp_path), str(folder / "config.json"))
    assert (tokens.vocabulary, tokens.begin, tokens.end, tokens.folder) == (6, 4, 5, folder)
    assert [row.tolist() for row in tokens.encode([b"a b", b"", b"c nothing"])] == [[1, 2], [], [3, 0]]
    assert tokens.encode([]) == []
    assert tokens.decode([4, 1, 2, 5]) == "a b"


def test_another_tokenizer_has_another_digest(tmp_path: Path) -> None:
    folders = [
        write_tokenizer(tmp_path / "one", eos_token="</s>"),
        write_tokenizer(tmp_path / "two", ("a", "b", "d"), eos_token="</s>"),
        write_tokenizer(tmp_path / "three", bos_token="</s>", eos_token="</s>"),
    ]
    plans = [data_plan(tmp_path, tmp_path, tokenizer=str(folder)) for folder in folders]
    digests = {load_tokens(plan, None).digest for plan in plans} | {BYTES.digest}
    assert len(digests) == 4
    assert load_tokens(plans[0], None).digest in digests


def test_text_that_is_none_is_named(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", eos_token="</s>")
    tokens = load_tokens(data_plan(tmp_path, tmp_path, tokenizer=str(folder)), None)
    assert tokens.begin is None
    with pytest.raises(NotText, match="byte 2 is 0xff") as caught:
        tokens.encode([b"a", b"b \xff"])
    assert caught.value.document == 1


def test_a_missing_tokenizer_is_refused_with_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'no tokenizer beside the model in ".*": set data\.tokenizer'):
        load_tokens(data_plan(tmp_path, tmp_path), str(tmp_path))
    with pytest.raises(UserError, match=r'no tokenizer in ".*nowhere": set data\.tokenizer'):
        load_tokens(data_plan(tmp_path, tmp_path, tokenizer=str(tmp_path / "nowhere")), None)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    with pytest.raises(UserError, match="no end-of-sequence token"):
        load_tokens(data_plan(tmp_path, tmp_path), str(folder))


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", eos_token="</s>")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot be read \(.*\): set data\.tokenizer"):
        load_tokens(data_plan(tmp_path, tmp_path), str(folder))
