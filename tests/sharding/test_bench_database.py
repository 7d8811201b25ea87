"""The bench of torch's database: what is a case, what is counted of it, and how cases add up to figures."""

import pytest
import torch

from bench._sharding import database, gaps, ours, sides
from bench._sharding.cases import Case, Sample, samples
from tangram.sharding.discover.report import Gap
from tangram.sharding.ops.rule_table import RuleTable, builtin, parse_lines

DOUBLE = 8


def entry(name: str) -> object:
    from torch.testing._internal.common_methods_invocations import op_db  # takes some seconds, of one worker only

    return next(info for info in op_db if info.name == name)


def first(name: str) -> Sample:
    found = next(sample for sample in samples(entry(name)) if sample is not None)
    assert found is not None
    return found


def test_samples_that_draw_numbers_and_undefined_values_are_no_cases() -> None:
    assert any(sample is None for sample in samples(entry("nn.functional.dropout")))
    assert list(samples(entry("new_empty"))) == []
    assert all(samples(entry("mm")))


def test_a_gradient_that_is_pending_is_brought_home() -> None:
    sample = first("mm")
    (m, k), (_, n) = (t.shape for t in sample.tensors)
    rows = ours.tried(sample, 0, 0)
    assert (rows.kind, rows.forward, rows.backward) == ("right", 0, 0)
    assert (
        rows.closing == 2 * k * n * DOUBLE
    )  # an all-reduce of the other's gradient: n bytes of n to each of two ranks
    inner = ours.tried(sample, 0, 1)  # the result is pending; the other is sliced, so its gradient is gathered
    assert inner.closing == 2 * m * n * DOUBLE + k * n * DOUBLE


def test_what_goes_forth_comes_back() -> None:
    sample = first("cumsum")
    found = ours.tried(sample, 0, 0)
    assert sample.tensors[0].shape[0] > 2
    assert found.kind == "right"
    assert found.backward == found.forward > 0  # the totals of the part before, and those of its gradient
    assert ours.tried(sample, 0, 1) == Case("right")


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = builtin().with_lines(parse_lines("flip : ... {dims} ... -> ... {dims} ..."))
    monkeypatch.setattr(ours, "builtin", lambda: wrong)
    found = ours.tried(first("flip"), 0, 0)
    assert found.kind == "wrong"
    assert "differs" in found.why


def test_an_operator_without_a_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "builtin", RuleTable)
    found = ours.tried(first("mm"), 0, 0)
    assert (found.kind, "there is no rule for mm" in found.why) == ("raises", True)


def test_figures_are_of_what_both_get_right() -> None:
    own = {
        "a": {"0 0 0": Case("right", 10, 20, 30), "0 0 1": Case("right", 5)},
        "b": {"0 0 0": Case("right", 100, whole=True)},
        "c": {"0 0 0": Case("right")},
        "d": {},
    }
    other = {
        "a": {"0 0 0": Case("right", 40, 0, 0), "0 0 1": Case("wrong")},
        "b": {"0 0 0": Case("raises")},
        "c": None,
        "d": {},
    }
    found = {row.figure: row for row in database.summed(own, other)}
    counts = {figure.partition(": ")[2]: row for figure, row in found.items() if figure.startswith("of 3 entries")}
    right = counts["right in every cut, forward and backward"]
    assert (right.ours, right.peers, right.met) == (3, {database.PEER: 0}, True)
    assert counts["wrong in some cut"].peers == {database.PEER: 1}
    assert counts["refused or raising in some cut"].peers == {database.PEER: 2}
    assert counts["right, but never without gathering"].ours == 1
    total = found["bytes that ranks receive, 1 cuts that both get right (3 not)"]
    assert (total.ours, total.peers, total.met) == (60, {database.PEER: 40}, False)
    assert (found["more: a"].ours, found["entries in which ours receives more"].ours) == (60, 1)


def test_whole_operators_with_a_valid_cut_are_listed_with_their_reason() -> None:
    some = [
        Gap("equal", "input 0 dim -1 -> sum", 2, "equal(...)", "They answer for all elements at once"),
        Gap("mm", "input 0 dim -1 -> sum", 2, "mm(...)", ""),
        Gap("put", "input 0 dim -1 -> cut", 3, "put(...)", ""),
    ]
    total, *listed = gaps.listed(some)
    assert (total.ours, total.met) == (1, False)
    assert [row.figure.split(":")[1].strip() for row in listed] == ["equal", "put"]


@pytest.mark.slow
def test_dtensor_is_run_on_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["mm", "cumsum", "nn.functional.mse_loss"]
    monkeypatch.setattr(sides, "entries", lambda every: [entry(name) for name in names])
    found = sides.by_dtensor(1)
    assert list(found) == names
    sample = first("mm")
    k, n = sample.tensors[1].shape
    rows = (found["mm"] or {})["0 0 0"]
    assert (rows.kind, rows.forward, rows.closing) == ("right", 0, 2 * k * n * DOUBLE)
    assert any(one.kind == "wrong" for one in (found["nn.functional.mse_loss"] or {}).values())
    assert torch.distributed.is_initialized() is False
