"""Which checkpoints of a folder stay: a policy as data, a pure function over it, and the removal.

    last=3                 the three committed last
    every=1000             of the steps that 1000 divides
    best=eval.loss:min:2   the two with the smallest number by that name among the saved objects (min is the default)
    younger=7d             younger than seven days (s, m, h, d, w)

A checkpoint stays if any rule keeps it, and the newest one stays in any case. Only what is surely a checkpoint of this
format and whole is ever removed by a policy; it loses its name first, so a reader never sees half of one. What is torn,
and what dead runs left under way, is told and removed only when asked for, and never while somebody may write it.
"""

import contextlib
import datetime
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tangram.checkpoint.store import commits
from tangram.checkpoint.store.commits import MANIFEST, MARKER, PARTIAL
from tangram.checkpoint.store.retention_rules import KeepBest, Policy, parse
from tangram.errors import UserError, sentence

__all__ = [
    "Candidate",
    "KeepBest",
    "Leftover",
    "Policy",
    "Pruning",
    "keep_to",
    "kept",
    "leftovers",
    "metric",
    "parse",
    "plan",
    "prune",
    "torn",
]

QUIET = 900.0
"""Seconds in which nothing in a folder under way has changed before its writer is taken for dead."""


@dataclass(frozen=True)
class Candidate:
    """A whole checkpoint, as far as a policy looks at it."""

    path: Path
    serial: int
    step: int
    created: datetime.datetime
    objects: Mapping[str, Any]


@dataclass(frozen=True)
class Leftover:
    """A folder that is no whole checkpoint: torn, or under way when its run died."""

    path: Path
    nbytes: int
    quiet: float
    """Seconds since anything in it changed."""
    why: str

    @property
    def dead(self) -> bool:
        """Whether nobody writes it any more, as far as one can see."""
        return self.quiet > QUIET


# ---------------------------------------------------------------- the decision


def kept(checkpoints: Sequence[Candidate], policy: Policy, now: datetime.datetime) -> Mapping[Path, tuple[str, ...]]:
    """Those that stay, each with the rules that keep it. Nothing else is looked at: neither files nor the clock."""
    reasons: dict[Path, list[str]] = {}

    def keep(some: Sequence[Candidate], why: str) -> None:
        for one in some:
            reasons.setdefault(one.path, []).append(why)

    ordered = sorted(checkpoints, key=lambda one: (one.serial, one.path.name))
    keep(ordered[-1:], "the newest")
    if policy.last:
        keep(ordered[-policy.last :], f"last={policy.last}")
    if policy.every:
        keep([one for one in ordered if one.step % policy.every == 0], f"every={policy.every}")
    for rule in policy.best:
        ranked = [(number, one) for one in ordered if (number := metric(one.objects, rule.metric)) is not None]
        sign = -1 if rule.largest else 1
        ranked.sort(key=lambda item: (sign * item[0], -item[1].serial))
        said = f"best={rule.metric}:{'max' if rule.largest else 'min'}:{rule.count}"
        keep([one for _, one in ranked[: rule.count]], said)
    if policy.younger is not None:
        keep([one for one in ordered if now - one.created < policy.younger], f"younger={policy.younger}")
    return {path: tuple(why) for path, why in reasons.items()}


def metric(objects: Mapping[str, Any], name: str) -> float | None:
    """The number by a name among saved objects, tables within tables by dots; None where there is none."""
    found: Any = objects
    rest = name
    while rest:
        if not isinstance(found, Mapping):
            return None
        table = cast("Mapping[str, Any]", found)
        parts = rest.split(".")
        heads = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        head = next((head for head in heads if head in table), None)
        if head is None:
            return None
        found, rest = table[head], rest[len(head) + 1 :]
    number = isinstance(found, int | float) and not isinstance(found, bool) and not math.isnan(found)
    return float(found) if number else None


# ---------------------------------------------------------------- a folder


@dataclass(frozen=True)
class Pruning:
    """What a policy means for a folder."""

    kept: Mapping[Path, tuple[str, ...]]
    """With the rules that keep each, in the order of the commits."""
    removed: Mapping[Path, int]
    """With their bytes, oldest first."""
    leftovers: tuple[Leftover, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "kept": {str(path): list(why) for path, why in self.kept.items()},
            "removed": {str(path): nbytes for path, nbytes in self.removed.items()},
            "leftovers": [
                {"path": str(one.path), "bytes": one.nbytes, "dead": one.dead, "why": one.why} for one in self.leftovers
            ],
        }


