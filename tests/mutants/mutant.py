"""What a planted mistake is: one exact text of one file replaced by another."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake that a programmer could make, and the tests that should find it.

    `file` lies under src/tangram, and `old` occurs in it exactly once. `tests` are pytest's words (files, or
    `file::test`), the quickest killers first; `why` says what would go wrong if nobody noticed.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
