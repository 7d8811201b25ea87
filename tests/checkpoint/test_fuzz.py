"""Checkpoints from strangers: whatever is in them, they are read or refused in one sentence, and lead nowhere else."""

import copy
import hashlib
import json
import os
import re
import shutil
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.checkpoint.inspect import verify
from tangram.checkpoint.store import commits, retention
from tangram.checkpoint.store.commits import MANIFEST, MARKER
from tangram.errors import UserError
from tests.checkpoint.hostile import ACTIONS, act, make_small, seal

EMBED = "model-00001-of-00002.safetensors"
SECRET = b"what nobody may see"
FEWER = settings(max_examples=max(20, settings().max_examples // 3))  # each copies folders, and does six things


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good checkpoints."""
    folder = tmp_path_factory.mktemp("base")
    make_small(folder / "good", 1)
    make_small(folder / "bad", 2)
    make_small(folder.with_name("other"), 3)
    return folder


class Place:
    """A copy of them, beside something that is none of their business."""

    def __init__(self, base: Path) -> None:
        self.folder = base.with_name("place")
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(base, self.folder / "runs")
        self.bad = self.folder / "runs" / "bad"
        self.secret = self.folder / "secret"
        self.secret.mkdir()
        (self.secret / "file").write_bytes(SECRET)
        shutil.copytree(base.with_name("other"), self.secret / "other")

    def act_all(self) -> dict[str, str]:
        """Do everything with it; how each was refused."""
        before = sorted(p.relative_to(self.secret) for p in self.secret.rglob("*"))
        found = {name: act(name, self.bad) for name in ACTIONS}
        assert sorted(p.relative_to(self.secret) for p in self.secret.rglob("*")) == before
        assert (self.secret / "file").read_bytes() == SECRET
        assert verify.verify(self.secret / "other").sound
        return found


def test_all_of_it_works_with_a_good_one(base: Path) -> None:
    place = Place(base)
    seal(place.bad)
    assert place.act_all() == dict.fromkeys(ACTIONS, "")
    assert sorted(p.name for p in place.bad.parent.iterdir()) == ["bad", "converted"]


# ---------------------------------------------------------------- bytes


def mutated(data: bytes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    """Some bytes replaced, taken out, put in or repeated."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(out)))
        kind = draw(st.sampled_from(["replace", "remove", "insert", "number", "repeat", "cut"]))
        if kind == "replace":
            out[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == "remove":
            del out[at : at + draw(st.integers(1, 30))]
        elif kind == "insert":
            out[at:at] = draw(
                st.binary(max_size=4) | st.sampled_from([b"[", b"{", b'"', b"-", b"9" * 30, b"\x00", b"e9"])
            )
        elif kind == "number":
            found = [i for i, byte in enumerate(out) if chr(byte).isdigit()]
            if found:
                out[found[at % len(found)]] = draw(st.sampled_from(b"0123456789-."))
        elif kind == "repeat":
            out[at:at] = out[at : at + draw(st.integers(1, 200))]
        else:
            del out[at:]
    return bytes(out)


@FEWER
@given(data=st.data())
def test_bytes_of_the_manifest(base: Path, data: st.DataObject) -> None:
    place = Place(base)
    (place.bad / MANIFEST).write_bytes(mutated((place.bad / MANIFEST).read_bytes(), data.draw))
    seal(place.bad)
    place.act_all()


@pytest.mark.parametrize(
    ("there", "instead", "words"),
    [
        ("[[[1, 2], [4, 6]], ", "[[[1, 2], [6, 4]], ", "the runs of a piece of .* do not go up"),
        ('"model.norm"', '"model.\\nnorm"', r"the name 'model.\\nnorm' has letters that cannot be printed"),
        ('"progress.step"', '"\\u001b[2J"', "the name .* has letters that cannot be printed"),
    ],
)
def test_bytes_that_once_made_a_sentence_two(base: Path, there: str, instead: str, words: str) -> None:
    place = Place(base)
    text = (place.bad / MANIFEST).read_text()
    assert there in text
    (place.bad / MANIFEST).write_text(text.replace(there, instead))
    seal(place.bad)
    said = place.act_all()
    assert all(re.search(words, said[name]) for name in ("load", "inspect", "diff", "convert")), said


@FEWER
@given(data=st.data())
def test_bytes_of_the_marker(base: Path, data: st.DataObject) -> None:
    place = Place(base)
    (place.bad / MARKER).write_bytes(mutated((place.bad / MARKER).read_bytes(), data.draw))
    place.act_all()


@FEWER
@given(data=st.data())
def test_bytes_of_a_header(base: Path, data: st.DataObject) -> None:
    place = Place(base)
    whole = (place.bad / EMBED).read_bytes()
    head = (
        mutated(whole[:4096], data.draw) if data.draw(st.booleans()) else mutated(whole[:600], data.draw) + whole[600:]
    )
    (place.bad / EMBED).write_bytes((head.ljust(4096)[:4096] + whole[4096:])[: len(whole)].ljust(len(whole)))
    seal(place.bad)
    said = place.act_all()
    assert not said["diff"].startswith("the manifest")


# ---------------------------------------------------------------- values

NASTY: list[Any] = [
    *(-1, 0, 1, 3, 4095, 4096, 2**22, 2**31, 2**53, 2**59, 2**60, 2**63, 2**100, 1.5, 1e308, float("nan"), True, None),
    *(
        "",
        "..",
        ".",
        "/etc/passwd",
        "../secret/file",
        "a/b",
        "\x00",
        "manifest.json",
        "tangram.json",
        "é" * 300,
        "x" * 70,
    ),
    *(
        "float32",
        "float4",
        "nothing",
        "[0:7 0:6]",
        "[0:1152921504606846975]",
        "[1:0]",
        "[0:4 0:6] + [0:4 0:6]",
        "[]",
        "[",
    ),
    *([], {}, [[]], [0], [-1], [0, 0], [7, 6], [2**40, 2**40], [0] * 65, [2**59] * 60, {"a": {}}, [[0, 0], [7, 6]]),
    *([[0, 4096, [0, 0], [7, 6]]], [[0, 0, [0, 0], [7, 6]]], [[5, 4096, [0], [5]]], [[0, 4096, "[0:7 0:6]"]] * 2),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything in a JSON document."""
    found = [path]
    inner: Any = ()
    if isinstance(value, dict):
        inner = cast("dict[str, Any]", value).items()
    elif isinstance(value, list):
        inner = enumerate(cast("list[Any]", value))
    for key, one in inner:
        found += places(one, (*path, key))
    return found


def spoilt(fields: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> str:
    """One to three values replaced, removed, renamed or doubled."""
    for _ in range(draw(st.integers(1, 3))):
        some = [path for path in places(fields) if path]
        if not some:  # all of it has been removed
            break
        path = draw(st.sampled_from(some))
        inner: Any = fields
        for key in path[:-1]:
            inner = inner[key]
        kind = draw(st.sampled_from(["value", "value", "value", "remove", "rename", "other"]))
        if kind == "value":
            inner[path[-1]] = copy.deepcopy(draw(st.sampled_from(NASTY)))
        elif kind == "remove":
            del inner[path[-1]]
        elif kind == "rename" and isinstance(inner, dict):
            name = draw(st.sampled_from([x for x in NASTY if isinstance(x, str)]))
            inner[name] = inner.pop(path[-1])
        else:  # the value of another place
            there: Any = fields
            for key in draw(st.sampled_from(some)):
                there = there[key]
            inner[path[-1]] = json.loads(json.dumps(there))
    return json.dumps(fields)


def test_nothing_is_left_to_spoil() -> None:
    answers = iter([3, ("one",), "remove"])
    assert spoilt({"one": 1}, lambda _: next(answers)) == "{}"


@FEWER
@given(data=st.data())
def test_values_of_the_manifest(base: Path, data: st.DataObject) -> None:
    place = Place(base)
    fields = json.loads((place.bad / MANIFEST).read_bytes())
    (place.bad / MANIFEST).write_text(spoilt(fields, data.draw))
    seal(place.bad)
    place.act_all()


@FEWER
@given(data=st.data())
def test_values_of_the_marker(base: Path, data: st.DataObject) -> None:
    place = Place(base)
    fields = json.loads((place.bad / MARKER).read_bytes())
    fields.pop("crc32")
    changed = json.loads(spoilt(fields, data.draw))
    (place.bad / MARKER).write_bytes(commits.marker_text(changed))
    place.act_all()


def test_a_marker_that_names_a_file_that_cannot_be_one(base: Path) -> None:
    place = Place(base)
    fields = json.loads((place.bad / MARKER).read_bytes())
    fields.pop("crc32")
    fields["sizes"]["\u00e9" * 200] = 5  # longer than a file system takes
    (place.bad / MARKER).write_bytes(commits.marker_text(fields))
    place.act_all()


@FEWER
@given(data=st.data())
def test_values_of_a_header(base: Path, data: st.DataObject) -> None:
    place = Place(base)
    whole = (place.bad / EMBED).read_bytes()
    fields = json.loads(whole[8:4096])
    text = spoilt(fields, data.draw).encode()
    length = data.draw(st.sampled_from([4088, len(text), 0, 2**63, 2**64 - 1, 10**8, len(whole) - 8]))
    head = length.to_bytes(8, "little") + text.ljust(4088)[:4088]
    (place.bad / EMBED).write_bytes(head + whole[4096:])
    seal(place.bad)
    place.act_all()


# ---------------------------------------------------------------- what is no plain file


def _link(file: Path, secret: Path) -> None:
    file.symlink_to(secret / "other" / file.name)


def _socket(file: Path, secret: Path) -> None:
    near = secret.with_name("s")  # the name of a socket may not be long
    with socket.socket(socket.AF_UNIX) as link:
        link.bind(os.path.relpath(near))
    near.rename(file)


KINDS: dict[str, Callable[[Path, Path], Any]] = {
    "a link to another checkpoint's": _link,
    "a link to nothing": lambda file, secret: file.symlink_to(secret / "none"),
    "a link to itself": lambda file, secret: file.symlink_to(file),
    "a link to /dev/zero": lambda file, secret: file.symlink_to("/dev/zero"),
    "a pipe": lambda file, secret: os.mkfifo(file),
    "a folder": lambda file, secret: file.mkdir(),
    "a link to a folder": lambda file, secret: file.symlink_to(secret),
    "a socket": _socket,
    "nothing": lambda file, secret: None,
    "an empty file": lambda file, secret: file.write_bytes(b""),
    "the same file of another save": lambda file, secret: shutil.copy(file.parent.with_name("good") / file.name, file),
}


@pytest.mark.parametrize("name", [MARKER, MANIFEST, EMBED, "config.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_instead_of_a_file(base: Path, name: str, kind: str) -> None:
    place = Place(base)
    (place.bad / name).unlink()
    KINDS[kind](place.bad / name, place.secret)
    said = place.act_all()
    known = name == "config.json" and kind == "the same file of another save"  # they say the same
    assert bool(said["load"]) is not known, said
    if name != "config.json":
        assert said["inspect"], said
        assert said["convert"], said


@pytest.mark.skipif(not hasattr(os, "mknod") or os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize("name", [MARKER, MANIFEST, EMBED])
def test_a_device_instead_of_a_file(base: Path, name: str) -> None:
    place = Place(base)
    (place.bad / name).unlink()
    try:
        os.mknod(place.bad / name, 0o600 | 0o020000, os.makedev(1, 5))  # what has no end
    except PermissionError:
        pytest.skip("this machine makes no devices")
    assert place.act_all()["load"]


# ---------------------------------------------------------------- what is removed


def test_nothing_behind_a_link_is_removed(base: Path) -> None:
    place = Place(base)
    runs = place.bad.parent
    (runs / "linked").symlink_to(place.secret / "other")
    (runs / ".linked-abc.partial").symlink_to(place.secret)
    shutil.copytree(place.bad, runs / "step-9")
    (runs / "step-9" / "deep").mkdir()
    (runs / "step-9" / "deep" / "link").symlink_to(place.secret)
    os.utime(runs / "step-9", (0, 0))
    orphan = runs / ".old-abc.partial"
    orphan.mkdir()
    (orphan / "link").symlink_to(place.secret)
    (orphan / "file").symlink_to(place.secret / "file")
    place.act_all()
    assert not orphan.exists()
    assert not (runs / "good").exists(), "what a policy does not keep goes"


def test_a_folder_of_links_alone_is_not_pruned(base: Path) -> None:
    place = Place(base)
    runs = place.folder / "links"
    runs.mkdir()
    for step in (1, 2):
        (runs / f"step-{step}").symlink_to(place.secret / "other")
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        retention.plan(runs, retention.parse(["last=1"]))
    commits.sweep(runs)
    assert verify.verify(place.secret / "other").sound


# ---------------------------------------------------------------- very much of it


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [100, 900, 100_000])
@pytest.mark.parametrize("where", ["objects", "tensors", "files"])
def test_tables_within_tables(base: Path, where: str, levels: int) -> None:
    place = Place(base)
    fields = json.loads((place.bad / MANIFEST).read_bytes())
    fields[where] |= {"deep": "HERE"}
    text = json.dumps(fields).replace('"HERE"', deep(levels))
    (place.bad / MANIFEST).write_text(text)
    marker = json.loads((place.bad / MARKER).read_bytes())
    seal(place.bad) if levels < 500 else _seal_unread(place.bad, marker)
    said = place.act_all()
    assert bool(said["load"]) is (where != "objects" or levels > 900), said


def _seal_unread(path: Path, marker: dict[str, Any]) -> None:
    """The same without reading the manifest, which Python could not."""
    text = (path / MANIFEST).read_bytes()
    marker.pop("crc32")
    marker["manifest"] = hashlib.sha256(text).hexdigest()
    marker["sizes"][MANIFEST] = len(text)
    (path / MARKER).write_bytes(commits.marker_text(marker))


@pytest.mark.parametrize("what", ["tensors", "files", "objects", "pieces"])
def test_very_many_entries_take_memory_in_proportion(base: Path, what: str) -> None:
    place = Place(base)
    fields = json.loads((place.bad / MANIFEST).read_bytes())
    many = 4000
    if what == "tensors":
        row = {"dtype": "bool", "shape": [0], "digest": "0" * 32, "pieces": []}
        fields["tensors"] |= {f"t.{i}": row for i in range(many)}
    elif what == "files":
        fields["files"] |= {f"f{i}": {"size": 0, "xxh3": ""} for i in range(many)}
    elif what == "objects":
        fields["objects"] |= {f"o.{i}": i for i in range(many)}
    else:
        fields["tensors"]["model.norm"]["pieces"] *= many
    (place.bad / MANIFEST).write_text(json.dumps(fields))
    seal(place.bad)
    size = (place.bad / MANIFEST).stat().st_size
    for name in ("inspect", "verify", "load", "prune"):
        tracemalloc.start()
        act(name, place.bad)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 * size + (32 << 20), (name, peak, size)
