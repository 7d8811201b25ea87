"""Text to tokens and back: bytes, or a Hugging Face tokenizer.

With bytes nothing has to be trained or downloaded before the first step: token i is byte i, and `END` opens and closes
every document. Of a Hugging Face tokenizer only the text's own tokens are taken; what opens and closes a document is
added here, for tokenizers do it in many ways, and packing needs exactly one.

A document that holds a special token's text, as "</s>", says two things: a mark of whoever rendered it, or characters
that happen to be those. Which it is the plan has to say; until it does, such a document is refused.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from tangram.errors import UserError
from tangram.models.building.directory import TEXT, refuse_missing, refuse_pointers
from tangram.schema.job import DataPlan, Special

END = 256  # before and after every document of bytes
VOCABULARY = 257
SPECIAL = "special tokens"  # in a tally

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "spiece.model")

TokenArray = npt.NDArray[np.uint32]


class NotText(ValueError):
    """A document is not UTF-8: its place among those that were given."""

    def __init__(self, document: int, why: str) -> None:
        super().__init__(why)
        self.document = document


class BadDocument(ValueError):
    """A document cannot be trained on: its place among those that were given, and why as the end of a sentence."""

    def __init__(self, document: int, why: str) -> None:
        super().__init__(why)
        self.document = document


class SpecialToken(BadDocument):
    """A document holds a special token, and that was not allowed."""


class _Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    added_tokens_decoder: dict[int, Any]

    def __call__(self, text: list[str], **options: Any) -> Any: ...
    def __len__(self) -> int: ...
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    def decode(self, ids: list[int], **options: Any) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Tokens:
    """A way to write text as numbers below `vocabulary`; a document is `[begin] ... end`."""

    name: str
    vocabulary: int
    begin: int | None
    end: int
    digest: str
    """A fixed text for what `encode` does: other tokens, another digest."""
    folder: Path | None = None
    """Where the tokenizer was read from; None: bytes."""
    special: Special = "refuse"
    """What becomes of the text of a special token in a document."""
    _tokenizer: _Tokenizer | None = field(default=None, repr=False, compare=False)

    @property
    def context(self) -> int | None:
        """The number from which tokens are written that are in no loss (`Split.context`); None: all are in it."""
        return None

    @property
    def numbers(self) -> int:
        """How many numbers tokens are written as."""
        return self.vocabulary

    @property
    def labelled(self) -> bool:
        """Whether each sample is an answer that is good or bad."""
        return False

    @property
    def rows(self) -> int:
        """How many documents a sample is, one after the other."""
        return 1

    def column(self, field: str) -> str:
        """Which column of a source is read, where its plan names `field`."""
        return field

    def encode(self, documents: Sequence[bytes], tally: Counter[str] | None = None) -> list[TokenArray]:
        """The tokens of each document, without begin and end.

        `tally` counts the special tokens in them. Raises NotText for bytes that are no UTF-8, and SpecialToken.
        """
        if self._tokenizer is None:
            return [np.frombuffer(document, np.uint8).astype(np.uint32) for document in documents]
        texts: list[str] = []
        for number, document in enumerate(documents):
            try:
                texts.append(document.decode())
            except UnicodeDecodeError as error:
                raise NotText(number, f"byte {error.start} is {document[error.start]:#04x}") from None
        if not texts:
            return []
        rows = _ids(self._tokenizer, texts)
        return [
            self._specials(number, text, row, Counter() if tally is None else tally)
            for number, (text, row) in enumerate(zip(texts, rows, strict=True))
        ]

    def document(self, row: TokenArray) -> TokenArray:
        """A document as it is trained on: with one begin, if there is one, and one end, whatever `row` has of them.

        Empty if `row` has nothing else.
        """
        while len(row) and row[0] == self.begin and self._tokenizer is not None:
            row = row[1:]
        while len(row) and row[-1] == self.end and self._tokenizer is not None:
            row = row[:-1]
        if not len(row):
            return row
        begin = [] if self.begin is None else [self.begin]
        return np.concatenate([np.array(begin, np.uint32), row, np.array([self.end], np.uint32)])

    def documents(self, row: TokenArray) -> list[TokenArray]:
        """The documents that a row of `encode` is; none of an empty one."""
        document = self.document(row)
        return [document] if len(document) else []

    def _specials(self, number: int, text: str, row: TokenArray, tally: Counter[str]) -> TokenArray:
        """The row of a text as `special` has it."""
        tokenizer = cast(_Tokenizer, self._tokenizer)
        special, other = _added(tokenizer)
        at = np.flatnonzero(np.isin(row, special))
        if not len(at):
            return row
        names = {int(token): str(tokenizer.convert_ids_to_tokens(int(token))) for token in np.unique(row[at])}
        if self.special == "refuse":
            raise SpecialToken(
                number,
                f"holds {names[int(row[at[0]])]!r}, a special token of the tokenizer: set data.special_tokens to "
                '"parse" if the text was rendered with special tokens (as a chat template does), or to "text" if they '
                "are to be characters like any other",
            )
        for token in row[at].tolist():
            tally[f"{SPECIAL}: {names[token]}"] += 1
        if self.special == "parse":
            bare = _bare(tokenizer, text, self.begin, self.end)
            return row if bare == text else _ids(tokenizer, [bare])[0]
        (plain,) = _ids(tokenizer, [text], split_special_tokens=True)
        if np.isin(plain, special).any() or np.isin(plain, other).sum() != np.isin(row, other).sum():
            raise SpecialToken(
                number,
                f"holds {names[int(row[at[0]])]!r}, which this tokenizer cannot write as text: set "
                'data.special_tokens = "parse", or leave the document out',
            )
        return plain

    def spelled(self, ids: Iterable[int]) -> str:
        """The text of some tokens, special ones by their own names."""
        if self._tokenizer is not None:
            return self._tokenizer.decode(list(ids))
        return "".join("<end>" if token == END else bytes([token]).decode(errors="replace") for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens; begin and end are left out, and bytes that are no text show as such."""
        kept = [int(token) for token in ids if token not in (self.begin, self.end)]
        if self._tokenizer is None:
            return bytes(token for token in kept if token < END).decode(errors="replace")
        return self._tokenizer.decode(kept)


