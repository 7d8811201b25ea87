"""The text of a job, ready to be trained on: tokenised once by `prepare`, mapped by every rank with `open_corpus`.

The folder of a source's tokens is named by the hash of all that decides them, so a changed file means another folder,
and old ones may be deleted at any time. A lock lets one process write; others that want the same wait for it and find
the work done.
"""

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from filecmp import cmp
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tangram.errors import UserError
from tangram.schema.job import DataPlan, SourcePlan
from tangram.training.data.chat import ASKED, CUT, DATE, KINDS, NOTHING, OPEN
from tangram.training.data.files import LEFT_OUT, TAKEN, Files, in_words, list_files
from tangram.training.data.samples import Split
from tangram.training.data.sources import EMPTY, READING, Document, documents
from tangram.training.data.store import FORMAT, TokenStore, TokenWriter, open_store
from tangram.training.data.tokens import SPECIAL, BadDocument, NotText, Tokens
from tangram.training.observe.events import Note, Working

PART_BYTES = 4 << 20  # of text in a part, unless one document has more; what a kill loses at most

OnEvent = Callable[[object], None]


def cache_root(data: DataPlan) -> Path:
    if data.cache is not None:
        return Path(data.cache)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tangram" / "tokens"


def fill(data: DataPlan, source: SourcePlan, tokens: Tokens, on_event: OnEvent, part_bytes: int = PART_BYTES) -> None:
    """Tokenise a source if its cache is not complete, from where an earlier attempt has come to."""
    files = list_files(source)
    identity = _identity(files, source, data, tokens)
    folder = _folder(data, identity)
    if _is_complete(folder):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, on_event):
            if _is_complete(folder):
                return
            writer = TokenWriter(folder, np.uint16 if tokens.numbers <= 1 << 16 else np.uint32)
            tally = _write(writer, files, source, data, tokens, on_event, part_bytes)
            if _identity(list_files(source), source, data, tokens) != identity:
                raise UserError(f'files of the source "{source.path}" changed while they were read: run again')
            writer.finish({"source": source.path, "field": source.field, "tokens": tokens.name}, tally)
    except OSError as error:
        raise UserError(
            f'the tokens of "{source.path}" cannot be kept in "{folder.parent}": {error.strerror or error}. Set '
            f"data.cache to a folder with room for them (about {_room(files, tokens)} MB)"
        ) from None


def open_source(data: DataPlan, source: SourcePlan, tokens: Tokens) -> TokenStore:
    """Map the cache of a source. Raises UserError when it is not complete, or damaged."""
    files = list_files(source)
    folder = _folder(data, _identity(files, source, data, tokens))
    try:
        store = open_store(folder)
    except OSError as error:
        raise UserError(f'the tokens in "{folder}" cannot be read: {error.strerror or error}') from None
    if store is None:
        raise UserError(
            f'the tokens of "{source.path}" are not in the cache "{folder.parent}": prepare them first, or set '
            "data.cache to a folder that all machines share"
        )
    return replace(store, tally=store.tally + Counter({f"{LEFT_OUT}: {what}": n for what, n in files.left_out.items()}))


def _is_complete(folder: Path) -> bool:
    """Whether nothing has to be written. Damage that shows on opening makes a folder incomplete."""
    try:
        return open_store(folder) is not None
    except (UserError, OSError):
        return False


def _identity(files: Files, source: SourcePlan, data: DataPlan, tokens: Tokens) -> str:
    listed = [[file.name, file.size, file.changed_ns] for file in files.files]
    about = [FORMAT, READING, str(files.root.absolute()), listed, source.field, data.share]
    about += [files.choice, tokens.digest, tokens.special]
    return hashlib.blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()


def _folder(data: DataPlan, identity: str) -> Path:
    return cache_root(data) / identity


def _room(files: Files, tokens: Tokens) -> int:
    """Bytes as tokens take twice the room; others about half of it, or as much."""
    return max(1, round(files.size * (2 if tokens.folder is None else 1) / 1e6))