def plan(
    folder: Path,
    policy: Policy,
    now: datetime.datetime | None = None,
    sound: Callable[[Path], bool] | None = None,
) -> Pruning:
    """What would be removed from a folder. Raises UserError where the folder has no checkpoint to keep.

    `sound`: reads a checkpoint. Then the newest that stays is one that was read and is sound; damaged ones that are
    newer stay out of the policy's sight and are told among the leftovers.
    """
    if (folder / MARKER).exists():
        raise UserError(f'"{folder}" is one checkpoint: give the folder that it lies in')
    if not folder.is_dir():
        raise UserError(f'there is no folder "{folder}"')
    found = [(path, marker) for path, marker in commits.committed(folder) if not path.is_symlink()]
    if not found:
        raise UserError(f'"{folder}" holds no whole checkpoint, so nothing is pruned')
    damaged: list[Leftover] = []
    while sound is not None and not sound(found[-1][0]):
        path, marker = found.pop()
        damaged.append(
            Leftover(path, sum(marker.sizes.values()), 0.0, "damaged: `tangram checkpoint verify` says where")
        )
        if not found:
            raise UserError(f'"{folder}" holds no checkpoint that is sound, so nothing is pruned')
    candidates = [
        Candidate(
            path,
            marker.serial,
            marker.step,
            _time(marker.created, path),
            commits.read_manifest(path, marker).objects if policy.best else {},
        )
        for path, marker in found
    ]
    reasons = kept(candidates, policy, now or datetime.datetime.now(datetime.UTC))
    return Pruning(
        {path: reasons[path] for path, _ in found if path in reasons},
        {path: sum(marker.sizes.values()) for path, marker in found if path not in reasons},
        (*leftovers(folder, {path for path, _ in found} | {one.path for one in damaged}), *damaged),
    )


def _time(text: str, path: Path) -> datetime.datetime:
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f'the checkpoint "{path}" says no time at which it was made: {text!r}') from None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def leftovers(folder: Path, whole: set[Path]) -> list[Leftover]:
    """Folders of ours that are no whole checkpoints; what is of another format, or not ours at all, is no leftover."""
    found: list[Leftover] = []
    for path in sorted(folder.iterdir()):
        if path in whole or path.is_symlink() or not path.is_dir():
            continue
        under_way = path.name.startswith(".") and path.name.endswith(PARTIAL)
        why = "under way, or left by a run that died" if under_way else _torn(path)
        if why:
            nbytes, changed = _weight(path)
            found.append(Leftover(path, nbytes, max(0.0, time.time() - changed), why))
    return found


def torn(folder: Path) -> list[str]:
    """Why checkpoints of ours in a folder, which once were whole, are so no longer: a sentence for each."""
    there = [path for path in sorted(folder.glob("*")) if not path.name.startswith(".") and not path.is_symlink()]
    return [why for path in there if (why := _torn(path))]


def _torn(path: Path) -> str:
    """Why a checkpoint of ours is not whole; nothing where the folder is not surely one of ours."""
    try:
        data = commits.read_bounded(path / MARKER, commits.LARGEST_MARKER)
    except (OSError, UserError):
        return ""
    ours = (path / MANIFEST).is_file()
    with contextlib.suppress(UserError):
        commits.parse_marker(data, path)
        ours = True
    try:
        commits.read_marker(path)
    except UserError as error:
        return str(error) if ours else ""
    return ""


def _weight(path: Path) -> tuple[int, float]:
    """The bytes in a folder, and when something in it changed last; what vanishes meanwhile does not count."""
    nbytes, changed = 0, path.lstat().st_mtime
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            stat = file.lstat()
            nbytes, changed = nbytes + stat.st_size, max(changed, stat.st_mtime)
    return nbytes, changed


def keep_to(rules: Sequence[str], folder: Path, before_each: Callable[[], object] = lambda: None) -> list[str]:
    """Remove what no rule keeps, nothing without rules; what its owner should be told: why that ended early, if so."""
    try:
        for path in plan(folder, parse(rules)).removed if rules else ():
            before_each()
            commits.remove(path)
    except (OSError, UserError) as error:
        return [f"an old checkpoint could not be removed: {sentence(error)}"]
    return []


def prune(pruning: Pruning, partials: bool = False) -> None:
    """Remove what is to go, the oldest first; `partials`: also what is torn or dead. Raises OSError."""
    for path in pruning.removed:
        commits.remove(path)
    for one in pruning.leftovers:
        if partials and one.dead:
            if one.path.name.endswith(PARTIAL):
                shutil.rmtree(one.path)
            else:
                commits.remove(one.path)