BYTES = Tokens("bytes", VOCABULARY, END, END, hashlib.blake2b(b"bytes", digest_size=16).hexdigest())


def _ids(tokenizer: _Tokenizer, texts: list[str], *, split_special_tokens: bool = False) -> list[TokenArray]:
    """The tokens of texts, some of them at once: a tokenizer takes a hundred bytes of memory and more for each byte."""
    options: dict[str, Any] = {
        "add_special_tokens": False,
        "split_special_tokens": split_special_tokens,
        "return_attention_mask": False,
        "return_token_type_ids": False,
        "verbose": False,
    }
    rows: list[TokenArray] = []
    some, size = list[str](), 0
    for text in [*texts, None]:
        if some and (text is None or size + len(text) > LONG):
            rows += [np.array(row, np.uint32) for row in tokenizer(some, **options)["input_ids"]]
            some, size = [], 0
        if text is not None and len(text) > LONG and can_be_cut(tokenizer):
            rows.append(long_row(tokenizer, text, **options))
        elif text is not None:
            some.append(text)
            size += len(text)
    return rows


@lru_cache(maxsize=4)
def _added(tokenizer: _Tokenizer) -> tuple[list[int], list[int]]:
    """The ids of special tokens, and of other tokens that were added. An unknown word is no special token."""
    added = {number: bool(token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    special = {number for number, its in added.items() if its} - {tokenizer.unk_token_id}
    for name in ("bos", "eos", "sep", "cls", "mask"):
        number = cast("int | None", getattr(tokenizer, f"{name}_token_id", None))
        special |= set() if number is None else {number}
    return sorted(special), [number for number, its in added.items() if not its and number not in special]


def _bare(tokenizer: _Tokenizer, text: str, begin: int | None, end: int) -> str:
    """A text without the white space around a begin and an end of its own: templates end lines there."""
    if text.rstrip().endswith(tokenizer.convert_ids_to_tokens(end)):
        text = text.rstrip()
    if begin is not None and text.lstrip().startswith(tokenizer.convert_ids_to_tokens(begin)):
        text = text.lstrip()
    return text


def load_tokens(data: DataPlan, model_path: str | None) -> Tokens:
    """The tokens that a plan asks for; `model_path` is where its model lies, None for a preset.

    Raises UserError for a tokenizer that is missing, cannot be read, or has no token to end a document with.
    """
    if data.tokenizer == "bytes" or (data.tokenizer == "model" and model_path is None):
        return BYTES
    folder = Path(data.tokenizer if data.tokenizer != "model" else model_path or "")
    refuse_missing(folder, "tokenizer" if data.tokenizer != "model" else "model")
    if data.tokenizer == "model" and not folder.is_dir():
        folder = folder.parent  # the model is given by its config.json
    if folder.is_dir():
        refuse_pointers(folder, TEXT)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        where = f'beside the model in "{folder}"' if data.tokenizer == "model" else f'in "{folder}"'
        raise UserError(
            f"there is no tokenizer {where}: set data.tokenizer to a Hugging Face directory that has one, "
            'or to "bytes" for a model that is trained from scratch'
        )
    return replace(_read_tokenizer(folder), special=data.special_tokens)


def _read_tokenizer(folder: Path) -> Tokens:
    from transformers import AutoTokenizer  # takes seconds, which a job on bytes need not wait for

    try:
        tokenizer = cast(_Tokenizer, AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f'the tokenizer in "{folder}" cannot be read ({why}): set data.tokenizer to another Hugging Face directory'
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f'the tokenizer in "{folder}" has no end-of-sequence token, so documents could not be told apart: '
            "add eos_token to its tokenizer_config.json"
        )
    vocabulary = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    return Tokens(
        name=folder.resolve().name,
        vocabulary=vocabulary,
        begin=tokenizer.bos_token_id,
        end=tokenizer.eos_token_id,
        digest=_digest(tokenizer, folder),
        folder=folder,
        _tokenizer=tokenizer,
    )


def _digest(tokenizer: _Tokenizer, folder: Path) -> str:
    """Of the files that say how text is cut, and of what opens and closes a document."""
    content = hashlib.blake2b(digest_size=16)
    content.update(json.dumps([tokenizer.bos_token_id, tokenizer.eos_token_id, type(tokenizer).__name__]).encode())
    for file in sorted(folder.iterdir()):
        if file.is_file() and ("token" in file.name or file.name in {"vocab.json", "merges.txt", "spiece.model"}):
            content.update(f"{file.name}\n".encode())
            content.update(hashlib.blake2b(file.read_bytes()).digest())
    return content.hexdigest()


LONG = 1 << 17  # characters; shorter texts are tokenised as they are
WINDOW = 1 << 16
OVERLAP = 1 << 12
AGREE = 256  # characters on each side of a place where windows are joined
_TRIES = 16

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenWindow:
    """The tokens of a part of the text; places are in characters of the whole."""

    id_T: Ints  # noqa: N815  a tensor carries its dims in its name
    begin_T: Ints  # noqa: N815
    end_T: Ints  # noqa: N815
    words: frozenset[int]
    """Where words begin."""

    def around(self, place: int) -> tuple[list[int], ...]:
        """The tokens near a place, and where they begin and end."""
        near = (self.begin_T >= place - AGREE) & (self.begin_T < place + AGREE)
        return self.id_T[near].tolist(), self.begin_T[near].tolist(), self.end_T[near].tolist()

    def index(self, place: int) -> int:
        """The number of the first token that begins at a place."""
        return int(np.flatnonzero(self.begin_T == place)[0])


def can_be_cut(tokenizer: Any) -> bool:
    """Whether a tokenizer says where its tokens are in the text."""
    return bool(getattr(tokenizer, "is_fast", False)) and hasattr(tokenizer, "backend_tokenizer")


def long_row(tokenizer: Any, text: str, **options: Any) -> npt.NDArray[np.uint32]:
    """The tokens of a long text, window by window: the same as of the whole, in a small part of its memory.

    A tokenizer takes about 150 bytes of memory for a byte of text, all at once. So windows that overlap are tokenised
    one after the other, and from one to the next is gone at a place where tokens cannot reach across: where both begin
    a word (a piece of the tokenizer's own pre-tokenisation, which runs from left to right), with the same tokens at the
    same places on both sides of it. Of a tokenizer without pre-tokenisation, a word begins at a space after something
    else if no token of the vocabulary has one inside. Where there is no such place a window grows, up to all of the
    text. `options` are what the tokenizer is called with.
    """

    def window(begin: int, end: int) -> TokenWindow:
        return _window(tokenizer, text, begin, end, options)

    rows: list[Ints] = []
    begin, end, first = 0, min(WINDOW, len(text)), 0
    left = window(begin, end)
    while end < len(text):
        start, stop = end - OVERLAP, min(end + WINDOW, len(text))
        right = window(start, stop)
        place = _meeting(left, right, start, end)
        if place is None:
            end = min(end + max(WINDOW, end - begin), len(text))
            left = window(begin, end)
            continue
        rows.append(left.id_T[first : left.index(place)])
        first = right.index(place)
        left, begin, end = right, start, stop
    return np.concatenate([*rows, left.id_T[first:]]).astype(np.uint32)


def _meeting(left: TokenWindow, right: TokenWindow, start: int, end: int) -> int | None:
    """A place between `start` and `end` where the one window can be left for the other."""
    middle = (start + end) // 2
    both = [place for place in left.words & right.words if start + 2 * AGREE <= place <= end - 2 * AGREE]
    nearest = sorted(both, key=lambda place: abs(place - middle))[:_TRIES]
    return next((place for place in nearest if left.around(place) == right.around(place)), None)


def _window(tokenizer: Any, text: str, begin: int, end: int, options: dict[str, Any]) -> TokenWindow:
    (encoding,) = tokenizer([text[begin:end]], return_offsets_mapping=True, **options).encodings
    offsets_T2 = np.array(encoding.offsets, np.int64).reshape(-1, 2) + begin  # noqa: N806
    begin_T, end_T = offsets_T2[:, 0], offsets_T2[:, 1]  # noqa: N806
    words = [-number if word is None else word for number, word in enumerate(encoding.word_ids, 1)]
    begins = (np.diff(np.array(words, np.int64)) != 0) if len(words) else np.zeros(0, bool)
    if (is_space := _spaces(tokenizer)) is not None:
        begins = np.array([is_space(text, int(place)) for place in begin_T[1:]], bool)
    begins &= begin_T[1:] >= np.maximum.accumulate(end_T)[:-1]
    return TokenWindow(np.array(encoding.ids, np.int64), begin_T, end_T, frozenset(begin_T[1:][begins].tolist()))


@lru_cache(maxsize=4)
def _spaces(tokenizer: Any) -> Callable[[str, int], bool] | None:
    """Of a tokenizer without pre-tokenisation: whether tokens cannot reach across a place. None of all others."""
    backend = tokenizer.backend_tokenizer
    if backend.pre_tokenizer is not None:
        return None
    inside = re.compile("[^▁]▁")
    if any(inside.search(token) for token in backend.get_vocab(with_added_tokens=False)):
        return lambda text, place: False
    spaced = backend.normalizer is not None and backend.normalizer.normalize_str("a b").endswith("a▁b")
    return lambda text, place: spaced and text[place] == " " and text[place - 1] not in " ▁"
