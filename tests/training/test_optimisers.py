"""Optimisers of a job: torch's own on one process, the same on any mesh, saved and gone on from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tangram.planner.local.estimate import estimate
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, ModelAxis, Strategy, plan_of
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, sample_ids, tokens_of
from tests.training.tuning_tasks import VOCABULARY, Traced, conversations, counted_for, loss_of, run_each, write_folder

STEPS, HALF = 8, 4
SET = {
    "data.sequence": "64", "data.global_batch": "4", "optimiser.schedule": "constant", "optimiser.weight_decay": "0.1",
    "run.steps": str(STEPS),
}  # fmt: skip
CASES: Mapping[str, Mapping[str, str]] = {
    "sgd": {"optimiser.name": '"sgd"', "optimiser.lr": "0.1"},
    "momentum": {"optimiser.name": '"sgd"', "optimiser.lr": "0.03", "optimiser.momentum": "0.9"},
    "adafactor": {"optimiser.name": '"adafactor"', "optimiser.lr": "0.02"},
    "muon": {"optimiser.name": '"muon"', "optimiser.lr": "3e-3"},
    "rates": {"optimiser.lr": "3e-3", "optimiser.lr_of": '{"*embed*" = 1e-2, "*.mlp.*" = 1e-3}'},
}
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "ddp": Strategy("copies", "dp=2", ("dp",)),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
    "ep": Strategy("experts", "ep=2", (), (ModelAxis("ep", "expert", "sequence"),)),
    "fsdp x tp": Strategy("FSDP x TP", "dp=2 tp=2", ("dp",), (TENSOR,), "dp"),
    "fsdp of 3": Strategy("FSDP", "dp=3", ("dp",), shard="dp"),
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EVERY = ("one", "fsdp", "ddp", "tp", "pp")
ON: Mapping[str, tuple[str, ...]] = {
    "sgd": ("one", "fsdp"), "momentum": ("one", "fsdp"), "adafactor": EVERY, "muon": EVERY, "rates": ("one", "pp"),
}  # fmt: skip
RESUMED = {
    (f"{case} resumed", way): (f"{case} half", "fsdp") for case in ("adafactor", "muon", "sgd") for way in ("tp", "one")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimisers")
    for name, family in (("dense", "qwen3"), ("moe", "qwen3_moe")):
        (folder / name).mkdir()
        write_folder(
            folder / name, family=family, fields={"vocab_size": VOCABULARY - 1, **(MOE if name == "moe" else {})}
        )
        job = folder / name / "sft.toml"
        job.write_text(job.read_text().replace("lora.rank = 4\n", ""))
    return folder


def changes(folder: Path, case: str, kind: str = "dense", **more: str) -> dict[str, str]:
    return {**SET, **CASES[case.partition(" ")[0]], "data.cache": str(folder / kind / "cache"), **more}


def counted(folder: Path, kind: str) -> Counted:
    return counted_for(load(folder / kind / "sft.toml", changes(folder, "sgd", kind)))


def planned(folder: Path, case: str, way: str, kind: str = "dense", **more: str) -> Plan:
    asked = load(folder / kind / "sft.toml", changes(folder, case, kind, **more))
    plan = plan_of(WAYS[way], asked, counted(folder, kind), 2)
    steps = HALF if case.endswith(" half") else STEPS
    return plan.model_copy(update={"run": plan.run.model_copy(update={"steps": steps})})


def run_all(
    folder: Path,
    plans: Mapping[tuple[str, str], Plan],
    name: str = "runs",
    resumed: Mapping[tuple[str, str], tuple[str, str]] = RESUMED,
) -> dict[tuple[str, str], Traced]:
    """Of the first rank."""
    return {key: ranks[0] for key, ranks in run_each(plans, folder / name, resumed).items()}


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[tuple[str, str], Traced]:
    plans = {(case, way): planned(folder, case, way) for case, ways in ON.items() for way in ways}
    plans |= {
        (f"{case} half", "fsdp"): planned(folder, f"{case} half", "fsdp") for case in ("adafactor", "muon", "sgd")
    }
    plans |= {key: planned(folder, *key) for key in RESUMED}
    return run_all(folder, plans)


# ---------------------------------------------------------------- one process


def _halves(model: nn.Module, some: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Groups with and without decay of the parameters that are asked for."""
    named = [(name, p) for name, p in model.named_parameters() if some(name)]
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    def hidden(name: str) -> bool:
        return ".layers." in name and "norm" not in name

    muon = [p for name, p in model.named_parameters() if hidden(name)]
    return [
        torch.optim.Muon(muon, lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(_halves(model, lambda name: not hidden(name)), lr=3e-3, betas=(0.9, 0.999)),
    ]


def _rate(name: str) -> float:
    return 1e-2 if "embed" in name else 1e-3 if ".mlp." in name else 3e-3


def _rates(model: nn.Module) -> list[torch.optim.Optimizer]:
    rates = (1e-2, 1e-3, 3e-3)
    groups = [{**g, "lr": lr} for lr in rates for g in _halves(model, lambda name, lr=lr: _rate(name) == lr)]
    return [torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.999))]


