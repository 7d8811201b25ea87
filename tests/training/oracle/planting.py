"""What planted mistakes have in common: another plan, other batches, other initial values."""

# ruff: noqa: N806  a tensor carries its dims in its name

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from tangram.training.data import IGNORE, Batch, RankBatches
from tangram.training.state import build_model
from tangram.training.step import loop
from tests.training.oracle.ranks import Setting, swapped


def with_plan(setting: Setting, table: str, **keys: object) -> None:
    """Another value of some keys of the plan."""
    changed = getattr(setting.plan, table).model_copy(update=keys)
    setting.plan = setting.plan.model_copy(update={table: changed})


def other_batches(change: Callable[[RankBatches, dict[str, Any]], RankBatches]) -> Any:
    """Batches that are not what the stream deals out."""
    real = loop.step_batches

    def wrong(corpus: Any, data: Any, **told: Any) -> RankBatches:
        return change(real(corpus, data, **told), {**told, "data": data})

    return swapped(loop, "step_batches", wrong)


def other_values(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Any:
    """Initial values that are not those of the model."""
    real = build_model.initial_tensors

    def wrong(*given: Any, **told: Any) -> Iterator[tuple[str, Tensor]]:
        yield from change({name: tensor.clone() for name, tensor in real(*given, **told)}).items()

    return swapped(build_model, "initial_tensors", wrong)


def counted_in(batches: RankBatches) -> int:
    return sum(int((batch.labels_BS != IGNORE).sum()) for batch in batches.micro)


def without_labels(batch: Batch, rows: slice) -> Batch:
    labels_BS = batch.labels_BS.clone()
    labels_BS[rows] = IGNORE
    return replace(batch, labels_BS=labels_BS)
