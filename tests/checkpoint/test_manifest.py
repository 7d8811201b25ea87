"""The manifest: it reads back what it wrote, and takes nothing from a stranger that does not hold together."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.checkpoint.store import manifest
from tangram.checkpoint.store.manifest import BLOCK, Manifest, ManifestError, StoredFile, StoredPiece, StoredTensor
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import TensorSpec

WEIGHT = StoredTensor(
    "model.weight",
    TensorSpec((4, 6), "float32"),
    "0" * 31 + "1",
    (
        StoredPiece(Region.box((0, 0), (4, 3)), "model-00001-of-00002.safetensors", 4096),
        StoredPiece(Region.box((0, 3), (4, 3)), "model-00002-of-00002.safetensors", 4096),
    ),
    "a b/tp",
)
FLAT = StoredTensor(
    "optim.weight.exp_avg",
    TensorSpec((4, 6), "bfloat16"),
    "f" * 32,
    (
        StoredPiece(Region.flat((4, 6), 0, 9), "model-00001-of-00002.safetensors", 4144),
        StoredPiece(Region.flat((4, 6), 9, 24), "model-00002-of-00002.safetensors", 4144),
    ),
)
EMPTY = StoredTensor("model.none", TensorSpec((0, 3), "int8"), "2" * 32, ())
GOOD = Manifest(
    id="ab" * 16,
    step=7,
    created="2026-01-01T00:00:00+00:00",
    tensors={tensor.name: tensor for tensor in (WEIGHT, FLAT, EMPTY)},
    files={
        "model-00001-of-00002.safetensors": StoredFile(4200, (5,)),
        "model-00002-of-00002.safetensors": StoredFile(BLOCK + 1, ((1 << 64) - 1, 1 << 63)),
    },
    objects={"progress.step": 7},
    mesh="tp=2",
)


def test_it_reads_back_what_it_wrote() -> None:
    assert manifest.parse(manifest.to_json(GOOD)) == GOOD


def test_checksums_are_those_of_the_standard_and_of_each_block() -> None:
    assert manifest.checksum(b"") == 0x2D06800538D394C2  # as XXH3's own specification has it
    data = bytes(BLOCK) + b"1"
    assert manifest.checksums(data) == (manifest.checksum(bytes(BLOCK)), manifest.checksum(b"1"))
    assert manifest.checksums(b"") == ()


def fields() -> dict[str, Any]:
    return json.loads(manifest.to_json(GOOD))


def setting(path: list[Any], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(known: Any) -> None:
        for key in path[:-1]:
            known = known[key]
        known[path[-1]] = value

    return change


FIRST = ["tensors", "model.weight", "pieces", 0]
HARMS = {
    "another format": (setting(["format"], 3), "format"),
    "a step below zero": (setting(["step"], -1), "step"),
    "a name that leads out": (setting(["files", "../x"], {"size": 0, "xxh3": ""}), "no plain name"),
    "an absolute name": (setting(["files", "/etc/passwd"], {"size": 0, "xxh3": ""}), "no plain name"),
    "a hidden name": (setting(["files", ".x"], {"size": 0, "xxh3": ""}), "no plain name"),
    "too few checksums": (setting(["files", "model-00002-of-00002.safetensors", "xxh3"], "0" * 16), "checksums"),
    "an absurd size": (setting(["files", "model-00002-of-00002.safetensors", "size"], 1 << 70), "size"),
    "checksums that are no numbers": (
        setting(["files", "model-00001-of-00002.safetensors", "xxh3"], "z" * 16),
        "sums",
    ),
    "checksums in capitals": (setting(["files", "model-00001-of-00002.safetensors", "xxh3"], "A" * 16), "sums"),
    "a dtype of nobody": (setting(["tensors", "model.weight", "dtype"], "float31"), "float31"),
    "an absurd shape": (setting(["tensors", "model.weight", "shape"], [1 << 59, 1 << 59]), "lack"),
    "a negative shape": (setting(["tensors", "model.weight", "shape"], [-4, 6]), "shape"),
    "dims without end": (setting(["tensors", "model.weight", "shape"], [1] * 1000), "shape"),
    "a true for a number": (setting([*FIRST, 1], True), "offset"),
    "a file that is not there": (setting([*FIRST, 0], 9), "file 9"),
    "a piece past the end": (setting([*FIRST, 1], 4192), "ends at byte"),
    "an odd byte": (setting([*FIRST, 1], 4098), "odd byte"),
    "a piece twice": (setting([*FIRST, 2], [0, 3]), "lack|twice"),
    "a piece outside": (setting([*FIRST, 2], [1, 0]), "outside"),
    "an empty piece": (setting([*FIRST, 3], [0, 3]), "empty"),
    "a region of other dims": (setting([*FIRST, 3], [4]), "offsets|dims"),
    "a region that is text": (setting(FIRST, [0, 4096, "[0:4 0:3]"]), "no boxes"),
    "boxes without end": (setting(FIRST, [0, 4096, [[[0, 1], [0, 1]]] * 5000]), "more than 4096"),
    "boxes of different dims": (setting(FIRST, [0, 4096, [[[0, 4], [0, 3]], [[0, 4]]]]), "dims"),
    "a box of no dims": (setting(FIRST, [0, 4096, [[]]]), "list of dims"),
    "half a run": (setting(FIRST, [0, 4096, [[[0], [0, 3]]]]), "pairs"),
    "runs that go down": (setting(FIRST, [0, 4096, [[[0, 4], [3, 0]]]]), "go up"),
    "runs that touch": (setting(FIRST, [0, 4096, [[[0, 2, 2, 4], [0, 3]]]]), "go up"),
    "a digest of other length": (setting(["tensors", "model.weight", "digest"], "00"), "digest"),
    "bytes in common": (setting(["tensors", "optim.weight.exp_avg", "pieces", 0, 1], 4100), "in common"),
    "no pieces": (setting(["tensors", "model.weight", "pieces"], []), "lack"),
    "pieces of nothing": (setting(["tensors", "model.none", "pieces"], [[0, 0, [0, 0], [1, 3]]]), "outside"),
    "a tensor that is no table": (setting(["tensors", "model.weight"], 3), "table"),
    "no files": (setting(["files"], None), "files"),
    "objects that are a list": (setting(["objects"], []), "objects"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_does_not_hold_together_is_refused(harm: str) -> None:
    known = fields()
    change, words = HARMS[harm]
    change(known)
    with pytest.raises(ManifestError, match=words):
        manifest.parse(json.dumps(known))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"format": 2}', "[" * 100_000, '{"a": 1, "a": 2}'])
def test_no_manifest_at_all(text: str) -> None:
    with pytest.raises(ManifestError):
        manifest.parse(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.data())
def test_any_change_is_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever a stranger puts anywhere, there is a manifest that holds together, or one sentence."""
    known: Any = fields()
    at = known
    while isinstance(at, dict | list) and at:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else list(range(len(at)))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            at[key] = data.draw(JSON)
            break
        at = at[key]
    try:
        found = manifest.parse(json.dumps(known))
    except UserError:
        return
    manifest.check(found)


def test_a_million_rows_that_say_little_cost_little() -> None:
    known = fields()
    known["tensors"] = {}
    known["files"] = {f"f{i}": {"size": 1 << 59, "xxh3": ""} for i in range(20_000)}
    text = json.dumps(known)
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError, match="checksums"):
            manifest.parse(text)
        assert tracemalloc.get_traced_memory()[1] < 50 * len(text)
    finally:
        tracemalloc.stop()


def test_tensors_that_claim_to_be_huge_cost_nothing() -> None:
    known = fields()
    known["tensors"] = {
        f"t{i}": {"dtype": "int8", "shape": [1 << 30, 1 << 29], "digest": "0" * 32, "pieces": [[0, 0, [0, 0], [1, 1]]]}
        for i in range(1000)
    }
    with pytest.raises(ManifestError):
        manifest.parse(json.dumps(known))
