"""The fenced blocks of the documentation, the commands in them, and what they show of each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^(\$ )?((?:[A-Z_]+=\S+ )*)(tangram .*)$")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A `tangram` command of a block."""

    where: str
    arguments: tuple[str, ...]
    """After `tangram`."""
    shown: str
    """What the block shows that it prints, where the command has a `$` before it."""
    prompted: bool
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files that the block shows with `$ cat NAME` before."""


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text()
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    return [Block(name, text[: m.start()].count("\n") + 1, m[2], m[3]) for m in _FENCE.finditer(text)]


def commands_of(block: Block) -> Iterator[Command]:
    """The `tangram` commands of a block; a line that ends with a backslash goes on."""
    lines = re.sub(r" *\\\n\s*", " ", block.text).splitlines()
    files: dict[str, str] = {}
    for at, line in enumerate(lines):
        rest = lines[at + 1 :]
        end = next((i for i, other in enumerate(rest) if other.startswith("$ ")), len(rest))
        shown = "\n".join(rest[:end])
        if line.startswith("$ cat "):
            files[line.removeprefix("$ cat ").strip()] = shown + "\n"
        elif (match := _COMMAND.match(line)) is not None:
            yield Command(str(block), tuple(_words(match[3])[1:]), shown, match[1] is not None, dict(files))


def _words(line: str) -> list[str]:
    """As a shell splits it. Words after two blanks or more without a `#` are what the page says of the command."""
    command = re.split(r"\s{4,}(?![-\"'])", line, maxsplit=1)[0]
    return shlex.split(command, comments=True)


def all_blocks() -> list[Block]:
    """Of every page."""
    return [block for page in PAGES for block in blocks_of(page)]
