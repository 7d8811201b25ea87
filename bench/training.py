"""A training step beside torch by hand and beside transformers' trainer; what a loop adds, the input, the start.

    steps     ours and the peer take turns in the same two processes (gloo), a few steps at a time; the ratio is that of
              pairs. By hand: `fully_shard`, or `parallelize_module`, torch's AdamW and `clip_grad_norm_`, batches ready
              made, the loss read every step. The trainer: `transformers.Trainer` as it comes, over the same processes.
    added     what our loop takes beyond a step on ready batches: data, events, logs; of a model so small that it shows
    input     text to batches on one core, beside `datasets`: map (tokenise), map (pack), a loader that collates
    context   ways to attend over two ranks that have half of a sequence each, beside the model's own with all keys
    startup   the quickstart as a command, until its first step is done

`--only` takes one of these groups.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bench._training import added, context, inputs, startup, steps
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row

GROUPS: Mapping[str, Callable[[bool, Path], Iterable[Row]]] = {
    "steps": steps.rows,
    "added": added.rows,
    "input": inputs.rows,
    "context": context.rows,
    "startup": startup.rows,
}


def rows(quick: bool, only: tuple[str, ...] | None = None) -> Iterable[Row]:
    """The figures; `quick` takes fewer turns."""
    for name in only or tuple(GROUPS):
        if name not in GROUPS:
            raise UserError(f"the bench of training has no group {name!r}: it has {', '.join(GROUPS)}")
        with tempfile.TemporaryDirectory() as folder:
            yield from GROUPS[name](quick, Path(folder))
