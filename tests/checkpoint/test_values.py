"""What a state has beside tensors comes back as it was: its types, its keys, what has a state_dict of its own."""

import json
import random
import warnings
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving.save import save
from tangram.checkpoint.state.values import TYPE, from_json, tensors_in, to_json
from tangram.errors import UserError
from tests.ranks import start

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)
KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers()) | st.just(TYPE)
VALUES = st.recursive(
    SCALARS | st.complex_numbers() | st.sampled_from([torch.float32, torch.Size([2, 3]), torch.device("cpu")]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.lists(SCALARS, max_size=3).map(lambda items: deque(items, 5))
        | st.frozensets(st.integers() | st.text(max_size=2), max_size=1)  # of more the order is open
        | st.sets(st.integers(), max_size=1)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    stored = json.loads(json.dumps(to_json("x", value, {})))
    assert repr(from_json(stored, lambda name: name)) == repr(value)


def test_sets_come_back() -> None:
    value = [{1, "a", (2, None)}, frozenset(range(9))]
    assert from_json(to_json("x", value, {}), lambda name: name) == value


def again(folder: Path, value: Any, there: Any = None) -> Any:
    """A value after it was saved, and loaded into a table that has another."""
    save({"x": {"v": value}}, folder / "a")
    table = {"v": there}
    load({"x": table}, folder / "a")
    return table["v"]


def test_states_of_generators_are_taken_back(tmp_path: Path) -> None:
    def three() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    before = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    save({"rng": before}, tmp_path / "a")
    drawn = three()
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    load({"rng": found}, tmp_path / "a")
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    assert three() == drawn


def test_tensors_in_lists_are_stored_as_tensors_and_as_many_as_there_were(tmp_path: Path) -> None:
    value = {"history": [torch.ones(2), (torch.zeros(3, dtype=torch.bfloat16), 1)], "array": (np.arange(3), "a")}
    there = {"history": [torch.zeros(5)], "array": None}
    found = again(tmp_path, value, there)
    assert found["history"][0].equal(torch.ones(2))
    assert found["history"][1][0].equal(torch.zeros(3, dtype=torch.bfloat16))
    assert found["history"][1][1] == 1
    assert np.array_equal(found["array"][0], np.arange(3))
    assert found["array"][1] == "a"


def test_what_cannot_come_back_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value, words in (
        (Decimal("1.5"), "x.v is a Decimal"),
        (np.array(["a"]), "x.v is an array of <U1: a checkpoint has arrays of numbers"),
        (endless, "x.v has tables or lists that are in each other without end"),
        ([nn.Linear(1, 1)], "x.v.0 is a Linear: give it a section of its own"),
        ({"a.b": [torch.ones(1)], "a": {"b": [torch.ones(2)]}}, "two parts of the state are called x.v.a.b.0"),
    ):
        with pytest.raises(UserError, match=words):
            save({"x": {"v": value}}, tmp_path / "a")
    with pytest.raises(UserError, match=r"two parts of the state are called x\.a\.b"):
        save({"x": {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}}, tmp_path / "a")


# ---------------------------------------------------------------- what has a state of its own


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [2])], milestones=[4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def optimiser() -> Optimizer:
    return SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)


def rates(optimiser: Optimizer, scheduler: Any, steps: int) -> list[float]:
    found: list[float] = []
    for _ in range(steps):
        optimiser.step()
        scheduler.step()
        found.append(optimiser.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    one = optimiser()
    scheduler = SCHEDULERS[name](one)
    rates(one, scheduler, 3)
    groups = one.param_groups[0]
    known = {key: value for key, value in groups.items() if key != "params"}
    # as an object, or as its state_dict in a table: torch's own way; a Counter's keys are numbers
    save({"scheduler": scheduler, "job": {"state": scheduler.state_dict(), "nested": scheduler}}, tmp_path / "a")
    expected = rates(one, scheduler, 6)
    for how in ("object", "table", "nested"):
        other = optimiser()
        fresh = SCHEDULERS[name](other)
        job: dict[str, Any] = {"state": None, "nested": fresh if how == "nested" else None}
        load({"job": job} if how != "object" else {"scheduler": fresh}, tmp_path / "a")
        if how == "table":
            fresh.load_state_dict(job["state"])
        other.param_groups[0].update(known)
        assert rates(other, fresh, 6) == expected, how


def test_lbfgs_goes_on(tmp_path: Path) -> None:
    def run(model: nn.Module, optimiser: Optimizer, steps: int) -> None:
        def loss() -> Tensor:
            optimiser.zero_grad()
            value = (model(torch.arange(12.0).reshape(3, 4)) - 1).square().sum()
            value.backward()
            return value

        for _ in range(steps):
            optimiser.step(loss)

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optim = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    run(model, optim, 3)
    save({"model": model, "optim": optim}, tmp_path / "a")
    run(model, optim, 2)
    other = nn.Linear(4, 2)
    second = torch.optim.LBFGS(other.parameters(), lr=0.01, max_iter=3)
    with pytest.raises(UserError, match="take one before you load"):
        load({"model": other, "optim": second}, tmp_path / "a")
    run(other, second, 1)
    load({"model": other, "optim": second}, tmp_path / "a")
    run(other, second, 2)
    assert other.weight.equal(model.weight)


class App:
    """As in the tutorial of torch's DCP."""

    def __init__(self, model: nn.Module, optim: Optimizer) -> None:
        self.model, self.optim = model, optim

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optim, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def trained(seed: int, steps: int) -> App:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if dist.is_initialized():
        fully_shard(model)
    optim = AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(2, 5)).sum().backward()
        optim.step()
        optim.zero_grad()
    return App(model, optim)


def on_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    own = {f"rank{rank}": torch.get_rng_state(), "loss": float(rank), "nan": float("nan")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save({"app": trained(0, 2), "own": own}, f"{folder}/two")
    other = trained(1, 0)
    load({"app": other}, f"{folder}/two")
    words = [str(one.message) for one in caught if "ranks differ" in str(one.message)]
    Path(f"{folder}/{rank}").write_text(json.dumps([numbers(other), words]))
    dist.destroy_process_group()


def numbers(app: App) -> list[float]:
    found = [*app.model.parameters(), *(state["exp_avg"] for state in app.optim.state.values())]
    return [x for one in found for x in (one.full_tensor() if isinstance(one, DTensor) else one).flatten().tolist()]


def test_an_application_as_torch_s_dcp_has_it_is_loaded_on_other_ranks(tmp_path: Path) -> None:
    start(on_ranks, str(tmp_path), ranks=2)
    alone, expected = trained(1, 0), numbers(trained(0, 2))
    load({"app": alone}, tmp_path / "two")
    by_rank = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for found in (numbers(alone), by_rank[0][0], by_rank[1][0]):
        assert found == pytest.approx(expected, rel=1e-6)
    said = by_rank[0][1] + by_rank[1][1]  # by whoever commits, once
    assert [words.partition(",")[0] for words in said] == ["own.loss: ranks differ"]


def test_a_stored_value_refers_to_its_tensors() -> None:
    tensors: dict[str, Any] = {}
    stored = to_json("x", {"a": [torch.ones(1), {2: torch.ones(2)}]}, tensors)
    assert list(tensors_in(stored)) == list(tensors) == ["x.a.0", "x.a.1.2"]
