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
    from tangram.models.building.build import Source, build_on_meta, presets, read_source
    from tangram.models.capturing.graph import Graph
    from tangram.models.families import Family, family_named, family_of
    from tangram.models.outlines.outline import Dims, Outline, decoder
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.models.building.build": ["Source", "build_on_meta", "presets", "read_source"],
            "tangram.models.families": ["Family", "family_named", "family_of"],
            "tangram.models.capturing.graph": ["Graph"],
            "tangram.models.outlines.outline": ["Dims", "Outline", "decoder"],
        },
    )
