"""What people run with TRL's defaults, and here: packing, prompts with completions, accumulation, cut pairs, references
that are computed before, all parameters, a teacher. Losses, and every gradient of the first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import plan_of
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import DistillPlan
from tangram.training.data import open_corpus, prepare, tokens_of
from tangram.training.state.build_model import source_of
from tests.interop.test_trl import ALONE, SET, ran, rows_in_order, settings
from tests.training.chat import write_chat
from tests.training.data.test_chat import CHATML, tokenizer_of
from tests.training.pairs import write_pairs
from tests.training.taught import write_taught
from tests.training.tuning_tasks import Traced, begin_as, write_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # of accelerators that are not here, and of what TRL will change
STEPS = 6
LORA = {"lora.rank": "4", "lora.alpha": "16.0"}


def turns(n: int) -> list[dict[str, str]]:
    said = [f"{n} + {n}?", f"that is {2 * n}" + "!" * (n % 7), "Sure?" + "?" * (n % 3), "yes" * (1 + n % 4)]
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]


def planned(folder: Path, file: str, more: Mapping[str, str], distill: DistillPlan | None = None) -> Plan:
    job = load(folder / file, {**SET, "run.steps": str(STEPS), "data.cache": str(folder / "cache"), **more})
    job = job.model_copy(update={"distill": distill}) if distill else job
    prepare(job.data, tokens_of(job), lambda event: None)
    return plan_of(ALONE, job, Counted(job, source_of(job, tokens_of(job)).config))


def assert_as_trl(trainer: type[Any], plan: Plan, config: Any, rows: Sequence[Any], folder: Path) -> None:
    """A trainer of TRL that begins with the job's adapters and takes these rows in order learns the same."""
    from datasets import Dataset
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler

    first: dict[str, torch.Tensor] = {}

    class InOrder(trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

        def _clip_grad_norm(self, model: Any) -> Any:
            named = () if first else ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            first.update({name.removeprefix("base_model.model."): grad.clone() for name, grad in named})
            return super()._clip_grad_norm(model)

    model, lora = AutoModelForCausalLM.from_pretrained(folder / "chat-model", dtype=torch.float32), plan.lora
    peft = lora and LoraConfig(
        r=lora.rank, lora_alpha=int(lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM"
    )
    made = InOrder(
        model=model, args=config, train_dataset=Dataset.from_list(list(rows)), peft_config=peft,
        processing_class=AutoTokenizer.from_pretrained(folder / "chat-model"),
    )  # fmt: skip
    if lora:
        begin_as(made.model, plan)
    own: Traced = ran(plan, folder)
    made.train()
    theirs = [one for one in made.state.log_history if "loss" in one]
    assert len(theirs) == STEPS
    assert own.losses == pytest.approx([one["loss"] for one in theirs], rel=1e-6)
    assert own.norms == pytest.approx([one["grad_norm"] for one in theirs], rel=1e-5)
    assert own.gradients.keys() == first.keys()
    for name, grad in first.items():
        torch.testing.assert_close(torch.from_numpy(own.gradients[name]), grad, rtol=1e-4, atol=1e-7)


ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
TUNED: Mapping[str, tuple[Callable[[int], dict[str, Any]], dict[str, str], dict[str, Any]]] = {
    "messages, accumulated": (
        lambda n: {"messages": turns(n)}, {"data.micro_batch": "2"}, {"assistant_only_loss": True, **ACCUMULATED},
    ),
    "a prompt with answers": (lambda n: {"prompt": turns(n)[:3], "completion": turns(n)[3:]}, {}, {}),
    "texts": (lambda n: {"prompt": turns(n)[0]["content"] + " ", "completion": turns(n)[1]["content"]}, {}, {}),
    "text": (lambda n: {"text": turns(n)[1]["content"]}, {}, {}),
    "cut": (lambda n: {"messages": turns(n)}, {"data.sequence": "50"}, {"assistant_only_loss": True}),
}  # fmt: skip
"""Rows, keys of the job and of TRL."""


@pytest.mark.parametrize("case", TUNED)
def test_rows_are_learnt_as_by_trl(tmp_path: Path, case: str) -> None:
    trl: Any = pytest.importorskip("trl")
    row, own, theirs = TUNED[case]
    folder = write_folder(tmp_path)
    (folder / "rows" / "a.jsonl").write_text("\n".join(json.dumps(row(n)) for n in range(40)))
    plan = planned(folder, "sft.toml", {**LORA, **own})
    config = trl.SFTConfig(**{**settings(plan, folder / "theirs"), **theirs})
    assert_as_trl(trl.SFTTrainer, plan, config, rows_in_order(plan, "a.jsonl"), folder)


def test_packed_conversations_are_learnt_as_by_trl(tmp_path: Path) -> None:
    """All of them in each step: which are put together may differ, what is learnt of them may not."""
    trl: Any = pytest.importorskip("trl")
    folder = write_folder(tmp_path)
    rows = [{"messages": turns(n)} for n in range(40)]
    (folder / "rows" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = {**LORA, "data.sequence": "256", "data.packing": "best-fit"}
    plan = planned(folder, "sft.toml", keys)
    windows = open_corpus(plan.data, tokens_of(plan)).training[0].windows(256)
    assert windows < 20
    plan = planned(folder, "sft.toml", {**keys, "data.global_batch": str(windows)})
    theirs = {"packing": True, "assistant_only_loss": True}
    assert_as_trl(trl.SFTTrainer, plan, trl.SFTConfig(**settings(plan, folder / "theirs"), **theirs), rows, folder)


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 64, "n_positions": 128}
NO_DROPOUT = {f"model.change.{name}_pdrop": "0.0" for name in ("attn", "embd", "resid")}
PAIRS: Mapping[str, tuple[dict[str, str], dict[str, Any]]] = {
    "cut": ({**LORA, "data.sequence": "58"}, {}),
    "a reference before": (LORA, {"precompute_ref_log_probs": True}),
    "accumulated": ({**LORA, "data.micro_batch": "2"}, ACCUMULATED),
    "all parameters": ({}, {}),
    "without dropout": (NO_DROPOUT, {}),
}


@pytest.mark.parametrize("case", PAIRS)
def test_pairs_are_learnt_as_by_trl(tmp_path: Path, case: str) -> None:
    trl: Any = pytest.importorskip("trl")
    own, theirs = PAIRS[case]
    folder = write_pairs(tmp_path)
    if own is NO_DROPOUT:  # which TRL turns off
        shutil.rmtree(folder / "chat-model")
        model = write_chat(folder / "chat-model", family="gpt2", fields={"vocab_size": 260, **GPT2})
        tokenizer_of(model)
        (model / "chat_template.jinja").write_text(CHATML)
    plan = planned(folder, "dpo.toml", own)
    config = trl.DPOConfig(**{**settings(plan, folder / "theirs"), **theirs})
    assert_as_trl(trl.DPOTrainer, plan, config, rows_in_order(plan, "a.jsonl"), folder)


@pytest.mark.parametrize(("loss", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.5)])
def test_a_teacher_is_learnt_from_as_by_trl(tmp_path: Path, loss: Any, beta: float) -> None:
    """On the data that is there: TRL's `lmbda` 0."""
    gkd: Any = pytest.importorskip("trl.experimental.gkd")
    folder = write_taught(tmp_path)
    (folder / "rows" / "a.jsonl").write_text("\n".join(json.dumps({"messages": turns(n)[:2]}) for n in range(40)))
    distill = DistillPlan(teacher=str(folder / "teacher"), loss_type=loss, alpha=0.0)
    plan = planned(folder, "distill.toml", {}, distill)

    class Taught(gkd.GKDTrainer):
        def __init__(self, **given: Any) -> None:
            super().__init__(teacher_model=str(folder / "teacher"), **given)

    theirs = {"lmbda": 0.0, "beta": beta, "teacher_model_init_kwargs": {"dtype": "float32"}}
    config = gkd.GKDConfig(**settings(plan, folder / "theirs"), **theirs)
    assert_as_trl(Taught, plan, config, rows_in_order(plan, "a.jsonl"), folder)
