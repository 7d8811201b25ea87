"""Fine-tuning from a job: one process and two beside transformers and peft, and what is left behind."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.checkpoint.store.commits import read_manifest
from tangram.cli import main
from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.models.lora.adapters import Adapters, adapted_layers, add_adapters
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import LoraPlan
from tangram.training.data import prepare, tokens_of
from tangram.training.state.build_model import source_of
from tests.house.doc_blocks import ROOT, blocks_of, commands_of
from tests.training.small import SMALL_MODEL
from tests.training.tuning_tasks import (
    STEPS,
    VOCABULARY,
    Traced,
    assert_as_expected,
    oracle,
    run_each,
    saved_and_merged,
    write_folder,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
}
COMMON = {"data.sequence": "96", "data.global_batch": "8", "optimiser.schedule": "constant", "optimiser.lr": "1e-3"}
JOBS: Mapping[str, LoraPlan] = {
    "lora": LoraPlan(rank=4, alpha=16.0),
    "rslora, the head whole": LoraPlan(rank=4, rslora=True, modules_to_save=("lm_head",)),
    "embeddings and a head": LoraPlan(rank=4, targets=("q_proj", "embed_tokens", "lm_head", "down_proj")),
    "dora": LoraPlan(rank=4, dora=True),
}
SHORT = 3
"""Steps of all but the first job on one process."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tuning"), fields={"vocab_size": VOCABULARY - 1})


@pytest.fixture(scope="module")
def plans(folder: Path) -> dict[tuple[str, str], Plan]:
    """By job and way, with the tokens made."""
    asked = load(folder / "sft.toml", {**COMMON, "data.cache": str(folder / "cache")})
    counted = Counted(asked, source_of(asked, tokens_of(asked)).config)
    prepare(asked.data, tokens_of(asked), lambda event: None)
    ways = {way: plan_of(one, asked, counted, 2) for way, one in WAYS.items()}
    found: dict[tuple[str, str], Plan] = {}
    for job, lora in JOBS.items():
        for way, plan in ways.items():
            run = asked.run.model_copy(update={"steps": STEPS if (job, way) == ("lora", "one") else SHORT})
            found[job, way] = plan.model_copy(update={"lora": lora, "run": run})
    return found


@pytest.fixture(scope="module")
def ran(folder: Path, plans: dict[tuple[str, str], Plan]) -> Callable[[str], dict[str, list[Traced]]]:
    """What all ranks have measured of a job, by way; each is run once."""

    @cache
    def run(job: str) -> dict[str, list[Traced]]:
        of_job = {key: plan for key, plan in plans.items() if key[0] == job}
        return {way: ranks for (_, way), ranks in run_each(of_job, folder / "runs").items()}

    return run


@pytest.mark.parametrize("job", [pytest.param(job, marks=[pytest.mark.slow] * (job != "lora")) for job in JOBS])
def test_losses_and_gradients_are_those_of_transformers_and_peft(
    plans: dict[tuple[str, str], Plan], ran: Callable[[str], dict[str, list[Traced]]], job: str
) -> None:
    expected = oracle(plans[job, "one"])
    if job == "lora":
        assert expected.losses[-1] < expected.losses[0] - 0.1
    for way in WAYS:
        ranks = ran(job)[way]
        steps = plans[job, way].run.steps
        assert_as_expected(ranks, expected, way, steps)


def test_a_scale_that_is_dropped_is_seen(
    plans: dict[tuple[str, str], Plan], ran: Callable[[str], dict[str, list[Traced]]]
) -> None:
    plan = plans["lora", "one"]
    assert plan.lora is not None
    wrong = oracle(plan, alpha=float(plan.lora.rank))  # a scale of 1
    assert ran("lora")["one"][0].losses != pytest.approx(wrong.losses, rel=1e-4)


@pytest.mark.parametrize("job", JOBS)
def test_what_is_saved_is_what_peft_reads_and_merges(
    plans: dict[tuple[str, str], Plan], tmp_path: Path, job: str
) -> None:
    saved_and_merged(plans[job, "one"], tmp_path / "adapter")


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "none": ({"targets": ["q_prj"]}, 'names "q_prj", which fits no module of the model: did you mean "q_proj"?'),
    "no pattern": ({"targets": ["model.layer.*.q_proj"]}, "which fits no module"),
    "a norm": ({"targets": ["input_layernorm"]}, "a Qwen3RMSNorm: adapters stand beside linear layers"),
    "both": ({"targets": ["lm_head"], "modules_to_save": ["lm_head"]}, "in lora.targets and in lora.modules_to_save"),
    "lengths of rows": ({"targets": ["embed_tokens"], "dora": True}, "model.embed_tokens is an embedding: leave"),
    "whole": ({"modules_to_save": ["lmhead"]}, 'lora.modules_to_save names "lmhead"'),
}  # fmt: skip


