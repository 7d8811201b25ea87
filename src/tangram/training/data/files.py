"""Which files a source consists of, before any of them is read: links are followed, and no file is taken twice.

Real files and folders come before what links lead to, and every real folder is entered once, so loops of links end and
a file that two links lead to has one name. What a folder holds beside the files that are taken is counted, by reason.

What all readers of files share: a row, its text, and what is said of a row or file that is wrong.
"""

import difflib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tangram.errors import UserError
from tangram.schema.job import SourcePlan
from tangram.text import alternatives

ROW = "*"
"""Stands for a column where a whole row is meant, as JSON."""


def row_text(columns: Mapping[str, object]) -> bytes:
    """A whole row as JSON; what JSON has no word for, as a date, is text."""
    return json.dumps(columns, default=str).encode()


class TextRow(NamedTuple):
    """A document of a file, and which share of the file has been read with it."""

    number: int
    text: bytes
    share: float


def text_of(value: object, field: str, where: str) -> bytes:
    """The bytes of a column's value; none for null."""
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise UserError(f'"{field}" in {where} is {type(value).__name__}, not text: set the source\'s field')
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise UserError(f'"{field}" in {where} is no text: it holds one half of a surrogate pair') from None


class NoField(UserError):
    """A file or row has no column of the name that the source gives."""


def no_field(field: str, known: Iterable[str], where: str) -> NoField:
    names = list(known)
    near = difflib.get_close_matches(field, names, 1)
    hint = f'did you mean "{near[0]}"?' if near else f"it has {', '.join(names) or 'none'}"
    return NoField(f'{where} has no "{field}": {hint} Set the source\'s field')


def unreadable(path: Path, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return UserError(f'the file "{path}" cannot be read: {why}. Leave it out by the pattern of its source')


STDLIB = "stdlib"
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})  # of the stdlib
TEXT = (".txt", ".md", ".rst", ".py")
JSON_LINES = (".jsonl", ".ndjson")
JSON = ".json"
CELLS = (".csv", ".tsv", ".tab", ".psv")
PARQUET = ".parquet"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
KNOWN = (*(kind + end for kind in (*TEXT, *JSON_LINES, JSON, *CELLS) for end in ("", *COMPRESSED)), PARQUET)
"""Taken from a folder without a pattern; with one, every file that it matches."""

TRAINING = frozenset({"train", "training"})
HELD_BACK = frozenset({"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"})
"""What files and folders of the splits of a data set are called."""

_CHOICE = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")  # `{txt,md}`, `{0..7}`; a name may have braces of its own

LEFT_OUT = "left out"  # in a tally
TAKEN = "files"


@dataclass(frozen=True)
class File:
    """A file as it was found; its name is relative to the source's root."""

    name: str
    size: int
    changed_ns: int


