"""Long texts are tokenised window by window, into exactly the tokens of the whole."""

import random
from functools import cache
from itertools import chain, pairwise
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tangram.training.data import tokens as token_module
from tangram.training.data.tokens import long_row

KINDS = ("words", "bytes", "regex", "metaspace", "no words", "pieces", "unigram")
OPTIONS = {"add_special_tokens": False, "verbose": False}
REGEX = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def tokenizer(kind: str) -> Any:
    """A small tokenizer of a kind that is in use."""
    own: Any = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    trainer: Any = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    match kind:
        case "words":
            own, trainer = (
                Tokenizer(models.WordLevel(unk_token="<unk>")),
                trainers.WordLevelTrainer(special_tokens=["<unk>"]),
            )
            own.pre_tokenizer = pre_tokenizers.Whitespace()
        case "bytes":
            own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "regex":
            cut = pre_tokenizers.Split(Regex(REGEX), "isolated")
            own.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
        case "pieces":
            own, trainer = (
                Tokenizer(models.WordPiece(unk_token="<unk>")),
                trainers.WordPieceTrainer(special_tokens=["<unk>"]),
            )
            own.normalizer, own.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        case "unigram":
            own = Tokenizer(models.Unigram())
            own.normalizer, own.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
            trainer = trainers.UnigramTrainer(
                vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
            )
        case _:
            own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.train_from_iterator([" ".join(text(seed, 300).split(" ")) for seed in range(8)], trainer)
    if kind == "no words":
        own.pre_tokenizer = None
        own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", eos_token="</s>")


def text(seed: int, length: int) -> str:
    drawn = random.Random(seed)
    parts = [
        "a",
        "b",
        "ab",
        " ",
        "  ",
        "\n",
        "\r\n",
        " the",
        " word",
        "日本",
        "é",
        "e\u0301",
        "ﬁ",
        "😀",
        ".",
        "12",
        "</s>",
    ]
    return "".join(drawn.choice(parts) for _ in range(length))


TEXTS = {
    "mixed": text(1, 3000),
    "spaces": "a" + " " * 2500 + "b" + "\n" * 2500 + "the end",
    "letters": "ab" * 3000,
    "lines": "the word\n\n  \t" * 400,
    "unspaced": text(2, 4000).replace(" ", ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_windows_give_the_tokens_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"WINDOW": 512, "OVERLAP": 160, "AGREE": 24}.items():
        monkeypatch.setattr(token_module, name, size)
    for name, one in TEXTS.items():
        whole = tokenizer(kind)([one], **OPTIONS)["input_ids"][0]
        assert long_row(tokenizer(kind), one, **OPTIONS).tolist() == whole, name


def test_windows_are_left_for_the_next_and_where_that_is_wrong_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"WINDOW": 512, "OVERLAP": 160, "AGREE": 24}.items():
        monkeypatch.setattr(token_module, name, size)
    one, made = TEXTS["lines"], tokenizer("no words")
    whole = made([one], **OPTIONS)["input_ids"][0]
    lengths: list[int] = []

    def call(texts: list[str], **options: Any) -> Any:
        lengths.append(len(texts[0]))
        return made(texts, **options)

    class Spy:
        is_fast, backend_tokenizer = True, made.backend_tokenizer
        __call__ = staticmethod(call)

    assert long_row(Spy(), one, **OPTIONS).tolist() == whole
    assert len(lengths) > 5
    assert max(lengths) < 1024
    at = [0, 500, 1000, len(one)]
    cut = [made([one[a:b]], **OPTIONS)["input_ids"][0] for a, b in pairwise(at)]
    assert list(chain(*cut)) != whole  # windows end to end are another text to it
