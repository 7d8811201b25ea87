"""What the process that ranks are forked from imports: that alone is what it is for, so what it makes stays.

The garbage collector would look at it again and again, which takes a sixth of the imports' time, and once more in each
rank, which would copy its pages for it. At the end of that process there is nothing to take apart, for a second of a
core. Elsewhere this module does nothing: it has to be imported by name, as `multiprocessing` has no other way.
"""

import atexit
import gc
import importlib
import os
import sys

IMPORTED = "tangram.training.run.rank"
"""What ranks need. By name: it stands on the module that starts the process."""


def _import_for_ranks() -> None:
    gc.disable()
    importlib.import_module(IMPORTED)
    gc.freeze()
    gc.enable()
    atexit.register(os._exit, 0)  # ranks, which are forks, end without it


if "multiprocessing.forkserver" in sys.orig_argv[-1]:
    _import_for_ranks()