def test_targets_that_are_refused(folder: Path, tmp_path: Path) -> None:
    asked = load(folder / "sft.toml")
    config = source_of(asked, tokens_of(asked)).config
    for name, (options, why) in REFUSED.items():
        with pytest.raises(UserError) as refused:
            add_adapters(build_on_meta(config), Adapters(rank=2, alpha=2.0, **options))
        assert why in str(refused.value), name
    config.tie_word_embeddings = True
    with pytest.raises(UserError, match="has its weights together with"):
        add_adapters(build_on_meta(config), Adapters(rank=2, alpha=2.0, modules_to_save=["lm_head"]))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")  # of peft about parameters
@pytest.mark.parametrize(
    ("targets", "rest"),
    [
        (["q_proj", "shared_experts.down_proj"], ["q_proj"]),  # peft reads the end of the name
        (["shared_experts.gate_proj", "shared_experts.up_proj"], ["q_proj", "v_proj"]),
    ],
)
def test_targets_that_peft_takes_for_experts_are_refused(targets: list[str], rest: list[str]) -> None:
    def model() -> torch.nn.Module:
        fields = {**SMALL_MODEL, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        return build_on_meta(AutoConfig.for_model("glm4_moe", **fields))

    with pytest.raises(UserError, match=r"layers\.\d\.mlp\.experts\.\w+ has all experts") as refused:
        add_adapters(model(), Adapters(rank=2, alpha=2.0, targets=targets))
    instead = [*rest, "experts.down_proj", "experts.gate_up_proj"]
    assert f"lora.targets = {json.dumps(instead)}" in str(refused.value)
    adapted = model()
    add_adapters(adapted, Adapters(rank=2, alpha=2.0, targets=instead))
    assert {*adapted_layers(adapted)[0]} == {*(f"self_attn.{one}" for one in rest), *instead[-2:]}


PAGE = ROOT / "docs" / "fine-tuning.md"


def test_the_page_is_what_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job, its commands and its lines of Python, on the conversations of the example; and going on elsewhere."""
    job, commands, code, *others = blocks_of(PAGE)
    example = ROOT / "examples" / "fine-tune"
    assert job.text == (example / "sft.toml").read_text()
    assert not others
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "conversations").symlink_to(example / "conversations")
    (tmp_path / "sft.toml").write_text(job.text)
    show, train = (list(command.arguments) for command in commands_of(commands))
    data = ["--set", "data.sequence=160", "--set", f"data.cache={tmp_path / 'cache'}"]
    assert main([*show, *data]) == 0
    shown = capsys.readouterr().out
    assert shown.count("<|im_start|>assistant\n[[") == shown.count("<|im_start|>assistant") > 2
    same = [*data, "--set", "optimiser.schedule=constant", "--set", "checkpoint.every_steps=2"]
    assert main([*train, *same, "--steps", "4", "-n", "2"]) == 0
    scope: dict[str, Any] = {}
    exec(compile(code.text, str(code), "exec"), scope)  # noqa: S102  of this repository
    out = tmp_path / "runs" / "sft"
    merged = AutoModelForCausalLM.from_pretrained(out / "export")
    ids = torch.arange(40)[None]
    torch.testing.assert_close(scope["model"].eval()(ids).logits, merged.eval()(ids).logits)
    assert not torch.equal(merged(ids).logits, AutoModelForCausalLM.from_pretrained("chat-model").eval()(ids).logits)
    assert main(["checkpoint", "convert", "chat-model", "merged", "--to", "hf", "--adapter", str(out / "adapter")]) == 0
    other = AutoModelForCausalLM.from_pretrained("merged")
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    for name in ("chat_template.jinja", "LICENSE", "generation_config.json"):
        assert (out / "export" / name).read_bytes() == Path("chat-model", name).read_bytes()
    newest = max((out / "checkpoint").iterdir())
    states = {name for name in read_manifest(newest).tensors if name.startswith("optim.")}
    assert states
    assert all(".lora_" in name for name in states)
    assert main(["train", "sft.toml", *same, "--steps", "6", "-n", "1", "--resume", "--out", str(out)]) == 0
    assert max((out / "checkpoint").iterdir()).name == "step-00000006"
