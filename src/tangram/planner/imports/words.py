"""Files of arguments as names and values: launch scripts, YAML, JSON, TOML. What a name means is its project's module.

Launch scripts are not run. Variables that they set to a plain value are put in where arguments use them; an argument
whose value only a shell can work out is refused where it is needed, and never guessed.

What comes of a file: a strategy, what of it is taken otherwise, and what was not looked at.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from tangram.errors import UserError
from tangram.models.outlines.outline import Group
from tangram.planner.exports.numbers import Numbers
from tangram.planner.space.recompute import EXPLAINED, again_name

_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_SET = re.compile(r"(\w+)=(.*)", re.DOTALL)
POLICY = "activation-checkpoint:"
"""How torchtitan is told what to recompute, without dashes."""


@dataclass(frozen=True)
class Words:
    """Names and values of one file. Names have neither leading dashes nor underscores: `micro-batch-size`."""

    path: str
    values: Mapping[str, Any]
    """Text, numbers, truth values, lists; True for an argument without a value."""

    def has(self, name: str) -> bool:
        """Whether it is there and neither empty nor false."""
        value = self.values.get(name)
        return value is not None and value is not False and str(value).lower() not in ("false", "none", "null", "")

    def text(self, name: str, usual: str = "") -> str:
        """A value as text."""
        return str(self.values[name]).strip("'\"") if self.has(name) else usual

    def count(self, name: str, usual: int, least: int = 1) -> int:
        """A whole number. Raises UserError for a value that is none."""
        if not self.has(name) and self.values.get(name) != 0:
            return usual
        said = str(self.values[name])
        try:
            found = int(said)
        except ValueError:
            only = ", which only a shell can work out" if "$" in said or "`" in said else ""
            raise UserError(f"{self.path}: {name} is {said!r}{only}; write a whole number from {least}") from None
        if found < least:
            raise UserError(f"{self.path}: {name} is {found}; write a whole number from {least}")
        return found

    def others(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """Names that are none of these, in order."""
        return tuple(name for name in self.values if name not in known)


def text_of(path: Path) -> str:
    """Raises UserError for a file that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UserError(f"{path} cannot be read: {why}") from None


def words_of(path: Path) -> tuple[str, Words]:
    """What kind of file it is ("toml", "tables", "script"), and its words. Raises UserError for a damaged one."""
    text, name = text_of(path), str(path)
    kind = {".toml": "toml", ".yaml": "tables", ".yml": "tables", ".json": "tables"}.get(path.suffix.lower(), "script")
    try:
        if kind == "toml":
            tables: Any = tomllib.loads(text)
        elif kind == "tables":
            tables = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
        else:
            return kind, Words(name, script(text))
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    if not isinstance(tables, dict):
        raise UserError(f"{path} has no names with values in it")
    return kind, Words(name, flattened(cast("dict[str, Any]", tables), whole=kind == "toml"))


def flattened(tables: Mapping[Any, Any], *, whole: bool) -> dict[str, Any]:
    """Tables in tables as one: with `whole` names as `table.key`, else the innermost alone, as arguments."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        name = str(key) if whole else _plain(str(key))
        if isinstance(value, dict):
            inner = flattened(cast("dict[Any, Any]", value), whole=whole)
            found |= {f"{name}.{one}": said for one, said in inner.items()} if whole else inner
        else:
            found[name] = value
    return found


def script(text: str) -> dict[str, Any]:
    """Arguments of a launch script, or of any text with arguments. Raises ValueError for one with open quotes."""
    found: dict[str, Any] = {}
    variables: dict[str, str] = {}
    name = ""
    words = deque(shlex.split(text.replace("\\\n", " "), comments=True))
    while words:
        word = words.popleft()
        filled = _filled(word, variables)
        said = _inner(filled)
        if put := _SET.fullmatch(said.removeprefix("(")):
            value, name = put[2].removeprefix("(").strip(), ""
            variables[put[1]] = value
            if value.startswith("--"):  # arguments in an array, or in quotes
                words.extendleft(reversed(shlex.split(value)))
        elif said.startswith("--"):
            name, equals, value = said.partition("=")
            name = _plain(name)
            found[name] = value if equals else True
        elif said.startswith(POLICY):
            found["activation-checkpoint"], name = said.removeprefix(POLICY), ""
        elif said in ("", "(", ";", "&", "&&", "|"):
            name = ""
        elif name:
            found[name] = said if found[name] is True else f"{found[name]} {said}"
        if said != filled:  # the end of an array
            name = ""
    return found


def _inner(word: str) -> str:
    """Without brackets that are closed and were not opened in it."""
    while word.endswith(")") and word.count(")") > word.count("("):
        word = word[:-1]
    return word


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-") if "." not in name else name.lstrip("-")


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """A word with the variables that are known in it."""

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3])
        if known is None and match[2] is not None:
            return match[2]
        return match[0] if known is None or "$" in known else known

    return _VARIABLE.sub(value, word)


@dataclass(frozen=True)
class ReadStrategy:
    """A strategy that was read."""

    numbers: Numbers
    """`sequence` is 0 where the file does not say it."""
    framework: str
    """An entry of `frameworks.toml`: whose file it is."""
    notes: tuple[str, ...]
    """Of layout or time, and taken otherwise than it says."""
    ignored: tuple[str, ...]
    """Names in the file that say nothing of either."""


def nearest(groups: Group, share: float, told: list[str], said: str) -> str:
    """What is recomputed; of sets of operators that have no name the nearest that has one, which is told."""
    if groups in (Group.NONE, Group.BLOCK):
        return again_name(int(groups), share)
    name = min(EXPLAINED, key=lambda one: int(EXPLAINED[one] ^ groups).bit_count())
    if groups.bit_count() < int(EXPLAINED[name] ^ groups).bit_count():
        name = again_name(0, 1.0)
    if EXPLAINED.get(name) != groups:
        told.append(f"{said}: taken as {name}, recomputed")
    return name
