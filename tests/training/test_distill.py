"""Learning from a teacher: runs on one process and two beside transformers and formulas written out."""

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import pytest

from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import DistillPlan, LoraPlan
from tangram.training.data import prepare, tokens_of
from tangram.training.run.launch import run_ranks
from tangram.training.state.build_model import source_of
from tests.training.taught import PADDED, Mistake, oracle, write_taught
from tests.training.tuning_tasks import Traced, run_in_turn

Key = tuple[str, str]
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "ddp": Strategy("DDP", "dp=2", ("dp",)),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
}
SET = {
    "data.sequence": "96", "data.global_batch": "6", "data.micro_batch": "6",
    "optimiser.schedule": "constant", "optimiser.lr": "1e-3", "optimiser.weight_decay": "0.0",
}  # fmt: skip
LORA = LoraPlan(rank=4, alpha=16.0)
JOBS: Mapping[str, dict[str, Any]] = {
    "forward": {"alpha": 0.25, "temperature": 2.0},
    "reverse": {"loss_type": "reverse_kl", "alpha": 0.0},
    "jsd": {"loss_type": "jsd", "beta": 0.2, "temperature": 1.5},
    "padded": {"temperature": 2.0},
}
SOME: Mapping[str, tuple[str, ...]] = {
    "forward": ("one", "fsdp", "tp", "pp"), "reverse": ("one", "ddp", "tp"), "jsd": ("one", "fsdp", "tp"),
    "padded": ("one", "fsdp", "tp", "pp"),
}  # fmt: skip
STEPS, HALF = 4, 2


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, Plan]:
    """By what is learnt and how: of a rank that has 3 samples, two go through at once, then one."""
    folders = {padded: write_taught(tmp_path_factory.mktemp("taught"), padded=padded) for padded in (0, PADDED)}
    found: dict[Key, Plan] = {}
    for job, keys in JOBS.items():
        folder = folders[PADDED if job == "padded" else 0]
        asked = load(folder / "distill.toml", {**SET, "data.cache": str(folder / "cache")})
        prepare(asked.data, tokens_of(asked), lambda event: None)
        distill = DistillPlan(teacher=str(folder / "teacher"), **keys)
        asked = asked.model_copy(update={"distill": distill, "lora": LORA if job == "forward" else None})
        counted = Counted(asked, source_of(asked, tokens_of(asked)).config)
        for way in SOME[job]:
            found[job, way] = plan_of(WAYS[way], asked, counted, 6 if way == "one" else 2)
    found["forward", "half"], found["forward", "rest"] = found["forward", "tp"], found["forward", "fsdp"]
    found["reverse", "half"], found["reverse", "rest"] = found["reverse", "ddp"], found["reverse", "one"]
    return {
        key: plan.model_copy(update={"run": plan.run.model_copy(update={"steps": HALF if key[1] == "half" else STEPS})})
        for key, plan in found.items()
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, plans: dict[Key, Plan]) -> dict[Key, list[Traced]]:
    """What all ranks have measured, each number of ranks started once."""
    after = {(job, "rest"): (job, "half") for job in ("forward", "reverse")}
    folder = tmp_path_factory.mktemp("runs")
    found: dict[Key, list[Traced]] = {}
    for ranks in (2, 1):
        work = {key: plan for key, plan in plans.items() if plan.ranks == ranks}
        done: list[dict[Key, Traced]] = run_ranks(
            run_in_turn, (work, folder, after), world=ranks, on_event=print, device="cpu"
        )
        found |= {key: [rank[key] for rank in done] for key in work}
    return found


@pytest.mark.parametrize("job", JOBS)
def test_losses_and_gradients_are_those_of_formulas_on_any_mesh(
    plans: dict[Key, Plan], ran: dict[Key, list[Traced]], job: str
) -> None:
    expected = oracle(plans[job, "one"])
    assert expected.losses[-1] < expected.losses[0]
    for way in [way for way in WAYS if (job, way) in ran]:
        ranks = ran[job, way]
        for rank in ranks:
            assert rank.losses == pytest.approx(expected.losses, rel=1e-6 if way == "one" else 1e-5), way
        assert ranks[0].norms == pytest.approx(expected.norms, rel=1e-4), way
        gradients = {name: value for rank in ranks for name, value in rank.gradients.items()}
        assert gradients.keys() == expected.gradients.keys(), way
        for name, value in expected.gradients.items():
            furthest = float(np.abs(gradients[name] - value).max())
            assert furthest <= 1e-6 + 1e-5 * float(np.abs(value).max()), (way, name, furthest)
    if (job, "rest") in ran:  # on another mesh, with the same teacher
        assert ran[job, "rest"][0].losses == pytest.approx(expected.losses[HALF:], rel=1e-5)


@pytest.mark.parametrize("mistake", [m for m in get_args(Mistake) if m])
def test_mistakes_are_seen(plans: dict[Key, Plan], ran: dict[Key, list[Traced]], mistake: Mistake) -> None:
    job = "padded" if mistake == "padding counted" else "forward"
    wrong = oracle(plans[job, "one"], mistake)
    assert ran[job, "one"][0].losses[0] != pytest.approx(wrong.losses[0], rel=1e-4)
