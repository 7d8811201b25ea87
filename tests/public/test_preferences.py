"""Public reports about learning from preferences and from a teacher, each with its input rebuilt small."""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tangram.planner.local.strategies import TENSOR, Strategy
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.training.data import IGNORE, held_out_batches, open_corpus, tokens_of
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import RankJob, begin
from tangram.training.step import loop
from tangram.training.step.evaluate import held_out
from tests.training import taught
from tests.training.pairs import oracle, write_pairs
from tests.training.tuning_tasks import Fenced, assert_as_expected, planned_by, run_each

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
WAYS = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"), "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
}  # fmt: skip
SET = {
    "data.sequence": "64", "data.global_batch": "6", "optimiser.schedule": "constant", "optimiser.lr": "1e-2",
    "run.steps": "3",
}  # fmt: skip


def planned(folder: Path, way: str, file: str = "dpo.toml", micro: int = 6, **more: str) -> Plan:
    asked = load(folder / file, {**SET, "data.cache": str(folder / "cache"), **more})
    return planned_by(WAYS[way], asked, micro)


@pytest.mark.parametrize("kind", ["modules_to_save", "trainable_token_indices"])
def test_what_is_trained_beside_adapters_is_not_in_the_reference(tmp_path: Path, kind: str) -> None:
    """unslothai/unsloth-zoo#830: adapters were left out of the reference, and a head that is trained was not."""
    folder = write_pairs(tmp_path)
    some = {"lora.rank": "4", f"lora.{kind}": '["lm_head"]' if kind == "modules_to_save" else "[65, 104, 257]"}
    plans = {(kind, way): planned(folder, way, **some) for way in WAYS}
    expected = oracle(plans[kind, "one"])
    for (_, way), ranks in run_each(plans, folder / "runs").items():
        assert_as_expected(ranks, expected, way, 3)
    follows = oracle(plans[kind, "one"], "reference follows")
    assert follows.losses[1:] != pytest.approx(expected.losses[1:], rel=1e-3)


def _after_training(rank: Rank, work: tuple[Plan, Path]) -> tuple[dict[str, float], dict[str, Any], Any]:
    """The figures of held-out pairs after some steps, the parameters then, and these pairs."""
    plan, folder = work
    corpus = open_corpus(plan.data, tokens_of(plan))
    begun = begin(rank, RankJob(plan, folder, corpus.digest, loop.StepCosts(), None))
    hooks = loop.Hooks(lambda event: None, lambda: False)
    checkpointer = Fenced(folder, begun.model.plan, begun.model.world)
    loop.train_steps(begun.model, begun.state, begun.corpus, checkpointer, hooks)
    checkpointer.close()
    found = held_out(begun.model, begun.corpus)
    batches = held_out_batches(begun.corpus, plan.data, index=0, size=1, device=torch.device("cpu"))
    rows = [(batch.inputs_BS.numpy(), batch.labels_BS.numpy()) for batch in batches]
    values = {name: p.detach().numpy().copy() for name, p in begun.model.module.named_parameters()}
    return {"loss": found.loss, **found.figures}, values, rows


def test_held_out_pairs_are_compared_with_the_begin_after_training(tmp_path: Path) -> None:
    """huggingface/trl#6443: without adapters held-out pairs were compared with what had been trained."""
    folder = write_pairs(tmp_path)
    plan = planned(folder, "one", **{"data.held_out": "0.3"})
    (ran,) = run_ranks(_after_training, (plan, folder / "run"), world=1, on_event=lambda _: None, device="cpu")
    figures, values, rows = ran
    before: Any = AutoModelForCausalLM.from_pretrained(folder / "chat-model").eval()
    after: Any = AutoModelForCausalLM.from_pretrained(folder / "chat-model").eval()
    after.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    ahead: list[float] = []
    for inputs, labels in rows:
        inputs_BS, labels_BS = torch.from_numpy(inputs), torch.from_numpy(labels)
        sums: list[torch.Tensor] = []
        for model in (after, before):
            with torch.no_grad():
                chances = model(inputs_BS).logits.log_softmax(-1)
            each = chances.gather(2, labels_BS.clamp(min=0)[..., None])[..., 0]
            sums.append(each.where(labels_BS != IGNORE, 0.0).sum(1))
        ratios = sums[0] - sums[1]
        some = (labels_BS != IGNORE).any(1)[::2]
        ahead += (0.1 * (ratios[::2] - ratios[1::2]))[some].tolist()
    margins = torch.tensor(ahead, dtype=torch.float64)
    assert float(margins.abs().mean()) > 1e-2
    assert figures["rewards/margins"] == pytest.approx(float(margins.mean()), rel=1e-4)
    assert figures["loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(margins).mean()), rel=1e-5)


def test_all_parameters_learn_from_labels_under_fsdp(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#10126: KTO and DPO of all parameters had a loss of 0 and gradients that were no numbers."""
    folder = write_pairs(tmp_path)
    plans = {("kto", "fsdp"): planned(folder, "fsdp", "kto.toml", micro=2)}
    (ranks,) = run_each(plans, folder / "runs").values()
    expected = oracle(planned(folder, "one", "kto.toml"))
    assert expected.losses[0] == pytest.approx(0.5)
    assert expected.losses[-1] < 0.499
    assert_as_expected(ranks, expected, "fsdp", 3)


def test_no_loss_knows_its_micro_batches(tmp_path: Path) -> None:
    """huggingface/trl#6006: a divergence was the mean of means over micro-batches; unslothai/unsloth#2055: the loss of
    ORPO was twice as large with two of them."""
    (tmp_path / "pairs").mkdir()
    (tmp_path / "taught").mkdir()
    pairs, rows = write_pairs(tmp_path / "pairs"), taught.write_taught(tmp_path / "taught")
    orpo = {"preference.loss_type": "orpo", "run.steps": "2"}
    plans = {
        ("orpo", "one"): planned(pairs, "one", micro=1, **orpo),
        ("jsd", "one"): planned(
            rows, "one", "distill.toml", 1, **{"distill.loss_type": "jsd", "distill.alpha": "0.0", "run.steps": "2"}
        ),
    }
    assert {plan.micro_steps for plan in plans.values()} == {6}
    expected = {"orpo": oracle(planned(pairs, "one", **orpo)), "jsd": taught.oracle(plans["jsd", "one"])}
    for (job, _), ranks in run_each(plans, tmp_path / "runs").items():
        assert_as_expected(ranks, expected[job], "one", 2)
