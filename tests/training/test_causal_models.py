"""Transformers' causal language models train on two ranks as in one process: every gradient of two steps.

The oracle takes each document alone through the model, with nothing beside or behind it.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tangram.errors import UserError
from tangram.planner.local.derived_layouts import ModelAxis
from tangram.planner.local.strategies import Strategy
from tangram.training.run.launch import run_ranks
from tests.training.causal_models import (
    CAUSAL,
    CONTEXT,
    PACKED,
    REFUSED,
    SINGLE,
    TENSOR,
    Ran,
    apart,
    over_an_axis,
    plain,
    prepared,
    train_all,
)
from tests.training.causal_models import table as table_of

pytestmark = pytest.mark.filterwarnings("default")  # what transformers' classes warn of is theirs

QUICK = ("bloom", "lfm2", "qwen3_next", "phi3")
MARKED = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt")
CLOSE = 1e-4
COARSE = {"gemma4_unified_text": 2e-3}
"""Whose second gradients, after a step of AdamW, are 7e-4 off in one process of two threads beside one of one."""
DOCS = Path(__file__).parents[2] / "docs" / "training-models.md"


def check(families: tuple[str, ...], folder: Path, others: Mapping[str, Strategy] = MappingProxyType({})) -> None:
    plans = prepared(folder, (*families, *others))
    for family, strategy in others.items():
        plans[family] = over_an_axis(plans[family], strategy)
        assert strategy is CONTEXT or any(".*." in name for name in plans[family].layouts.parameters)  # all layers
    done = run_ranks(train_all, plans, world=2, on_event=print, device="cpu")
    for family in plans:
        ran = done[0][family]
        assert isinstance(ran, Ran), f"{family}: {ran}"
        assert ran.packing == CAUSAL[family], family
        assert ran.losses == done[1][family].losses
        assert apart(ran, plain(plans[family], ran.packing)) <= COARSE.get(family, CLOSE), family


def test_some_models_train_as_in_one_process(tmp_path: Path) -> None:
    check(QUICK, tmp_path, {"stablelm": TENSOR, "gpt2": TENSOR, "llama": CONTEXT, "opt": CONTEXT})


def test_ranks_exchange_no_heads_that_one_weight_makes(tmp_path: Path) -> None:
    """What would come of it is another plan: keys and values gathered."""
    plan = prepared(tmp_path, ("gpt2",))["gpt2"]
    with pytest.raises(UserError, match="a gpt2 model makes queries, keys and values by one weight"):
        over_an_axis(plan, Strategy("heads", "cp=2", (), (ModelAxis("cp", "context", "heads"),)))


@pytest.mark.slow
def test_models_without_marks_of_their_own_train_by_llamas_over_a_tensor_axis(tmp_path: Path) -> None:
    check((), tmp_path, dict.fromkeys(("biogpt", "stablelm", "xglm"), TENSOR))


@pytest.mark.slow
def test_models_train_by_the_marks_that_come_for_them_over_a_tensor_axis(tmp_path: Path) -> None:
    check((), tmp_path, dict.fromkeys(MARKED, TENSOR))


@pytest.mark.slow
def test_models_train_by_the_marks_that_come_for_them_over_a_context_axis(tmp_path: Path) -> None:
    check((), tmp_path, dict.fromkeys(set(MARKED) - {"opt"}, CONTEXT))


@pytest.mark.slow
def test_ranks_that_see_other_documents_of_a_row_make_one_mask(tmp_path: Path) -> None:
    """A row of documents of which a rank sees one: transformers would leave the mask out there."""
    check((), tmp_path, dict.fromkeys(("deepseek_v3", "gemma3_text", "llama", "qwen3"), CONTEXT))


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(0, len(CAUSAL), 12))
def test_models_train_as_in_one_process(begin: int, tmp_path: Path) -> None:
    check(tuple(CAUSAL)[begin : begin + 12], tmp_path)


@pytest.mark.slow
def test_models_that_cannot_be_trained_are_refused_in_a_sentence(tmp_path: Path) -> None:
    plans = prepared(tmp_path, tuple(REFUSED))
    done = run_ranks(train_all, plans, world=2, on_event=print, device="cpu")
    for family, why in REFUSED.items():
        assert why in str(done[0][family]), family
        assert str(done[0][family]).startswith("UserError: "), family


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "change", "freeze"),
    [("bert", {"is_decoder": True}, ()), ("electra", {"is_decoder": True}, ()), ("bart", {}, ("*encoder_attn*",))],
)
def test_the_way_out_that_a_refusal_names(
    family: str, change: dict[str, bool], freeze: tuple[str, ...], tmp_path: Path
) -> None:
    plans = prepared(tmp_path, (family,), change=change, freeze=freeze)
    ran = run_ranks(train_all, plans, world=2, on_event=print, device="cpu")[0][family]
    assert isinstance(ran, Ran), ran
    assert apart(ran, plain(plans[family], ran.packing)) <= CLOSE


def test_two_packings_are_not_the_same_run(tmp_path: Path) -> None:
    """The comparison tells the oracle of one packing from that of the other."""
    plans = prepared(tmp_path, ("phi3",))
    assert apart(plain(plans["phi3"], "packed"), plain(plans["phi3"], "single")) > 1000 * CLOSE


def test_the_page_has_the_table() -> None:
    assert not PACKED & SINGLE
    assert table_of() in DOCS.read_text(encoding="utf-8")
