"""Models: from a configuration to a module, on no device and with weights that any number of ranks agree on.

Names are imported when they are first used; those that build a model need transformers (the extra `hf`).
"""

from typing import TYPE_CHECKING

from tangram.lazy import lazily

__all__ = [
    "Dims",
    "Family",
    "Graph",
    "Outline",
    "Source",
    "build_on_meta",
    "decoder",
    "family_named",
    "family_of",
    "presets",
    "read_source",
]

if TYPE_CHECKING:
    from tangram.models.build import build_on_meta, presets
    from tangram.models.families import Family, family_named, family_of
    from tangram.models.graph import Graph
    from tangram.models.outline import Dims, Outline, decoder
    from tangram.models.source import Source, read_source
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.models.build": ["build_on_meta", "presets"],
            "tangram.models.families": ["Family", "family_named", "family_of"],
            "tangram.models.graph": ["Graph"],
            "tangram.models.outline": ["Dims", "Outline", "decoder"],
            "tangram.models.source": ["Source", "read_source"],
        },
    )
