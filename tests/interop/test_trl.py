"""TRL itself as the oracle of fine-tuning: its trainers on the samples of a job, in the job's order, on one process.

`make interop` brings TRL and runs this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tangram.kernels.divergence import FORMULAS, Comparison, divergence
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import Strategy, plan_of
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, prepare, sample_ids, tokens_of
from tangram.training.data.samples import best_fit
from tangram.training.state.build_model import source_of
from tests.training.pairs import write_pairs
from tests.training.tuning_tasks import Traced, begin_as, run_each, write_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # of accelerators that are not here, and of what TRL will change

ALONE = Strategy("one process", "dp=1", ("dp",), shard="dp")
SET = {"data.sequence": "96", "data.global_batch": "8", "optimiser.schedule": "constant", "optimiser.lr": "1e-3"}


def planned(folder: Path, file: str = "sft.toml", **more: str) -> Plan:
    asked = load(folder / file, {**SET, "lora.alpha": "16.0", "data.cache": str(folder / "cache"), **more})
    prepare(asked.data, tokens_of(asked), lambda event: None)
    return plan_of(ALONE, asked, Counted(asked, source_of(asked, tokens_of(asked)).config))


def ran(plan: Plan, folder: Path) -> Traced:
    """What a job does, on a rank of its own."""
    return run_each({("trl", "one"): plan}, folder / "runs")["trl", "one"][0]


def rows_in_order(plan: Plan, file: str) -> list[Any]:
    """The rows of all steps, one after the other."""
    rows = [json.loads(line) for line in (Path(plan.data.sources[0].path) / file).read_text().splitlines()]
    count = plan.run.steps * plan.data.global_batch
    return [
        rows[window]
        for _, window in sample_ids(open_corpus(plan.data, tokens_of(plan)), plan.data, plan.seed, 0, count)
    ]


def settings(plan: Plan, folder: Path) -> dict[str, Any]:
    """What both of TRL's configurations take."""
    o = plan.optimiser
    return {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [],
        "per_device_train_batch_size": plan.data.global_batch, "max_steps": plan.run.steps, "logging_steps": 1,
        "learning_rate": o.lr, "lr_scheduler_type": "constant", "adam_beta1": o.betas[0], "adam_beta2": o.betas[1],
        "adam_epsilon": o.eps, "weight_decay": 0.0, "max_grad_norm": o.clip_norm, "save_strategy": "no",
        "max_length": plan.data.sequence, "disable_tqdm": True,
    }  # fmt: skip


def trained(trainer: type[Any], plan: Plan, config: Any, rows: Sequence[Any], folder: Path) -> list[float]:
    """The losses of a trainer of TRL that begins with the job's adapters and takes these rows in order."""
    return [one["loss"] for one in logged(trainer, plan, config, rows, folder)]


