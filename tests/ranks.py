"""Ranks of a test, forked from the process that `run_ranks` forks its own from: a spawned one imports torch anew.

A fork of the test's own process would be quicker still, but cannot run a backward pass once that process has run one.
"""

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from tangram.training.run.fork_server import context_of_ranks


def start(task: Callable[..., None], *arguments: Any, ranks: int) -> None:
    """Run `task(rank, *arguments)` on every rank to its end."""
    mp.start_processes(task, arguments, nprocs=ranks, start_method=context_of_ranks().get_start_method())


def start_failing(task: Callable[..., None], *arguments: Any, ranks: int) -> None:
    """The same of ranks some of which are killed or fail."""
    some = [context_of_ranks().Process(target=task, args=(rank, *arguments)) for rank in range(ranks)]
    for one in some:
        one.start()
    for one in some:
        one.join()
