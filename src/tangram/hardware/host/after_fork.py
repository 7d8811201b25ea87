"""A shim for torch in a forked process, whose autograd threads may abort it as they start.

The thread pool that a fork inherits is made anew by the first thread that asks for it. Where an accelerator, or the
fake one of `FakeTensorMode`, gives autograd a thread per device, they ask at the same time, and those that find no pool
abort: "Invalid thread pool!", https://github.com/pytorch/pytorch/issues/178535. In half of the forks, where it was
seen. So the fork's one thread asks before there are others.

`tests/hardware/test_after_fork.py` tells when torch does without.
"""

import sys


def settle_torch(threads: int | None = None) -> None:
    """To be called first in a fork: make torch's thread pool anew, where torch is loaded; of as many `threads`."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads or torch.get_num_threads())
