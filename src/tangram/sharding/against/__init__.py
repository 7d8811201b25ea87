"""DTensor of the installed torch, checked against plain torch in cases where it has been found wrong.

Each case is a row of a table (`CASES`), a script that anyone can save and run, and a verdict that `run` finds out anew
on the torch at hand: what upstream mends is reported as right, and nothing is claimed from memory.
"""

from tangram.sharding.against.case import FOUND_WITH, Case, Verdict
from tangram.sharding.against.pair import Outcome, run
from tangram.sharding.against.script import script
from tangram.sharding.against.table import CASES

__all__ = ["CASES", "FOUND_WITH", "Case", "Outcome", "Verdict", "run", "script"]