@dataclass(frozen=True)
class Files:
    """What a source consists of. `table`: the whole is one `datasets` directory."""

    root: Path
    files: tuple[File, ...]
    table: bool = False
    choice: str = "file"
    """How they were chosen: the "file" itself, by "pattern", or by the "folder" that they are in."""
    left_out: Counter[str] = field(default_factory=Counter[str], compare=False)
    """How many files of the folder are not among them, by reason."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def path(self, file: int) -> Path:
        return self.root / self.files[file].name


def list_files(source: SourcePlan) -> Files:
    """The files of a source, by name. Raises UserError when there are none."""
    root = Path(sysconfig.get_path("stdlib")) if source.path == STDLIB else Path(source.path)
    if root.is_file():
        return Files(root.parent, (_file(root, root.parent),))
    if not root.is_dir():
        raise UserError(f'the source "{root}" in data.sources does not exist: give a file, a folder, or "{STDLIB}"')
    table = source.pattern is None and any((root / name).is_file() for name in ("state.json", "dataset_dict.json"))
    stdlib = source.path == STDLIB
    if stdlib:
        walk = _Walk(SKIPPED_FOLDERS.__contains__)
        walk.take(root, _parts(source.pattern or "**/*.py"))
        walk.left_out.clear()  # what it has beside its sources is of no interest
    elif source.pattern is not None:
        walk = _Walk(lambda name: False)
        for pattern in alternatives(source.pattern) if _CHOICE.search(source.pattern) else (source.pattern,):
            walk.take(*_begin(root, _parts(pattern)))
    else:
        walk = _Walk(lambda name: not table and name.startswith("."), None if table else KNOWN)
        walk.take(root, ("**", "*"))
        walk.leave_other_splits(root)
    if not walk.paths:
        what = f'matches "{source.pattern}"' if source.pattern else f"is of a known kind ({', '.join(KNOWN[::5])})"
        besides = f" (left out: {in_words(walk.left_out)})" if walk.left_out else ""
        raise UserError(
            f'no file under the source "{root}" {what}{besides}: give the source a pattern, as in pattern = "**/*.txt"'
        )
    files = tuple(_file(path, root) for path in sorted(walk.paths.values()))
    return Files(root, files, table, "folder" if source.pattern is None else "pattern", walk.left_out)


def in_words(counts: Counter[str]) -> str:
    """Numbers with what they count, the most first."""
    return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))


def _parts(pattern: str) -> tuple[str, ...]:
    parts = PurePosixPath(pattern).parts
    wrong = next((part for part in parts if "**" in part and part != "**"), None)
    why = "it is empty" if not parts else "it is an absolute path" if parts[0].startswith("/") else None
    if wrong:
        why = f'"**" has to be a whole part of a path, and "{wrong}" is not'
    if why:
        raise UserError(
            f'the pattern "{pattern}" in data.sources cannot be used: {why}. Give one relative to its path, '
            'as in "**/*.py"'
        )
    return tuple(part for part, before in zip(parts, ("", *parts), strict=False) if (part, before) != ("**", "**"))


def _begin(root: Path, parts: tuple[str, ...]) -> tuple[Path, tuple[str, ...]]:
    """The folder where a pattern begins to choose, and what is left of the pattern there."""
    fixed = 0
    while fixed < len(parts) - 1 and not re.search(r"[*?\[]", parts[fixed]):
        fixed += 1
    return root.joinpath(*parts[:fixed]), parts[fixed:]


class _Walk:
    """The files under folders whose names a pattern chooses, as {real path: path}; `left_out` says what is not taken.

    `skips` tells by their names which entries are not looked at: what is skipped may hold more than all the rest.
    """

    def __init__(self, skips: Callable[[str], bool], kinds: tuple[str, ...] | None = None) -> None:
        self.skips, self._kinds = skips, kinds
        self.paths: dict[str, Path] = {}
        self.left_out = Counter[str]()
        self._entered = set[tuple[str, tuple[str, ...]]]()
        self._links: list[tuple[Path, tuple[str, ...]]] = []

    def take(self, folder: Path, pattern: tuple[str, ...]) -> None:
        """Take what a pattern chooses in a folder, then what the links there lead to."""
        self._enter(folder, pattern)
        while self._links:
            self._links.sort()
            path, rest = self._links.pop(0)
            if not rest:
                self._add(path)
            elif (os.path.realpath(path), rest) in self._entered:
                self.left_out["by a second link to a folder"] += 1
            else:
                self._enter(path, rest)

    def leave_other_splits(self, root: Path) -> None:
        """Where some are called `train`, leave those called `test`, `validation` and so on, as `datasets` does."""
        splits = {real: _split(path.relative_to(root)) for real, path in self.paths.items()}
        if TRAINING.isdisjoint(splits.values()):
            return
        for real, split in splits.items():
            if split in HELD_BACK:
                del self.paths[real]
                self.left_out[f'of the split "{split}" beside "train"'] += 1

    def _enter(self, folder: Path, pattern: tuple[str, ...]) -> None:
        waiting = [(folder, pattern)]
        while waiting:
            here, parts = waiting.pop()
            key = os.path.realpath(here), parts
            if key in self._entered or not here.is_dir():
                continue
            self._entered.add(key)
            deep, rest = parts[0] == "**", parts[1:]
            if deep and rest:
                waiting.append((here, rest))
            chosen = re.compile("" if deep else translate(parts[0]))
            try:
                entries = sorted(os.scandir(here), key=lambda entry: entry.name)
            except OSError as error:
                raise unreadable(here, error) from None
            for entry in entries:
                if chosen.match(entry.name):
                    self._see(entry, parts if deep else rest, deep, waiting)

    def _see(
        self, entry: os.DirEntry[str], rest: tuple[str, ...], deep: bool, waiting: list[tuple[Path, tuple[str, ...]]]
    ) -> None:
        path, link = Path(entry.path), entry.is_symlink()
        folder = path.is_dir() if link else entry.is_dir()
        if self.skips(entry.name):
            if folder == deep:  # of the two looks into a folder, one is for folders and one for files
                self.left_out["hidden"] += 1
        elif folder and rest:
            (self._links if link else waiting).append((path, rest))
        elif not (folder or rest or deep):
            if link:
                self._links.append((path, ()))
            elif entry.is_file():
                self._add(path)

    def _add(self, path: Path) -> None:
        if not path.is_file():
            self.left_out["by a broken link"] += 1
            return
        if self._kinds is not None and not path.name.lower().endswith(self._kinds):
            self.left_out[f"of another kind ({path.suffix.lower() or 'no ending'})"] += 1
            return
        real = os.path.realpath(path)
        if self.paths.setdefault(real, path) != path:
            self.left_out["by a second link to a file"] += 1


def _split(name: Path) -> str:
    """Which split a file is of, by its own name or that of a folder (`test`, `test-00000-of-00002`); "" for none."""
    if name.suffix == ".py":
        return ""
    found = (re.fullmatch(r"([a-z]+)(?:[-_.]\d+(?:-of-\d+)?)?(?:\..*)?", part.lower()) for part in reversed(name.parts))
    return next((one[1] for one in found if one and one[1] in TRAINING | HELD_BACK), "")


def _file(path: Path, root: Path) -> File:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return File(path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns)
