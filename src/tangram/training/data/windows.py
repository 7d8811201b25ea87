"""The tokens of a long text, window by window: the same as of the whole, in a small part of its memory.

A tokenizer takes about 150 bytes of memory for a byte of text, all at once. So windows that overlap are tokenised one
after the other, and from one to the next is gone at a place where tokens cannot reach across: where both windows begin
a word (a piece of the tokenizer's own pre-tokenisation, which runs from left to right), with the same tokens at the
same places on both sides of it. Of a tokenizer without pre-tokenisation, a word begins at a space after something else
if no token of the vocabulary has one inside. Where there is no such place a window grows, up to all of the text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

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
    """The tokens of a text. `options` are what the tokenizer is called with."""

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
