"""Small texts, plans and tokenizers for the tests of the data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tangram.schema.job import DataPlan, SourcePlan
from tangram.training.data import BYTES, Corpus, Tokens, open_corpus, prepare


def ignore(event: object) -> None:
    """Nobody watches."""


def write_files(folder: Path, count: int = 30) -> Path:
    """Files of many lengths, no two alike."""
    for number in range(count):
        path = folder / f"{number % 3}" / f"file{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {number}. " + "word " * (number * 7 % 41))
    return folder


def data_plan(cache: Path, *sources: Path | SourcePlan, **changes: Any) -> DataPlan:
    """A plan on these sources."""
    tables = tuple(source if isinstance(source, SourcePlan) else SourcePlan(path=str(source)) for source in sources)
    fields = {"sequence": 16, "global_batch": 8, "micro_batch": 2, "held_out": 0.3, "held_out_samples": 13, **changes}
    return DataPlan.model_validate({"sources": tables, "cache": str(cache), **fields})


def corpus_of(data: DataPlan, tokens: Tokens = BYTES) -> Corpus:
    """Prepared and opened."""
    prepare(data, tokens, ignore)
    return open_corpus(data, tokens)


def texts_of(corpus: Corpus, *, held_out: bool = False) -> list[bytes]:
    """All documents of bytes, source after source."""
    found: list[bytes] = []
    for split in corpus.held_out if held_out else corpus.training:
        begin = 0
        for end in split.end_D.tolist():
            found.append(bytes(split.read(begin, end)[1:-1].tolist()))
            begin = end
    return found


def write_tokenizer(folder: Path, words: Sequence[str] = ("a", "b", "c"), **special: str) -> Path:
    """A Hugging Face tokenizer that knows some words; special tokens as given."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words, *special.values()])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **special).save_pretrained(str(folder))
    return folder
