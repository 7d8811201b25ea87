"""Checkpoints of any PyTorch program: saved by all ranks, verified when read, loaded at any other layout.

    from tangram.checkpoint import load, save

    state = {"model": model, "optim": optimiser, "progress": {"step": 100}}
    save(state, "runs/step-100", group=group)        # every rank calls it; group=None: this process alone
    load(state, "runs/step-100", group=group)        # in place, at any other mesh and number of ranks

Tensors of a state are plain ones, replicated on every rank, DTensors as FSDP2 makes them, or `Held` parts with their
layout. Names are imported when they are first used.
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
    "Held",
    "LoadError",
    "Loaded",
    "Manifest",
    "Reading",
    "Report",
    "Restructured",
    "SaveError",
    "Saved",
    "Settings",
    "StoredTensor",
    "describe",
    "digest_of",
    "load",
    "newest",
    "read_manifest",
    "save",
]

if TYPE_CHECKING:
    from tangram.checkpoint.background import AsyncSaver, Saved, Settings
    from tangram.checkpoint.commits import newest, read_manifest
    from tangram.checkpoint.convert import Converted
    from tangram.checkpoint.converting import ConvertOptions
    from tangram.checkpoint.digest import digest_of
    from tangram.checkpoint.loading.load import Loaded, LoadError, load
    from tangram.checkpoint.manifest import Manifest, StoredTensor
    from tangram.checkpoint.restructure import Restructured
    from tangram.checkpoint.saving.save import About, SaveError, save
    from tangram.checkpoint.source import DamagedError
    from tangram.checkpoint.state import Described, Held, describe
    from tangram.checkpoint.verify_any import Reading, Report
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.checkpoint.background": ["AsyncSaver", "Saved", "Settings"],
            "tangram.checkpoint.commits": ["newest", "read_manifest"],
            "tangram.checkpoint.convert": ["Converted"],
            "tangram.checkpoint.converting": ["ConvertOptions"],
            "tangram.checkpoint.digest": ["digest_of"],
            "tangram.checkpoint.loading.load": ["Loaded", "LoadError", "load"],
            "tangram.checkpoint.manifest": ["Manifest", "StoredTensor"],
            "tangram.checkpoint.restructure": ["Restructured"],
            "tangram.checkpoint.saving.save": ["About", "SaveError", "save"],
            "tangram.checkpoint.source": ["DamagedError"],
            "tangram.checkpoint.state": ["Described", "Held", "describe"],
            "tangram.checkpoint.verify_any": ["Reading", "Report"],
        },
    )
