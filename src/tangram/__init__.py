"""Tangram trains large models on PyTorch and keeps their state free of the layout it happens to have today.

    Layout, Mesh, Mapping   the notation: how tensors are sharded over a mesh
    mark                    a layout in a model's own code
    derive, parallelize     a model's layouts from marks, without ranks; and run so
    plan                    the best strategies of a model on a cluster
    save, load              the state of a job, at any layout, with checksums
    convert, verify         a checkpoint of any format and framework

Each room of this package is a library of its own, too (`tangram.layout`, `tangram.checkpoint`, ...). Names are imported
when they are first used, so that a user of one never pays for another. What is public, and stays so within a major
version, is said in docs/api.md.
"""

from typing import TYPE_CHECKING

from tangram.lazy import lazily

__version__ = "0.1.0.dev0"

__all__ = [
    "Layout",
    "Mapping",
    "Mesh",
    "__version__",
    "convert",
    "derive",
    "load",
    "mark",
    "parallelize",
    "plan",
    "save",
    "verify",
]

if TYPE_CHECKING:
    from tangram.checkpoint.conversion.converting import convert
    from tangram.checkpoint.inspect.foreign import verify
    from tangram.checkpoint.loading.load import load
    from tangram.checkpoint.saving.save import save
    from tangram.layout.mesh import Mesh
    from tangram.layout.notation import Layout, Mapping
    from tangram.planner.report.cluster_plan import plan
    from tangram.sharding.derivation import derive
    from tangram.sharding.eager.api import mark
    from tangram.training.parallel.parallelized import parallelize
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.checkpoint.conversion.converting": ["convert"],
            "tangram.checkpoint.loading.load": ["load"],
            "tangram.checkpoint.saving.save": ["save"],
            "tangram.checkpoint.inspect.foreign": ["verify"],
            "tangram.layout.mesh": ["Mesh"],
            "tangram.layout.notation": ["Layout", "Mapping"],
            "tangram.planner.report.cluster_plan": ["plan"],
            "tangram.sharding.derivation": ["derive"],
            "tangram.sharding.eager.api": ["mark"],
            "tangram.training.parallel.parallelized": ["parallelize"],
        },
    )