def logged(trainer: type[Any], plan: Plan, config: Any, rows: Sequence[Any], folder: Path) -> list[dict[str, float]]:
    """What it says of each step."""
    from datasets import Dataset
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler

    class InOrder(trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    lora = plan.lora
    assert lora is not None
    model = AutoModelForCausalLM.from_pretrained(folder / "chat-model", dtype=torch.float32)
    made = InOrder(
        model=model, args=config, train_dataset=Dataset.from_list(list(rows)),
        processing_class=AutoTokenizer.from_pretrained(folder / "chat-model"),
        peft_config=LoraConfig(
            r=lora.rank, lora_alpha=int(lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )  # fmt: skip
    begin_as(made.model, plan)
    made.train()
    return [one for one in made.state.log_history if "loss" in one]


def test_samples_are_as_few_as_those_of_trl() -> None:
    trl: Any = pytest.importorskip("trl")
    from datasets import Dataset

    sizes = np.minimum(np.random.default_rng(0).lognormal(5.0, 1.0, 3000).astype(np.int64) + 2, 1024)
    theirs = trl.pack_dataset(Dataset.from_dict({"input_ids": [[0] * n for n in sizes.tolist()]}), 1024, "bfd")
    assert abs(len(best_fit(sizes, 1024).first_W) - 1 - len(theirs)) <= 1


def test_a_chat_model_is_tuned_as_by_trl(tmp_path: Path) -> None:
    trl: Any = pytest.importorskip("trl")
    folder = write_folder(tmp_path)
    plan = planned(folder)
    own = ran(plan, folder)
    rows = rows_in_order(plan, "a.jsonl")
    config = trl.SFTConfig(assistant_only_loss=True, **settings(plan, folder / "theirs"))
    theirs = trained(trl.SFTTrainer, plan, config, rows, folder)
    assert len(theirs) == plan.run.steps == 30
    assert own.losses == pytest.approx(theirs, rel=1e-6)
    assert own.losses[-1] < own.losses[0] - 0.1
    every = trl.SFTConfig(assistant_only_loss=False, **settings(plan, folder / "theirs"))
    assert trained(trl.SFTTrainer, plan, every, rows, folder)[:3] != pytest.approx(own.losses[:3], rel=1e-3)


PREFERENCES: Mapping[str, dict[str, str]] = {
    "sigmoid": {}, "ipo": {}, "hinge": {}, "robust": {"label_smoothing": "0.1"}, "sigmoid_norm": {}, "apo_zero": {},
    "apo_down": {}, "simpo": {"beta": "2.0"}, "orpo": {},
    "kto": {"desirable_weight": "1.5", "undesirable_weight": "0.75"},
}  # fmt: skip


@pytest.mark.parametrize("loss", PREFERENCES)
def test_preferences_are_learnt_as_by_trl(tmp_path: Path, loss: str) -> None:
    """30 steps of DPO, a few of the others: losses, the norm of each gradient, and the rewards that people watch."""
    trl: Any = pytest.importorskip("trl")
    # These two of TRL's trainers put an end behind every answer, which templates do not, so they are given texts.
    folder = write_pairs(tmp_path, "texts" if loss in ("simpo", "orpo") else "pairs")
    own = {"beta": "0.1", **PREFERENCES[loss]}
    asked = {f"preference.{key}": value for key, value in {"loss_type": loss, **own}.items()}
    steps = "30" if loss in ("sigmoid", "kto") else "4"
    plan = planned(
        folder, f"{'kto' if loss == 'kto' else 'dpo'}.toml", **asked, **{"lora.rank": "4", "run.steps": steps}
    )
    mine = ran(plan, folder)
    rows, same = rows_in_order(plan, "a.jsonl"), settings(plan, folder / "theirs")
    numbers = {key: float(value) for key, value in own.items()}
    if loss in ("simpo", "orpo"):
        simpo = {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5} if loss == "simpo" else {}
        cpo, orpo = (pytest.importorskip(f"trl.experimental.{name}") for name in ("cpo", "orpo"))
        kind, config = (cpo.CPOTrainer, cpo.CPOConfig) if simpo else (orpo.ORPOTrainer, orpo.ORPOConfig)
        theirs = logged(kind, plan, config(**same, **numbers, **simpo), rows, folder)
    elif loss == "kto":
        theirs = logged(trl.KTOTrainer, plan, trl.KTOConfig(loss_type=loss, **same, **numbers), rows, folder)
        assert max(one["kl"] for one in theirs) > 1e-3
        assert mine.figures["kl"] == pytest.approx([one["kl"] for one in theirs], rel=1e-4, abs=1e-6)
    else:
        theirs = logged(trl.DPOTrainer, plan, trl.DPOConfig(loss_type=[loss], **same, **numbers), rows, folder)
    assert len(theirs) == plan.run.steps
    assert mine.losses == pytest.approx([one["loss"] for one in theirs], rel=1e-6)
    assert mine.norms == pytest.approx([one["grad_norm"] for one in theirs], rel=1e-5)
    for key, values in mine.figures.items():
        if key.startswith("rewards/"):
            assert values == pytest.approx([one[key] for one in theirs], rel=1e-4, abs=3e-6), key


@pytest.mark.parametrize(("loss", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_divergences_from_a_teacher_are_those_of_trl(loss: str, beta: float, temperature: float) -> None:
    gkd: Any = pytest.importorskip("trl.experimental.gkd")
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 9, 19, requires_grad=True), torch.randn(2, 9, 19)
    labels = torch.randint(0, 19, (2, 9))
    labels[0, :4] = -100
    theirs = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, temperature)
    how = Comparison(FORMULAS[loss], beta if loss == "jsd" else 0.5, temperature, 19)
    counted = labels.flatten() != -100
    own = divergence(student.flatten(0, 1), teacher.flatten(0, 1), counted, how).sum() / counted.sum()
    assert own.item() == pytest.approx(theirs.item(), rel=1e-6)
    slopes = [torch.autograd.grad(one, student)[0] for one in (own, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-7)
