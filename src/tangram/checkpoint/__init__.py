"""Checkpoints of any PyTorch program: saved by all ranks, verified when read, loaded at any other layout.

    from tangram.checkpoint import load, save

    state = {"model": model, "optim": optimiser, "progress": {"step": 100}}
    save(state, "runs/step-100")        # every rank calls it
    load(state, "runs/step-100")        # in place, at any other mesh and number of ranks

Tensors of a state are plain ones, replicated on every rank, DTensors as FSDP2 makes them, or `LocalPart` parts with
their layout. Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from tangram.lazy import lazily

__all__ = [
    "About",
    "AsyncSaver",
    "ConvertOptions",
    "Converted",
    "DamagedError",
    "Described",
    "LoadError",
    "Loaded",
    "LocalPart",
    "Manifest",
    "Reading",
    "Restructured",
    "SaveError",
    "SaveResult",
    "Settings",
    "StoredTensor",
    "VerifyReport",
    "describe",
    "digest_of",
    "load",
    "newest",
    "read_manifest",
    "save",
]

if TYPE_CHECKING:
    from tangram.checkpoint.conversion.convert import Restructured
    from tangram.checkpoint.conversion.converting import ConvertOptions
    from tangram.checkpoint.formats.hf_export import Converted
    from tangram.checkpoint.inspect.foreign import Reading
    from tangram.checkpoint.inspect.verify import VerifyReport
    from tangram.checkpoint.loading.block_source import DamagedError
    from tangram.checkpoint.loading.load import Loaded, LoadError, load
    from tangram.checkpoint.saving.async_saver import AsyncSaver, SaveResult, Settings
    from tangram.checkpoint.saving.rank_parts import About, SaveError
    from tangram.checkpoint.saving.save import save
    from tangram.checkpoint.state.describe import describe
    from tangram.checkpoint.state.entries import Described, LocalPart
    from tangram.checkpoint.store.commits import newest, read_manifest
    from tangram.checkpoint.store.digest import digest_of
    from tangram.checkpoint.store.manifest import Manifest, StoredTensor
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.checkpoint.saving.async_saver": ["AsyncSaver", "SaveResult", "Settings"],
            "tangram.checkpoint.store.commits": ["newest", "read_manifest"],
            "tangram.checkpoint.formats.hf_export": ["Converted"],
            "tangram.checkpoint.conversion.converting": ["ConvertOptions"],
            "tangram.checkpoint.store.digest": ["digest_of"],
            "tangram.checkpoint.loading.load": ["Loaded", "LoadError", "load"],
            "tangram.checkpoint.store.manifest": ["Manifest", "StoredTensor"],
            "tangram.checkpoint.conversion.convert": ["Restructured"],
            "tangram.checkpoint.saving.rank_parts": ["About", "SaveError"],
            "tangram.checkpoint.saving.save": ["save"],
            "tangram.checkpoint.loading.block_source": ["DamagedError"],
            "tangram.checkpoint.state.describe": ["describe"],
            "tangram.checkpoint.state.entries": ["Described", "LocalPart"],
            "tangram.checkpoint.inspect.foreign": ["Reading"],
            "tangram.checkpoint.inspect.verify": ["VerifyReport"],
        },
    )
