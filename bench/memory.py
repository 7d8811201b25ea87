"""Memory of fine-tuning, policy by policy, beside what the planner predicts: states, and what a step makes.

One model of 42.7 million parameters, one process, four samples of 128 tokens, always the same. Each policy has those
before it; its figures are

    states      parameters, buffers and the optimiser's states, counted, beside what is predicted
    flow        the most that operators have made in a step and is still there, counted, beside what is predicted
    forward     of it, until the backward begins
    backward    from there until the optimiser has stepped: gradients, and what is left of activations
    resident    the most that the process has had: an allocator's rounding and cache are in it, so there is no aim
    speed       tokens a second, beside what is predicted; no aim
    loss        after the last step, of the same samples

`--only` takes policies by name. `--repeats`: steps that are timed (3). `--quick`: two layers, to see that it works.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench._memory.policies import POLICIES, Measured, measure, plan_for, write_job
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row
from tangram.hardware.measuring.rates import rates
from tangram.planner.local.estimate import Estimate
from tangram.training.run.launch import run_ranks

NEAR = 0.05
"""How far what is predicted may be from what is measured, as a share of that."""

MOVED = 1.05
"""How much more than what has to be moved streamed layers may move."""


def rows(quick: bool, only: tuple[str, ...] = (), repeats: int = 3) -> Iterable[Row]:
    """The figures of each policy."""
    if unknown := [name for name in only if name not in POLICIES]:
        raise UserError(f"the bench of memory has no policy {unknown[0]!r}: it has {', '.join(POLICIES)}")
    with tempfile.TemporaryDirectory() as made:
        folder, here = Path(made), rates()
        write_job(folder, quick=quick)
        for policy in only or tuple(POLICIES):
            plan, predicted = plan_for(folder, policy, here)
            work = plan, repeats, folder / "runs"
            measured = run_ranks(measure, work, world=1, on_event=lambda event: None, device="cpu")[0]
            yield from _rows_of(policy, measured, predicted)


def _rows_of(policy: str, measured: Measured, found: Estimate) -> Iterator[Row]:
    predicted = found.memory
    states = predicted.parameters + predicted.optimiser
    flow = predicted.activations + predicted.logits + predicted.gradients + predicted.gathered
    most = max(measured.forward, measured.backward)
    for name, own, said in (("states", measured.states, states), ("flow", most, flow)):
        yield Row(f"{policy}: {name}", "MB", own / 1e6, {"predicted": said / 1e6})
        if said:  # states of streamed layers lie in files
            yield Row(f"{policy}: {name}, prediction off by", "", abs(said / own - 1), target=NEAR)
    if measured.needed:
        yield Row(f"{policy}: bytes moved / needed", "", measured.moved / measured.needed, target=MOVED)
    yield Row(f"{policy}: forward", "MB", measured.forward / 1e6)
    yield Row(f"{policy}: backward", "MB", measured.backward / 1e6)
    yield Row(f"{policy}: resident", "MB", measured.resident / 1e6)
    speed = {"predicted": found.tokens_per_second}
    yield Row(f"{policy}: speed", "tokens/s", measured.tokens_per_second, speed, better="higher")
    yield Row(f"{policy}: loss", "nats", measured.loss)
