"""Sharding: how an operator's tensors may be cut, and the layouts of a whole model that follow from marks on a few.

`tangram.derive` and `tangram.parallelize` begin here; `mark`, `relayout` and `layout_of` are for a model's own code
(`tangram.sharding.eager`). Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from tangram.lazy import lazily

__all__ = [
    "ConflictError",
    "Derivation",
    "Derived",
    "Mark",
    "WorkRates",
    "layout_of",
    "mark",
    "marks_of",
    "own_rules",
    "read_marks",
    "relayout",
]

if TYPE_CHECKING:
    from tangram.sharding.derivation import Derivation
    from tangram.sharding.derive.derive import ConflictError, Derived
    from tangram.sharding.derive.marking.marks import Mark, marks_of, read_marks
    from tangram.sharding.derive.problem.rates import WorkRates
    from tangram.sharding.discover.own_rules import own_rules
    from tangram.sharding.eager.api import layout_of, mark, relayout
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.sharding.derivation": ["Derivation"],
            "tangram.sharding.derive.derive": ["ConflictError", "Derived"],
            "tangram.sharding.derive.marking.marks": ["Mark", "marks_of", "read_marks"],
            "tangram.sharding.derive.problem.rates": ["WorkRates"],
            "tangram.sharding.discover.own_rules": ["own_rules"],
            "tangram.sharding.eager.api": ["layout_of", "mark", "relayout"],
        },
    )
