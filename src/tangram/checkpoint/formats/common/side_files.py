"""Side files: what a model's directory has beside its weights, and where a conversion has come from.

    repository on the hub -> conversion -> repository that another program loads

All go along but weights (in any format), data, indexes of formats, hidden files and what is too large: configurations,
tokenizer, chat templates, preprocessors, custom code, README, licence. So do files in sub-folders without weights. What
is left is named, so that it can be said. This is the one place that decides; conversions and the trainer's export ask.
"""

import base64
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.store.commits import read_bounded, write_file
from tangram.checkpoint.store.manifest import FILE_NAME, Manifest, checksums
from tangram.errors import UserError

LARGEST_SMALL = 1 << 28
"""Bytes of a configuration or tokenizer file that is read."""
LARGEST_OTHER = 1 << 24
"""Bytes of a side file whose name says nothing, or that is in a sub-folder."""
MOST_INSIDE = 1000
"""Files of a sub-folder; one with more is no part of a model."""
SMALL = (".json", ".txt", ".model", ".jinja")
"""How names of configuration and tokenizer files end."""
PROVENANCE = "provenance.json"
PACKED = "side_files.json"
"""In a checkpoint of Tangram: the side files whose names it cannot have, as those in sub-folders."""
NOT_OURS = (
    "metadata.json", "manifest.json", "tangram.json", "adapter_config.json", "latest", "zero_to_fp32.py",
)  # fmt: skip
"""Indexes and helpers of formats, true only of the weights that they are beside."""
WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".onnx_data", ".npz",
    ".npy", ".ot", ".distcp", ".pdparams", ".pdopt", ".metadata", ".pkl", ".pickle", ".tflite", ".nemo", ".pte",
)  # fmt: skip
"""How names of files with weights end, in formats that are read and in others."""
DATA = (
    ".jsonl", ".parquet", ".arrow", ".csv", ".tsv", ".log", ".tar", ".gz", ".zip", ".zst", ".xz", ".bz2", ".lock",
)  # fmt: skip
"""How names of files end that hold data."""
QUANTISED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Side files that say how weights are quantised."""
_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template", "tekken")
_TOKENIZER_ENDS = (".model", ".spm", ".bpe", ".tiktoken")
_CODE_FOR = "auto_map"


@dataclass(frozen=True)
class SideFiles:
    """The side files of a directory."""

    files: Mapping[str, bytes]
    """By name; those in sub-folders with the folder before it, as `additional_chat_templates/tool_use.jinja`."""
    left: tuple[str, ...] = ()
    """Names of files, and of folders with a "/" behind, that are neither weights nor carried."""


def side_files(path: Path) -> SideFiles:
    """The side files of a directory. Links to files are followed, as a cache of the hub has them; to folders not."""
    files: dict[str, bytes] = {}
    left: list[str] = []
    for entry in sorted(path.iterdir()):
        if _hidden(entry.name) or entry.name.endswith((*WEIGHTS, ".index.json")) or entry.name in NOT_OURS:
            continue
        if entry.is_dir():
            inside = None if entry.is_symlink() else _inside(entry)
            if inside is not None:
                files.update({f"{entry.name}/{file.relative_to(entry).as_posix()}": _read(file) for file in inside})
            else:
                left.append(f"{entry.name}/")
        elif entry.is_file():
            bound = LARGEST_SMALL if entry.suffix in SMALL else LARGEST_OTHER
            if entry.suffix in DATA or entry.stat().st_size > bound:
                left.append(entry.name)
            else:
                files[entry.name] = _read(entry)
    return SideFiles(files, tuple(left))


def small_files(path: Path) -> dict[str, bytes]:
    """The side files of a directory by name."""
    return dict(side_files(path).files)


def _read(file: Path) -> bytes:
    return read_bounded(file.resolve(), LARGEST_SMALL)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _inside(folder: Path) -> list[Path] | None:
    """The files of a sub-folder, to any depth; None of one with weights, data or more than side files would be."""
    found: list[Path] = []
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _hidden(name))
        for name in sorted(name for name in names if not _hidden(name)):
            file = Path(top, name)
            weights = name.endswith((*WEIGHTS, *DATA, ".index.json")) or name.startswith("events.out.")
            if weights or len(found) == MOST_INSIDE or not file.is_file() or file.stat().st_size > LARGEST_OTHER:
                return None
            found.append(file)
    return found


def write_side_files(folder: Path, files: Mapping[str, bytes]) -> list[str]:
    """Write side files into a directory, with the sub-folders that they need; their names."""
    for name, data in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(f"a side file has the name {name!r}, which leads out of the directory")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, data)
    return list(files)


# ---------------------------------------------------------------- of a checkpoint with plain names only


def packed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same under names that a manifest can have: all others together in one file."""
    other = {name: base64.b64encode(data).decode() for name, data in files.items() if not FILE_NAME.fullmatch(name)}
    own = {name: data for name, data in files.items() if name not in other}
    return {**own, **({PACKED: json.dumps(other).encode()} if other else {})}


def of_checkpoint(path: Path, manifest: Manifest) -> dict[str, bytes]:
    """The side files in a checkpoint of Tangram. Raises DamagedError for one that is not what was saved."""
    found: dict[str, bytes] = {}
    for name, file in manifest.files.items():
        if name.endswith((".safetensors", ".index.json")):
            continue
        data = read_bounded(path / name, LARGEST_SMALL)
        if checksums(data) != file.sums:
            raise DamagedError(f'the checkpoint "{path}" is damaged: its file "{name}" is not the one that was saved')
        found[name] = data
    other: Any = json.loads(found.pop(PACKED, b"{}"))
    return found | {name: base64.b64decode(text) for name, text in cast("dict[str, str]", other).items()}


# ---------------------------------------------------------------- tokenizers


def of_tokenizer(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a tokenizer, its templates included, and the code that its configuration names."""
    found = {name: data for name, data in files.items() if is_of_tokenizer(name)}
    custom = _CODE_FOR.encode() in files.get("tokenizer_config.json", b"")
    return found | {name: data for name, data in files.items() if custom and name.endswith(".py")}


def is_of_tokenizer(name: str) -> bool:
    """Whether a side file is a tokenizer's, by its name."""
    return name.startswith((*_TOKENIZER, "additional_chat_templates/")) or name.endswith(_TOKENIZER_ENDS)


# ---------------------------------------------------------------- where it comes from


def with_provenance(
    small: Mapping[str, bytes], fields: Mapping[str, Any], beside: str = "", left: Iterable[str] = ()
) -> dict[str, bytes]:
    """The same with a file that says what was converted and how; what it says already of earlier ones stays inside.

    `beside`: the name of the directory that the side files are of; `left`: what of it is not among them.
    """
    before: list[Any] = []
    if PROVENANCE in small:
        try:
            earlier: Any = json.loads(small[PROVENANCE])
        except ValueError:
            earlier = {"unreadable": small[PROVENANCE].decode(errors="replace")}
        before = [earlier]
    names = sorted(name for name in small if name != PROVENANCE)
    carried = {"from": beside, "files": names, "left_out": sorted(left)}
    shown = {**fields, **({"side_files": carried} if beside else {})}
    text = json.dumps({**shown, **({"before": before[0]} if before else {})}, indent=1)
    return {**small, PROVENANCE: text.encode()}
