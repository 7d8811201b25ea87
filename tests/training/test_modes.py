"""Default dropout in derived models: masks are those of one process, in training alone; planted mistakes are seen."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.functional import leaky_relu, linear
from transformers import LlamaConfig, LlamaForCausalLM

from tangram.errors import UserError
from tangram.models.building.twin import without_memory
from tangram.training.mesh.modes import Mode, changed, follow, mode_of, modules_of, refuse_ever_new, refuse_others
from tangram.training.run.launch import run_ranks
from tests.training.modes_tasks import MISTAKES, Ran, Work, run_all
from tests.training.oracle.warm import once
from tests.training.switched_tasks import CHANGES, OTHERS, PRUNED, Net, adapted

BOUND = 1e-5
REFUSED = r"b\.(norm|more) is not the module"
SAME, EVALUATED, OWN, PLACES, AGAIN = MISTAKES
WORKS = {
    "bert": Work("bert"),
    "gpt2": Work("gpt2"),
    "t5": Work("t5"),
    "gpt2, sequence cut": Work("gpt2", sequence=True),
    "bert, sequence cut, recomputed": Work("bert", sequence=True, recompute=True),
}
PLANTED = {
    SAME: Work("gpt2", mistake=SAME),
    EVALUATED: Work("gpt2", mistake=EVALUATED),
    OWN: Work("gpt2", mistake=OWN),
    PLACES: Work("gpt2", sequence=True, mistake=PLACES),
    AGAIN: Work("gpt2", mistake=AGAIN),
}
SLOW = {
    "bert, sequence cut": Work("bert", sequence=True),
    "gpt2, recomputed": Work("gpt2", recompute=True),
    "gpt2, four ranks": Work("gpt2", "tp=4", sequence=True),
    "t5, four ranks": Work("t5", "tp=4"),
}


def _run(works: dict[str, Work], world: int) -> dict[str, list[Ran]]:
    ranks = run_ranks(run_all, [*works.values()], world=world, on_event=lambda _: None, device="cpu")
    return {name: [own[i] for own in ranks] for i, name in enumerate(works)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ran]]:
    return once(
        tmp_path_factory,
        "modes",
        lambda _: _run({**WORKS, **PLANTED, "kinds": Work("kinds"), "changes": Work("changes")}, 2),
    )


def _is_right(found: list[Ran]) -> None:
    for one in found:
        assert max(one.off.values()) < BOUND
        assert one.worst < BOUND
        assert one.programs == 2, "one for training, one for evaluation"
        assert len({*one.losses.values()}) == 4, "of the five calls, the two in evaluation alone are alike"
        assert one.losses["eval"] == one.losses["eval again"]


@pytest.mark.parametrize("name", WORKS)
def test_masks_are_those_of_one_process_and_new_at_every_call(ran: dict[str, list[Ran]], name: str) -> None:
    _is_right(ran[name])


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_seen(ran: dict[str, list[Ran]], name: str) -> None:
    assert max(max(*one.off.values(), one.worst) for one in ran[name]) > 20 * BOUND


def test_what_is_cut_draws_for_a_sample_what_one_process_does_for_the_batch(ran: dict[str, list[Ran]]) -> None:
    for one in ran["kinds"]:
        assert len(one.off) > 10
        assert {kind: off for kind, off in one.off.items() if off > BOUND} == {}


def test_what_a_loop_changes_between_calls_is_seen(ran: dict[str, list[Ran]]) -> None:
    """Parameters that are frozen or trained, hooks, adapters, and attributes however a module has them."""
    for one in ran["changes"]:
        assert len(one.off) == 25
        assert {change: off for change, off in one.off.items() if off > BOUND} == {}
        assert all(re.match(REFUSED, one.refused[name]) for name in OTHERS), one.refused
        assert all(" is no parameter any more, as " in one.refused[name] for name in PRUNED), one.refused


def test_a_function_with_arguments_is_compared_by_them() -> None:
    """One that holds a tensor says nothing: a copy keeps its own."""
    net: Any = Net("function")
    net.a.act, net.holds = partial(leaky_relu, negative_slope=0.3), partial(linear, weight=net.a.up.weight)
    copy, before = without_memory(net), mode_of(net)
    its = cast(Any, copy).holds
    net.a.act = partial(leaky_relu, negative_slope=0.3)
    assert mode_of(net) == before
    net.a.act = partial(leaky_relu, negative_slope=0.6)
    assert mode_of(net) != before
    follow(copy, net)
    assert cast(Any, copy).holds is its


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for
@pytest.mark.parametrize("name", [*CHANGES, "adapters"])
def test_a_change_is_another_mode_which_a_copy_follows(name: str) -> None:
    make, changes = CHANGES.get(name, (adapted, (lambda model: model.set_adapter("second"),)))
    model = cast(Any, make())
    copy, met = without_memory(model), [mode_of(model, True)]
    for change in changes:
        change(model)
        met.append(mode_of(model, True))
        follow(copy, model, True)
        assert mode_of(deepcopy(copy), True) == met[-1]
        assert mode_of(model, True) == met[-1]
    assert all(one != other for one, other in pairwise(met))
    assert all(changed(one, other) for one, other in pairwise(met))


def test_hooks_of_libraries_are_no_mode() -> None:
    """They count, as the tokens of experts, and come and go with a run."""
    model, before = Net(), mode_of(Net(), True)
    model.a.register_forward_pre_hook(refuse_others)
    assert mode_of(model, True)[-1] == before[-1]


def test_layers_may_be_thawed_one_by_one() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))).requires_grad_(False)
    met: list[Mode] = []
    for layer in model:
        layer.requires_grad_(True)
        met.append(mode_of(model))
        refuse_ever_new(met)
    model[-1].calls = cast(Any, 1)
    with pytest.raises(UserError, match=r"19\.calls was another one in each of 21 calls"):
        refuse_ever_new([*met, mode_of(model)])


def test_a_copy_has_hidden_states_after_the_model_was_called() -> None:
    """transformers puts its hooks into a model at a first call; a copy from before, told that it has them, had none."""
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    copy, before = without_memory(model), mode_of(model)
    model(input_ids=torch.ones(1, 3, dtype=torch.long), output_hidden_states=True)
    assert mode_of(model) == before
    follow(copy, model)
    ids = torch.ones(1, 3, dtype=torch.long, device="meta")
    assert len(copy(input_ids=ids, output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize("name", OTHERS)
def test_another_module_is_refused(name: str) -> None:
    model = Net()
    known = modules_of(model)
    refuse_others(model, known)
    OTHERS[name](model)
    with pytest.raises(UserError, match=REFUSED):
        refuse_others(model, known)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_other_layouts(name: str) -> None:
    _is_right(_run({name: SLOW[name]}, 4 if "four" in name else 2)[name])
