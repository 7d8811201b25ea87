"""One notation for how tensors lie over a mesh: text, regions, and who holds what. No processes, no files.

>>> from tangram.layout import Layout, Mesh, region
>>> mesh = Mesh.parse("dp=2 tp=2")
>>> layout = Layout.parse("(heads/tp d)/dp h").bind((12, 8), d=3)
>>> print(region(layout, mesh, 3))
[9:12 0:8]
"""

from tangram.layout.errors import LayoutError, NotationError
from tangram.layout.intervals import IntSet
from tangram.layout.locate import Owner, nearest_holder, owners, ranks_of, region, validate
from tangram.layout.mesh import Coords, Mesh
from tangram.layout.notation import Layout, Mapping
from tangram.layout.region import Box, Coverage, Region, coverage
from tangram.layout.syntax import Cut, Dim, Statement, TensorPattern

__all__ = [
    "Box",
    "Coords",
    "Coverage",
    "Cut",
    "Dim",
    "IntSet",
    "Layout",
    "LayoutError",
    "Mapping",
    "Mesh",
    "NotationError",
    "Owner",
    "Region",
    "Statement",
    "TensorPattern",
    "coverage",
    "nearest_holder",
    "owners",
    "ranks_of",
    "region",
    "validate",
]