ORACLES: Mapping[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "sgd": lambda model: [torch.optim.SGD(_halves(model, bool), lr=0.1)],
    "momentum": lambda model: [torch.optim.SGD(_halves(model, bool), lr=0.03, momentum=0.9)],
    "adafactor": lambda model: [torch.optim.Adafactor(_halves(model, bool), lr=0.02)],
    "muon": _muon,
    "rates": _rates,
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_has_the_losses_of_torch(folder: Path, ran: dict[tuple[str, str], Traced], case: str) -> None:
    plan = planned(folder, case, "one")
    path = Path(str(plan.model.path))
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimisers, rows, losses = ORACLES[case](model), conversations(plan, path), list[float]()
    size = plan.data.global_batch
    order = sample_ids(open_corpus(plan.data, tokens_of(plan)), plan.data, plan.seed, 0, STEPS * size)
    model.train()
    for step in range(STEPS):
        loss = loss_of(model, [rows[window] for _, window in order[step * size :][:size]])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.optimiser.clip_norm)
        for optimiser in optimisers:
            optimiser.step()
        losses.append(float(loss.detach()))
    found = ran[case, "one"].losses
    # Muon's five products in bfloat16 make more of the last digits of a gradient that is added up in another order.
    assert found == pytest.approx(losses, rel=2e-5 if case == "muon" else 1e-6)
    assert found[-1] < found[0] - 0.3


# ---------------------------------------------------------------- ranks


def test_any_mesh_has_the_losses_of_one_process(ran: dict[tuple[str, str], Traced]) -> None:
    for (case, way), found in ran.items():
        if case in CASES:
            near = 2e-5 if case == "muon" else 1e-5  # as above; how bfloat16 is multiplied differs by CPU, too
            assert found.losses == pytest.approx(ran[case, "one"].losses, rel=near), (case, way)


def test_it_goes_on_elsewhere(ran: dict[tuple[str, str], Traced]) -> None:
    for case, way in RESUMED:
        whole = ran[case.partition(" ")[0], "one"].losses
        near = 2e-5 if case.startswith("muon") else 1e-5
        assert ran[case, way].losses == pytest.approx(whole[HALF:], rel=near), (case, way)


@pytest.mark.parametrize("case", ["adafactor", "muon"])
def test_experts_have_the_losses_of_one_process(folder: Path, case: str) -> None:
    plans = {(f"{case} moe", way): planned(folder, case, way, "moe") for way in ("one", "fsdp", "ep")}
    found = run_all(folder, plans)
    near = 2e-5 if case == "muon" else 1e-5  # of the last digits of bfloat16, as above
    for key, one in found.items():
        assert one.losses == pytest.approx(found[f"{case} moe", "one"].losses, rel=near), key


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp x tp", "fsdp of 3"])
def test_more_ranks_have_the_losses_of_one_process(folder: Path, ran: dict[tuple[str, str], Traced], way: str) -> None:
    found = run_all(folder, {(case, way): planned(folder, case, way) for case in CASES}, "more")
    for (case, _), one in found.items():
        near = 3e-5 if case == "muon" else 1e-5
        assert one.losses == pytest.approx(ran[case, "one"].losses, rel=near), case


def test_what_is_kept_is_what_is_predicted(folder: Path, ran: dict[tuple[str, str], Traced]) -> None:
    from tangram.hardware.measuring.rates import rates

    for case in CASES:
        for way in {"one", "fsdp", "tp"} & {*ON[case]}:
            plan, costs = planned(folder, case, way), counted(folder, "dense").costs(2)
            memory = estimate(plan, costs, costs, rates()).memory
            assert ran[case, way].kept_bytes == pytest.approx(memory.parameters + memory.optimiser, rel=0.02), (
                case,
                way,
            )
