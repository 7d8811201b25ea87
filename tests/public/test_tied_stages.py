"""Embeddings that the head is tied to, on the first and the last stage of a pipeline.

NVIDIA/Megatron-LM#844     with FSDP (a distributed optimiser) beside stages their gradients were sums of other parts
NVIDIA/Megatron-LM#6500    the same where parts are uneven: here of 261 rows over two ranks
sgl-project/sglang#15890   of a directory without a head the last stage took no weights, and wrote noise
NVIDIA-NeMo/Automodel#2571 a resumed run had another head than the one that was trained
uw-syfi/piper#13           copies drifted apart, each updated by its own gradient
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from safetensors.torch import load_file

from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import Strategy, plan_of
from tangram.schema.files import load
from tangram.training.data import prepare, tokens_of
from tangram.training.state.build_model import source_of
from tests.training.tuning_tasks import VOCABULARY, Traced, run_each, write_folder

STEPS, HALF = 4, 2
WORDS = "model.embed_tokens.weight"
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp in stages": Strategy("2 stages x FSDP", "pp=2 dp=2", ("dp",), shard="dp", stages=2),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Traced]]:
    folder = write_folder(tmp_path_factory.mktemp("tied"), tied=True, fields={"vocab_size": VOCABULARY - 1})
    weights = load_file(folder / "chat-model" / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert weights[WORDS].shape[0] % 2
    job = folder / "sft.toml"
    job.write_text(job.read_text().replace("lora.rank = 4\n", ""))
    asked = load(job, {"data.sequence": "64", "data.global_batch": "4", "optimiser.schedule": "constant"})
    prepare(asked.data, tokens_of(asked), lambda event: None)
    counted = Counted(asked, source_of(asked, tokens_of(asked)).config)
    plans = {("whole", way): plan_of(strategy, asked, counted, 1) for way, strategy in WAYS.items()}
    assert plans["whole", "fsdp in stages"].pipeline is not None
    plans["half", "fsdp in stages"] = plans["resumed", "fsdp in stages"] = plans["whole", "fsdp in stages"]
    steps = {"half": HALF}
    plans = {
        key: plan.model_copy(update={"run": plan.run.model_copy(update={"steps": steps.get(key[0], STEPS)})})
        for key, plan in plans.items()
    }
    return run_each(plans, folder / "runs", {("resumed", "fsdp in stages"): ("half", "fsdp in stages")})


def test_their_gradient_is_that_of_one_process_on_both_stages(ran: dict[tuple[str, str], list[Traced]]) -> None:
    wanted = ran["whole", "one"][0].gradients[WORDS]
    ranks = ran["whole", "fsdp in stages"]
    assert [WORDS in rank.gradients for rank in ranks] == [True] * 4
    for rank in ranks:
        np.testing.assert_allclose(rank.gradients[WORDS], wanted, rtol=0, atol=2e-6 * float(np.abs(wanted).max()))
    assert ranks[0].norms == pytest.approx(ran["whole", "one"][0].norms, rel=1e-5)


def test_the_last_stage_begins_with_the_weights_of_the_directory(ran: dict[tuple[str, str], list[Traced]]) -> None:
    assert ran["whole", "fsdp in stages"][0].losses == pytest.approx(ran["whole", "one"][0].losses, rel=1e-6)


def test_a_resumed_run_has_the_head_that_was_trained(ran: dict[tuple[str, str], list[Traced]]) -> None:
    whole, half, rest = (ran[part, "fsdp in stages"][0].losses for part in ("whole", "half", "resumed"))
    assert (*half, *rest) == whole
