"""DTensor of the installed torch, checked against plain torch in cases where it has been found wrong.

Each case is a row of a table (`CASES`), a script that anyone can save and run, and a verdict that `run` finds out anew
on the torch at hand: what upstream mends is reported as right, and nothing is claimed from memory.
"""

from tangram.sharding.compare.bodies import FOUND_WITH, CompareCase, Verdict
from tangram.sharding.compare.pair import PairOutcome, run, script
from tangram.sharding.compare.table import CASES

__all__ = ["CASES", "FOUND_WITH", "CompareCase", "PairOutcome", "Verdict", "run", "script"]
