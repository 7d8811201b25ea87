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


def _import_for_ranks() -> None:
    gc.disable()
    importlib.import_module("tangram.training.run.rank")
    gc.freeze()
    gc.enable()
    atexit.register(_end, os.getpid())


def _end(server: int) -> None:
    if os.getpid() == server:  # what is forked from it, and from that, ends as it does
        os._exit(0)


if "multiprocessing.forkserver" in sys.orig_argv[-1]:
    _import_for_ranks()
