"""Some models of the sweep on two ranks: as docs/swept.md says. A new refusal is seen, and so is one that went."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sweep import table
from tests.sweep.ranks import Result

FOUND = table.read()
GROUPS = table.groups(name for name, one in FOUND.items() if one.what != "unfit")


def test_the_page_is_of_what_was_found() -> None:
    assert table.page(FOUND) == table.PAGE.read_text(), "python -m tests.sweep.table --page"


def test_what_is_of_a_machine_is_left_out() -> None:
    assert table.sentence("at /a/b/tests/sweep/modules.py:7: no\n rule") == "at tests/sweep/modules.py: no rule"


def _unlike(found: list[Result]) -> list[tuple[Result, Result | None]]:
    """What is otherwise than the page says. The words of a refusal may change: the page's maker takes the new ones."""
    return [(one, known) for one in found if (known := FOUND.get(one.name)) is None or known.what != one.what]


def test_a_model_that_comes_out_otherwise_is_seen() -> None:
    equal = next(one for one in FOUND.values() if one.what == "equal")
    refused = next(one for one in FOUND.values() if one.what == "refused")
    others = [
        Result(equal.name, "wrong"),
        Result(refused.name, "equal"),
        Result("new", "crash"),
    ]
    assert [one for one, _ in _unlike([equal, replace(refused, why="in other words"), *others])] == others


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0]} to {group[-1]}")
def test_two_ranks_are_as_one_process_or_refuse(group: list[str]) -> None:
    assert _unlike(table.run(group)) == []
