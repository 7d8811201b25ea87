"""A trial on a machine with little memory: what a process may allocate is limited, for it and all that it starts."""

import resource
from typing import Any

from tangram.training.trials.auto import helped


def with_little_memory(plan: str, most: int) -> dict[str, Any]:
    """As `helped`, in a helper of its own; `most` in bytes."""
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return helped(plan)
