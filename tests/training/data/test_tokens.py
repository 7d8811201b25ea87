"""Bytes, and tokenizers of Hugging Face directories."""

from collections import Counter
from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.training.data import BYTES, END, Tokens, load_tokens
from tangram.training.data.tokens import NotText, SpecialToken
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
    with pytest.raises(UserError, match=r'the tokenizer ".*nowhere" does not exist: give a Hugging Face directory'):
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


def special_tokenizer(folder: Path, kind: str) -> Path:
    """A tokenizer with <s>, </s> and <think>, which is no special token though it was added."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

    think = AddedToken("<think>", special=False)
    if kind == "slow":
        slow = ByT5Tokenizer(bos_token="<s>", extra_ids=0)
        slow.save_pretrained(str(folder))
        return folder
    if kind == "sentencepiece":
        sentencepiece = pytest.importorskip("sentencepiece")
        from transformers import SpeechT5Tokenizer

        folder.mkdir()
        (folder / "text").write_text("the text of hi < / s >\n" * 5)
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text"), model_prefix=str(folder / "spm"), vocab_size=25, model_type="bpe", minloglevel=2
        )
        SpeechT5Tokenizer(str(folder / "spm.model")).save_pretrained(str(folder))
        return folder
    if kind == "bytes":
        own = Tokenizer(models.BPE())
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        trainer = trainers.BpeTrainer(
            vocab_size=260, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    else:
        own = Tokenizer(models.Unigram())
        own.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
        trainer = trainers.UnigramTrainer(
            vocab_size=40, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    own.train_from_iterator(["the text of hi </s> <s>"] * 5, trainer)
    unknown = {"unk_token": "<unk>"} if kind == "unigram" else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>", **unknown)
    fast.add_tokens([think])
    fast.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("kind", ["bytes", "unigram", "slow", "sentencepiece"])
def test_the_plan_says_what_special_tokens_in_text_are(kind: str, tmp_path: Path) -> None:
    folder = special_tokenizer(tmp_path / "model", kind)

    def tokens_of(special: str) -> Tokens:
        return load_tokens(data_plan(tmp_path, tmp_path, tokenizer=str(folder), special_tokens=special), None)

    refuse, parse, text = (tokens_of(special) for special in ("refuse", "parse", "text"))
    inside = [b"hi", b"hi </s> of <s> hi"]
    with pytest.raises(SpecialToken, match=r'holds .<?/?s>.*set data\.special_tokens to "parse" if') as caught:
        refuse.encode(inside)
    assert caught.value.document == 1

    counted = Counter[str]()
    (row,) = parse.encode(inside[1:], counted)
    assert parse.end in row
    assert counted["special tokens: </s>"] == 1
    (row,) = text.encode(inside[1:])
    assert not {text.begin, text.end} & set(row.tolist())
    assert len(row) > len(parse.encode(inside[1:])[0])
    assert text.encode(inside[:1])[0].tolist() == refuse.encode(inside[:1])[0].tolist()

    begin = "" if parse.begin is None else "<s>"
    for rendered in (
        f"{begin}hi of",
        f"{begin}hi of</s>",
        f"{begin}hi of</s></s>",
        f"\n{begin}{begin}hi of</s>\n",
        "hi of",
    ):
        (row,) = parse.encode([rendered.encode()])
        ids = parse.document(row).tolist()
        assert ids.count(parse.end) == 1
        assert ids[-1] == parse.end
        assert ids.count(parse.begin) == (ids[0] == parse.begin) == bool(begin)
    assert not len(parse.document(parse.encode([f"{begin}</s>".encode()])[0]))


def test_tokens_that_were_added_stay_when_special_ones_are_text(tmp_path: Path) -> None:
    folder = special_tokenizer(tmp_path / "model", "bytes")
    tokens = load_tokens(data_plan(tmp_path, tmp_path, tokenizer=str(folder), special_tokens="text"), None)
    (row,) = tokens.encode([b"<think></s>"])
    assert tokens.decode(row.tolist()).replace(" ", "") == "<think></s>"
    assert tokens.decode(row[:1].tolist()) == "<think>"


def test_special_tokens_that_cannot_be_text_are_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", ("a", "b"), eos_token="end")  # a word like any other to its model
    tokens = load_tokens(data_plan(tmp_path, tmp_path, tokenizer=str(folder), special_tokens="text"), None)
    with pytest.raises(
        SpecialToken, match=r"holds 'end', which this tokenizer cannot write as text: set data\.special_"
    ):
        tokens.encode([b"a end b"])
