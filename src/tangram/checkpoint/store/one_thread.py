"""One thread for a piece of work, whatever torch is told to use.

Torch hands a large copy or product to helper threads and waits for all of them, spinning. Beside other ranks, and
beside the threads that read and write, one of them is often not running, and the wait costs many times what the help
saves.
"""

import contextlib
import ctypes
from collections.abc import Generator
from functools import lru_cache
from typing import Any

import torch


@contextlib.contextmanager
def one_thread() -> Generator[None]:
    """Torch uses no helpers in this thread meanwhile; other threads are left as they are.

    `torch.set_num_threads` would be for all threads that begin afterwards. Without OpenMP nothing changes.
    """
    before = torch.get_num_threads()  # makes a new thread take what torch was told
    choose = _setter()
    choose(1)
    try:
        yield
    finally:
        choose(before)


@lru_cache(1)
def _setter() -> Any:
    """OpenMP's own setting, which is of the calling thread; torch has loaded it."""
    try:
        return ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return lambda count: None  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]
