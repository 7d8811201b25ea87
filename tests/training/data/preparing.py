"""A process that prepares tokens step by step: it says what happens and waits for a line before it goes on."""

import sys

from tangram.schema.job import DataPlan
from tangram.training.data import BYTES, prepare
from tangram.training.observe.events import Working


def tell(event: object) -> None:
    """One line for an event; of those that write something, the next one is waited for."""
    if isinstance(event, Working):
        print("working", event.done, event.total, flush=True)
        sys.stdin.readline()
    else:
        print("waiting", flush=True)


if __name__ == "__main__":
    prepare(DataPlan.model_validate_json(sys.argv[1]), BYTES, tell, part_bytes=int(sys.argv[2]))
    print("done", flush=True)
