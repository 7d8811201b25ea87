"""What tasks other than the next token add to a step: rows of a sample, and models asked beside the one trained.

dpo     a pair of answers is two rows; the model as it began is asked of both (Rafailov et al. 2023)
orpo    a pair without a reference; so is SimPO
kto     one answer; beside it the reference, and both models of another sample's answer (Ethayarajh et al. 2024)
"""

from __future__ import annotations

from collections.abc import Mapping

from tangram.errors import UserError
from tangram.models.outlines.outline import Outline
from tangram.planner.space.setting import Beside
from tangram.text import nearest_hint

TASKS: Mapping[str, tuple[int, int]] = {"pretrain": (1, 0), "sft": (1, 0), "dpo": (2, 1), "orpo": (2, 0), "kto": (1, 3)}
"""Rows of a sample, and forwards beside those of training, by task."""


def task_of(name: str) -> tuple[int, int]:
    """A row of the table. Raises UserError with the nearest."""
    if name not in TASKS:
        raise UserError(f'there is no task "{name}"{nearest_hint(name, TASKS)}: there are {", ".join(TASKS)}')
    return TASKS[name]


def task_words(rows: int, other: Beside | None) -> tuple[str, ...]:
    """What is said of them below a ranking."""
    pairs = (f"a sample is {rows} rows: tokens are those of all, micro-batches count samples",) if rows > 1 else ()
    if other is None:
        return pairs
    whose = "a teacher" if other.teacher else "the model as it began"
    return (*pairs, f"{whose} is held beside: {other.numbers:.3g} of the numbers, {other.forwards:.3g} more forwards")


def beside(forwards: float, outline: Outline, teacher: Outline | None = None) -> Beside | None:
    """What so many forwards, or a teacher of a student, are of; None where there is neither."""
    if teacher is not None:
        return Beside(teacher.flops(1) / outline.flops(1), teacher.numbers / outline.numbers, teacher.hidden)
    return Beside(float(forwards), 1.0) if forwards else None