@contextmanager
def _locked(folder: Path, on_event: OnEvent) -> Generator[None]:
    """Be the only one who writes. The lock is the kernel's: it ends with its process, however that ends."""
    with (folder / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_event(Note(f"waiting    another process prepares the tokens in {folder}"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(
    writer: TokenWriter,
    files: Files,
    source: SourcePlan,
    data: DataPlan,
    tokens: Tokens,
    on_event: OnEvent,
    part_bytes: int,
) -> Counter[str]:
    """Write the parts that are missing; what was counted, those that were there included."""
    tally = Counter(writer.last.tally)
    what = f"tokenising {source.path}"
    on_event(Working(what, writer.last.done, files.size, "bytes"))
    part: list[Document] = []
    size = 0
    last = Document(-1, -1, b"", -1)
    for document in chain(documents(files, tokens.column(source.field), writer.last.cursor, tally), [last]):
        if document is not last:
            part.append(document)
            size += len(document.text)
        if part and (size >= part_bytes or document is last):
            rows = _encoded(part, files, data, tokens, tally)
            writer.append(rows, (part[-1].file, part[-1].number + 1), part[-1].done, tally)
            on_event(Working(what, part[-1].done, files.size, "bytes"))
            part, size = [], 0
    return tally


def _encoded(
    part: list[Document], files: Files, data: DataPlan, tokens: Tokens, tally: Counter[str]
) -> tuple[list[Any], list[Any]]:
    """The tokens of the documents that are trained on, and of those that are held out."""
    try:
        encoded = tokens.encode([document.text for document in part], tally)
    except BadDocument as error:
        wrong = part[error.document]
        raise UserError(f'document {wrong.number + 1} of "{files.path(wrong.file)}" {error}') from None
    except NotText as error:
        wrong = part[error.document]
        raise UserError(
            f'the file "{files.path(wrong.file)}" is no UTF-8 text ({error}): leave it out by the pattern of its '
            'source, or set data.tokenizer = "bytes"'
        ) from None
    rows: tuple[list[Any], list[Any]] = ([], [])
    for document, row in zip(part, encoded, strict=True):
        if opened := tokens.documents(row):
            rows[is_held_out(document.text, data.share)].extend(opened)
        elif tokens.context is None:  # else it was said why
            tally[EMPTY] += 1
    return rows


def is_held_out(text: bytes, share: float) -> bool:
    """Whether a document is held out: by its content alone, so copies go together and new documents move none."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest()) / 2**48 < share


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
    for source in (*data.sources, *(data.evaluation or ())):
        fill(data, source, tokens, on_event, part_bytes)
    open_corpus(data, tokens)


def open_corpus(data: DataPlan, tokens: Tokens) -> Corpus:
    """Map the tokens that `prepare` has made. Raises UserError when they are not there, or too few."""
    stores = [open_source(data, source, tokens) for source in data.sources]
    apart = [open_source(data, source, tokens) for source in data.evaluation or ()]
    best = data.packing == "best-fit"
    content = hashlib.blake2b(f"{tokens.digest} {data.share}".encode(), digest_size=16)
    for store in (*stores, *apart):
        content.update(store.digest.encode())
    training, held_out = (
        tuple(replace(split, context=tokens.context, rows=tokens.rows, best_fit=best) for split in some)
        for some in (
            [store.splits[0] for store in stores],
            [store.splits[0] for store in apart] or [store.splits[1] for store in stores],
        )
    )
    for source, split, store in zip(data.sources, training, stores, strict=True):
        if not split.windows(data.sequence, single=is_single(data)):
            raise UserError(f'the source "{source.path}" has no text to train on: {_where(store, data.share)}')
    if data.measured and not any(split.windows(data.sequence, single=is_single(data)) for split in held_out):
        if data.evaluation:
            raise UserError(f"data.evaluation has no text to measure the loss on: {_where(apart[0], 0.0)}")
        count = sum(len(split.end_D) for split in training)
        raise UserError(
            f"none of the {count} documents in data.sources is held out to measure the loss on: give more documents (a "
            f"text file is one, a line of JSONL is one), raise data.held_out (now {data.held_out}), or set it and "
            "run.evaluate_every to 0 to measure none"
        )
    read = tuple(_read(store, data) for store in (*stores, *apart))
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
    return 0 if split.context is None else len(split.end_D) - len({*_contents(split)})


def measured_and_trained(data: DataPlan, corpus: Corpus) -> str:
    """What of `data.evaluation` is trained on, too, in words; of text, which is not read for that, by its files."""
    if data.evaluation is None:
        return ""
    if corpus.training[0].context is not None:
        trained = {one for split in corpus.training for one in _contents(split)}
        both = [one in trained for split in corpus.held_out for one in _contents(split)]
        what = "conversations"
    else:
        sizes: dict[int, list[Path]] = {}
        for path in _paths(data.sources):
            sizes.setdefault(path.stat().st_size, []).append(path)
        both = [
            any(path.samefile(other) or cmp(path, other, shallow=False) for other in sizes.get(path.stat().st_size, ()))
            for path in _paths(data.evaluation)
        ]
        what = "files"
    return f"{sum(both):,} of {len(both):,} {what} of data.evaluation are trained on, too" if any(both) else ""


def _paths(sources: Iterable[SourcePlan]) -> list[Path]:
    return [files.path(n) for files in map(list_files, sources) for n in range(len(files.files))]


def _contents(split: Split) -> list[bytes]:
    """The documents of a split, each by the hash of its tokens."""
    begins = [0, *split.end_D[:-1].astype(np.int64).tolist()]
    spans = zip(begins, split.end_D.astype(np.int64).tolist(), strict=False)
    return [hashlib.blake2b(split.read(*span).tobytes(), digest_size=16).digest() for span in spans]


def _read(store: TokenStore, data: DataPlan) -> str:
    """What was counted while the tokens of a source were made, as one line."""
    all_keys = (TAKEN, LEFT_OUT, SPECIAL, KINDS, CUT, OPEN, NOTHING, ASKED, DATE)
    counts: dict[str, Counter[str]] = {key: Counter() for key in all_keys}
    for key, number in store.tally.items():
        what, _, which = key.partition(": ")
        counts[what][which] = number
    taken, left_out, special, kinds, cut, without_end, nothing, asked, days = counts.values()
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
    if nothing:
        words.append(
            f"{nothing.total():,} answers say nothing, which is learnt: leave their rows out if it is not meant"
        )
    if asked:
        words.append(f"in the loss beside answers, as they are marked: {in_words(asked)}")
    if left_out:
        words.append(f"left out: {in_words(left_out)}")
    if special:
        how = "read as special tokens" if data.special_tokens == "parse" else "read as characters"
        words.append(f"{in_words(special)} in the text {how} (data.special_tokens)")
    words += [f"the date for the chat template is {day} (data.date)" for day in days]
    return "; ".join(words)


_ROWS_LEFT_OUT = tuple(f"{LEFT_OUT}: {rows}" for rows in ("conversations", "pairs"))


def _where(store: TokenStore, share: float) -> str:
    kept = len(store.splits[1].end_D)
    if not kept:
        lost = {key.partition(": ")[2]: n for key, n in store.tally.items() if key.startswith(_ROWS_LEFT_OUT)}
        return f"all of it is left out: {in_words(Counter(lost))}" if lost else "its files are empty"
    return f"all of its {kept} documents are held out: lower data.held_out (now {share}) or give more documents"
