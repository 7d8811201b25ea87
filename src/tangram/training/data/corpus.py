"""The text of a job, ready to be trained on: tokenised once by `prepare`, mapped by every rank with `open_corpus`."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tangram.errors import UserError
from tangram.schema.job import DataPlan
from tangram.training.data.cache import PART_BYTES, fill, open_source
from tangram.training.data.chat import CUT, KINDS, OPEN
from tangram.training.data.files import LEFT_OUT, TAKEN, in_words
from tangram.training.data.samples import Split
from tangram.training.data.store import TokenStore
from tangram.training.data.tokens import SPECIAL, Tokens


@dataclass(frozen=True)
class Corpus:
    """The documents of every source, in the order of the plan, trained on and held out."""

    training: tuple[Split, ...]
    held_out: tuple[Split, ...]
    digest: str
    """A fixed text for the content, by which ranks and resumed runs know that they read the same."""
    fill: int
    """The token in places that count nothing."""
    rows: int = 1
    """How many rows of tokens a sample is (`Split.rows`)."""
    labelled: bool = False
    """Whether each is an answer that is good or bad."""
    read: tuple[str, ...] = ()
    """Of each source, how many files and documents were taken and left out, and why, in words."""

    def summary(self) -> str:
        """How much text it is, in words."""
        trained, kept = (
            f"{sum(len(split.end_D) for split in splits):,} documents, {sum(split.size for split in splits):,} tokens"
            for splits in (self.training, self.held_out)
        )
        return f"{trained}; held out {kept}"


def is_single(data: DataPlan) -> bool:
    """Whether a window holds one document only. Where the plan leaves it to the model, nobody has asked one here."""
    return data.packing == "single"


def prepare(
    data: DataPlan, tokens: Tokens, on_event: Callable[[object], None], *, part_bytes: int = PART_BYTES
) -> None:
    """Tokenise what is not in the cache yet. `part_bytes` of text are written at once: what a kill loses at most.

    Raises UserError for a source that cannot be read or has too little text, and a cache that cannot be written.
    """
    for source in data.sources:
        fill(data, source, tokens, on_event, part_bytes)
    open_corpus(data, tokens)


def open_corpus(data: DataPlan, tokens: Tokens) -> Corpus:
    """Map the tokens that `prepare` has made. Raises UserError when they are not there, or too few."""
    stores = [open_source(data, source, tokens) for source in data.sources]
    best = data.packing == "best-fit"
    content = hashlib.blake2b(f"{tokens.digest} {data.held_out}".encode(), digest_size=16)
    for store in stores:
        content.update(store.digest.encode())
    training, held_out = (
        tuple(replace(store.splits[split], context=tokens.context, rows=tokens.rows, best_fit=best) for store in stores)
        for split in (0, 1)
    )
    for source, split, kept, store in zip(data.sources, training, held_out, stores, strict=True):
        if not split.windows(data.sequence, single=is_single(data)):
            raise UserError(
                f'the source "{source.path}" has no text to train on: {_where(store, len(kept.end_D), data.held_out)}'
            )
    if data.held_out and not any(split.windows(data.sequence, single=is_single(data)) for split in held_out):
        count = sum(len(split.end_D) for split in training)
        raise UserError(
            f"none of the {count} documents in data.sources is held out to measure the loss on: give more documents (a "
            f"text file is one, a line of JSONL is one), raise data.held_out (now {data.held_out}), or set it and "
            "run.evaluate_every to 0 to measure none"
        )
    read = tuple(_read(store, data) for store in stores)
    return Corpus(training, held_out, content.hexdigest(), tokens.end, tokens.rows, tokens.labelled, read)


def times_seen(corpus: Corpus, data: DataPlan, steps: int) -> tuple[float, ...]:
    """How many times `steps` steps take each source's training text."""
    weights = sum(source.weight for source in data.sources)
    return tuple(
        steps * data.global_batch * source.weight / weights / split.windows(data.sequence, single=is_single(data))
        for source, split in zip(data.sources, corpus.training, strict=True)
    )


def repeats(split: Split) -> int:
    """How many documents of conversations are there before, word for word; 0 of text, which is not read for that."""
    if split.context is None:
        return 0
    begins = [0, *split.end_D[:-1].astype(np.int64).tolist()]
    spans = zip(begins, split.end_D.astype(np.int64).tolist(), strict=False)
    return len(split.end_D) - len({hashlib.blake2b(split.read(*span).tobytes()).digest() for span in spans})


def _read(store: TokenStore, data: DataPlan) -> str:
    """What was counted while the tokens of a source were made, as one line."""
    counts: dict[str, Counter[str]] = {key: Counter() for key in (TAKEN, LEFT_OUT, SPECIAL, KINDS, CUT, OPEN)}
    for key, number in store.tally.items():
        what, _, which = key.partition(": ")
        counts[what][which] = number
    taken, left_out, special, kinds, cut, without_end = counts.values()
    documents = sum(len(split.end_D) for split in store.splits)
    words = [f"{taken.total():,} taken ({in_words(taken)}), {documents:,} documents"]
    words += [f"each of {kind}" for kind in kinds]
    if cut:
        words.append(f"cut: {in_words(cut)} (data.too_long)")
    if without_end:
        words.append(
            f"{without_end.total():,} answers end without a special token, so the model is not taught where to stop: "
            "let the chat template end them with one"
        )
    if left_out:
        words.append(f"left out: {in_words(left_out)}")
    if special:
        how = "read as special tokens" if data.special_tokens == "parse" else "read as characters"
        words.append(f"{in_words(special)} in the text {how} (data.special_tokens)")
    return "; ".join(words)


_ROWS_LEFT_OUT = tuple(f"{LEFT_OUT}: {rows}" for rows in ("conversations", "pairs"))


def _where(store: TokenStore, kept: int, share: float) -> str:
    if not kept:
        lost = {key.partition(": ")[2]: n for key, n in store.tally.items() if key.startswith(_ROWS_LEFT_OUT)}
        return f"all of it is left out: {in_words(Counter(lost))}" if lost else "its files are empty"
    return f"all of its {kept} documents are held out: lower data.held_out (now {share}) or give more documents"
