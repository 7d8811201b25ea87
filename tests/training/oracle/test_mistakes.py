"""Each planted mistake turns the comparison red; Tangram itself refuses the worst of them."""

from dataclasses import replace

import pytest

from tests.training.oracle.cases import Case, cases
from tests.training.oracle.compare import Bounds, apart_by_name, completed, findings, worst
from tests.training.oracle.conftest import Oracle
from tests.training.oracle.mistakes import MISTAKES
from tests.training.oracle.trace import Trace
from tests.training.oracle.warm import Planted

CLEAR = 50
"""Times the bound."""


@pytest.fixture(scope="module")
def everything(planted: Planted) -> dict[str, Case]:
    return cases(planted.folder / "text")


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_found(name: str, planted: Planted, everything: dict[str, Case], oracle: Oracle) -> None:
    mistake = MISTAKES[name]
    right = oracle(replace(everything[mistake.case], until=mistake.until))
    traces = completed([rank.traces[name] for rank in planted.done])
    assert all(findings(trace, right) for trace in traces)
    assert max(worst(trace, right) for trace in traces) >= CLEAR * Bounds().gradients


def wrong_and_right(name: str, planted: Planted, everything: dict[str, Case], oracle: Oracle) -> tuple[Trace, Trace]:
    mistake = MISTAKES[name]
    return planted.done[0].traces[name], oracle(replace(everything[mistake.case], until=mistake.until))


def test_loss_and_gradient_norm_do_not_show_that_norms_of_heads_are_not_summed(
    planted: Planted, everything: dict[str, Case], oracle: Oracle
) -> None:
    wrong, right = wrong_and_right("norms of heads not summed", planted, everything, oracle)
    assert wrong.losses[0] == pytest.approx(right.losses[0], rel=1e-5)
    assert wrong.norms[0] == pytest.approx(right.norms[0], rel=1e-5)
    apart = apart_by_name(wrong.gradients[1], right.gradients[1])
    red = {name for name, difference in apart.items() if difference > Bounds().gradients}
    assert red == {name for name in apart if "q_norm" in name or "k_norm" in name}
    assert min(apart[name] for name in red) > 0.3


def test_one_block_averaged_leaves_most_gradients_right(
    planted: Planted, everything: dict[str, Case], oracle: Oracle
) -> None:
    wrong, right = wrong_and_right("one block averaged", planted, everything, oracle)
    apart = apart_by_name(wrong.gradients[1], right.gradients[1])
    assert {name for name, difference in apart.items() if difference > 1e-5} == {n for n in apart if ".layers.0." in n}


def test_an_update_that_is_wrong_is_found_although_all_gradients_are_right(
    planted: Planted, everything: dict[str, Case], oracle: Oracle
) -> None:
    for name in ("norms decay", "stale shard"):
        wrong, right = wrong_and_right(name, planted, everything, oracle)
        assert max(apart_by_name(wrong.gradients[1], right.gradients[1]).values()) <= 1e-5
        assert findings(wrong, right)


def test_tangram_refuses_gradients_that_tensor_ranks_do_not_share(planted: Planted) -> None:
    for rank in planted.done:
        assert "the ranks of the axis tp have different gradients of" in rank.refusals["gradients compared"]
        assert "_norm.weight" in rank.refusals["gradients compared"]


def test_parameters_that_stay_whole_over_the_update_have_no_gradient(planted: Planted) -> None:
    for rank in planted.done:
        assert "got no gradient" in rank.refusals["whole over the update"]


def test_ranks_with_other_values_of_a_module_of_ones_own_are_refused(planted: Planted) -> None:
    for rank in planted.done:
        assert rank.refusals["other values"].startswith("rank 3 has other initial values than rank 0")
        assert rank.refusals["half on meta"].startswith("some tensors of the model are on meta and some are not")
