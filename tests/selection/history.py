"""What git says: the files, what has changed since when, and the number of the commit on the main line."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOURS = 6
"""Where nobody says what a change is: all commits of so many hours before the last one."""


@dataclass(frozen=True)
class Commit:
    """`number`: how many commits of the main line (first parents) there are up to it."""

    number: int
    name: str
    day: str


def git(root: Path, *words: str) -> str:
    """What git prints, or CalledProcessError."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def is_repository(root: Path) -> bool:
    """False for an unpacked archive, or where there is no git."""
    try:
        return Path(git(root, "rev-parse", "--show-toplevel")).resolve() == root.resolve()
    except (OSError, subprocess.CalledProcessError):
        return False


def files(root: Path) -> list[str]:
    """All that is tracked, and what is new and not ignored."""
    return git(root, "ls-files", "--cached", "--others", "--exclude-standard").split("\n")


def base(root: Path) -> str:
    """Since when there is a change: TANGRAM_BASE, where the branch left its upstream, or some hours ago."""
    if name := os.environ.get("TANGRAM_BASE"):
        return name
    head = git(root, "rev-parse", "HEAD")
    for main in ("@{upstream}", "origin/HEAD", "origin/main", "main"):
        try:
            fork = git(root, "merge-base", "HEAD", main)
        except subprocess.CalledProcessError:
            continue
        if fork != head:
            return fork
    end = int(git(root, "log", "-1", "--format=%ct")) - HOURS * 3600
    older = git(root, "rev-list", "-1", "--first-parent", f"--before={end}", "HEAD")
    return older or git(root, "rev-list", "--max-parents=0", "HEAD").split("\n")[0]


def changed(root: Path, since: str) -> dict[str, int]:
    """The files that differ from the commit `since`: 0 for those of the last commit and later, 1 for older changes.

    Where TANGRAM_BASE says what the change is, all of it is as late.
    """
    differ = git(root, "diff", "--name-only", "--no-renames", since).split("\n")
    parents = git(root, "rev-list", "--parents", "-1", "HEAD").split()[1:]
    latest = [since] if os.environ.get("TANGRAM_BASE") else parents[:1]
    late = git(root, "diff", "--name-only", "--no-renames", *latest).split("\n")
    new = git(root, "ls-files", "--others", "--exclude-standard").split("\n")
    ages = dict.fromkeys(differ, 1) | dict.fromkeys([*late, *new], 0)
    return {file: age for file, age in ages.items() if file}


def turn(root: Path) -> int:
    """The number that the rotation goes by: TANGRAM_TURN, that of the commit's place on the main line, or its day.

    A clone without its history does not know the commit's place; days go on by one, too.
    """
    if number := os.environ.get("TANGRAM_TURN"):
        return int(number)
    if git(root, "rev-parse", "--is-shallow-repository") == "true":
        return int(git(root, "log", "-1", "--format=%ct")) // 86400
    return turn_of(number_of(root))


def number_of(root: Path) -> int:
    """The commit's on the main line."""
    return int(git(root, "rev-list", "--count", "--first-parent", "HEAD"))


def turn_of(number: int) -> int:
    """Of a commit by its number. Tens count, too, or who pushes ten at a time would have one turn alone; thrice, or who
    pushes three at a time would not have all of them."""
    return number + 3 * (number // 10)


def main_line(root: Path, since: str = "") -> list[Commit]:
    """The commits of the main line behind `since`, the last one first."""
    number = number_of(root)
    words = ["log", "--first-parent", "--format=%h %cs", f"{since}..HEAD" if since else "HEAD"]
    lines = [line.split() for line in git(root, *words).split("\n") if line]
    return [Commit(number - place, name, day) for place, (name, day) in enumerate(lines)]
