"""A small checkpoint, ways to spoil it so that its checksums still hold, and all that one can do with it."""

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tangram.checkpoint.formats import hf_export
from tangram.checkpoint.inspect import diff, tree, verify
from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.store import commits, retention
from tangram.checkpoint.store.commits import MANIFEST, MARKER
from tangram.checkpoint.store.manifest import checksums
from tangram.errors import UserError
from tangram.layout import Region
from tests.checkpoint.making import make, regions
from tests.checkpoint.stored import random_tensor

TENSORS: Mapping[str, Tensor] = {
    "model.embed": random_tensor((7, 6), torch.bfloat16, 1),
    "model.norm": random_tensor((5,), torch.float32, 2),
    "model.none": torch.empty(0, 3),
    "optim.embed.exp_avg": random_tensor((7, 6), torch.float32, 3),
    "optim.embed.step": torch.tensor(3.0),
    "rng.state": random_tensor((11,), torch.uint8, 4),
}
CUTS = {
    "model.embed": regions((7, 6), "a/tp b", "tp=2"),
    "optim.embed.exp_avg": [Region.flat((7, 6), 0, 10), Region.flat((7, 6), 10, 42)],
    "rng.state": regions((11,), "a/tp:cyclic[2]", "tp=2"),
}
OBJECTS = {"progress.step": 1, "progress.note": {"a": [1, None, "b"]}}


def make_small(path: Path, step: int = 1) -> None:
    """Two writers' checkpoint with pieces of every kind."""
    about = About(step=step, mesh="tp=2", beside={"config.json": '{"torch_dtype": "bfloat16"}'})
    make(path, TENSORS, CUTS, writers=2, objects=OBJECTS, about=about)


def seal(path: Path, *, marker: Mapping[str, Any] | None = None) -> None:
    """Have the checksums of a checkpoint's data in the manifest, and the manifest's in the marker, be right again."""
    text = (path / MANIFEST).read_bytes()
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OSError):
        fields = json.loads(text)
        for name, row in fields["files"].items():
            data = (path / name).read_bytes() if _plain(path / name) else b""
            if len(data) == row["size"]:
                row["xxh3"] = "".join(f"{one:016x}" for one in checksums(data))
        if fields != json.loads(text):
            text = json.dumps(fields).encode()
            (path / MANIFEST).write_bytes(text)
    known = json.loads((path / MARKER).read_bytes())
    known |= {"manifest": hashlib.sha256(text).hexdigest(), "sizes": dict(known["sizes"]) | {MANIFEST: len(text)}}
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        fields = json.loads(text)
        known["id"] = fields["id"]
        known["sizes"] = {MANIFEST: len(text)} | {name: row["size"] for name, row in fields["files"].items()}
    known |= marker or {}
    known.pop("crc32", None)
    (path / MARKER).write_bytes(commits.marker_text(known))


def _plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


# ---------------------------------------------------------------- all that one can do


def _load(path: Path) -> None:
    into = {name: torch.full_like(tensor, 1) for name, tensor in TENSORS.items()}
    state: dict[str, dict[str, Any]] = {}
    for name, tensor in into.items():
        section, _, rest = name.partition(".")
        state.setdefault(section, {})[rest] = tensor
    load(state, path, strict=False)


def _verify(path: Path) -> None:
    json.dumps(verify.verify(path).as_json())
    verify.newest_sound(path)


def _inspect(path: Path) -> None:
    manifest = commits.read_manifest(path)
    tree.tree(tree.chosen(manifest, "*"))
    json.dumps(tree.as_json(path, manifest, list(manifest.tensors.values())))
    for value in manifest.objects.values():
        tree.short(value)
    for name, tensor in manifest.tensors.items():
        if tensor.nbytes < 1 << 20:
            tree.values_of(path, manifest, name)


def _diff(path: Path) -> None:
    one, other = path.with_name("good"), path
    sides = [(p, commits.read_manifest(p)) for p in (one, other)]
    diff.compare(sides[0], sides[1])
    diff.compare(sides[1], sides[0])


def _convert(path: Path) -> None:
    hf_export.to_hugging_face(path, path.with_name("converted"))


def _prune(path: Path) -> None:
    retention.prune(retention.plan(path.parent, retention.parse(["last=1", "best=progress.step:max"])), partials=True)
    commits.sweep(path.parent)


ACTIONS: Mapping[str, Callable[[Path], None]] = {
    "load": _load,
    "verify": _verify,
    "inspect": _inspect,
    "diff": _diff,
    "convert": _convert,
    "prune": _prune,
}
"""In this order: the last one removes."""


def act(name: str, path: Path) -> str:
    """Do it; how it was refused, in one sentence, or nothing when it worked. Nothing outside of the folder is touched.

    Raises AssertionError for anything else.
    """
    with _within(path.parent), _limit(60):
        try:
            ACTIONS[name](path)
        except UserError as error:
            said = str(error)
            assert said, name
            assert "\n" not in said, said
            return said
    return ""


@contextlib.contextmanager
def _limit(seconds: float) -> Generator[None]:
    """Give up what waits for ever."""

    def give_up(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"it takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------- what is touched

_ROOTS: list[str] = []
_TOUCHED: list[str] = []
_INNOCENT = (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2]), "/proc/", "/dev/shm")
_ONE = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
_NAMES = dict.fromkeys(_ONE, 1) | {"os.rename": 2, "os.link": 2}


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _ROOTS and event in _NAMES:
        paths = [str(one) for one in arguments[: _NAMES[event]] if isinstance(one, str | Path)]
        _TOUCHED.extend(f"{event} {_followed(path, arguments)}" for path in paths)


def _followed(path: str, arguments: tuple[Any, ...]) -> str:
    """Where a path leads in truth; one that is relative is so to an open folder, and may not leave that."""
    if "/" not in path and path != "..":
        return f"{_ROOTS[0]}/{path}"
    flags = arguments[2] if len(arguments) == 3 and isinstance(arguments[2], int) else 0
    head, tail = os.path.split(os.path.abspath(path))  # noqa: PTH100  as little as possible happens in here
    kept = flags & os.O_NOFOLLOW or len(arguments) != 3
    return os.path.join(os.path.realpath(head), tail) if kept else os.path.realpath(path)  # noqa: PTH118


sys.addaudithook(_hook)


@contextlib.contextmanager
def _within(root: Path) -> Generator[None]:
    """Have everything that is opened, made or removed lie in a folder."""
    _TOUCHED.clear()
    _ROOTS.append(os.path.realpath(root))
    try:
        yield
    finally:
        inside = _ROOTS.pop()
    strange = [one for one in _TOUCHED if not one.partition(" ")[2].startswith((inside, *_INNOCENT))]
    assert not strange, strange
