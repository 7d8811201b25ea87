"""Fine-tuning as people have it by default: dropout, tied weights, GPT-2, an adapter to begin with, another mesh.

All on two processes beside one, and one beside transformers and peft where nothing is drawn.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.cli import main
from tangram.errors import UserError
from tangram.models.lora.adapter_files import save_adapters
from tangram.models.lora.adapters import initial_adapters
from tangram.planner.local.strategies import TENSOR, Strategy
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import LoraPlan
from tangram.training.data import tokens_of
from tangram.training.state.build_model import build_unsharded, source_of
from tests.training.tuning_tasks import Traced, oracle, planned_by, run_each, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

GROWN = {"model.change": "{ vocab_size = 300 }"}
SET = {"data.sequence": "96", "data.global_batch": "8", "optimiser.schedule": "constant", "optimiser.lr": "1e-3"}
STEPS = 4
ONE = Strategy("one process", "dp=1", ("dp",), shard="dp")
FSDP = Strategy("FSDP", "dp=2", ("dp",), shard="dp")
TP = Strategy("tensor", "tp=2", (), (TENSOR,))
PP = Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2)
DROPOUT = LoraPlan(rank=4, dropout=0.1)
JOBS: Mapping[str, tuple[str, LoraPlan, Mapping[str, Strategy]]] = {
    "dropout": ("chat-model", DROPOUT, {"fsdp": FSDP, "tp": TP, "pp": PP}),
    "tied": ("tied", LoraPlan(rank=4), {"fsdp": FSDP, "tp": TP}),
    "gpt2": ("gpt2", LoraPlan(rank=4), {}),
    "gpt2 with dropout": ("gpt2-dropout", DROPOUT, {"fsdp": FSDP, "tp": TP}),
    "gpt2 with dora": ("gpt2-dropout", LoraPlan(rank=4, dora=True), {"tp": TP, "pp": PP}),
    "started": ("chat-model", LoraPlan(rank=4, start="started"), {"tp": TP, "pp": PP}),
}
RESUMED = {("resumed", "tp"): ("half", "fsdp")}
"""Which goes on from the checkpoint of which."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models beside the conversations: with tied weights, with wider heads, GPT-2; and adapters of some values."""
    folder = write_folder(tmp_path_factory.mktemp("tuning"))
    like = json.loads((folder / "chat-model" / "config.json").read_text())
    wide = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": like["vocab_size"]}
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 256, "eos_token_id": 256}
    for name, fields in {
        "tied": {**like, "tie_word_embeddings": True},
        "wider": {**like, "head_dim": 2 * like["head_dim"]},
        "gpt2": {"model_type": "gpt2", **wide, **still, **ends},
        "gpt2-dropout": {"model_type": "gpt2", **wide, **ends},
    }.items():
        shutil.copytree(folder / "chat-model", folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
        fields = {key: value for key, value in fields.items() if key not in ("transformers_version", "architectures")}
        torch.manual_seed(1)
        kind = fields.pop("model_type")
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).save_pretrained(folder / name)
    job = load(folder / "sft.toml", SET)
    started = build_unsharded(_plan(folder, "chat-model", LoraPlan(rank=4), ONE),
                              source_of(job, tokens_of(job)), torch.device("cpu"), values=True)  # fmt: skip
    for parameter in started.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.05)
    save_adapters(started, folder / "started", "chat-model")
    return folder


def _plan(folder: Path, model: str, lora: LoraPlan, one: Strategy, steps: int = STEPS) -> Plan:
    where = {"data.cache": str(folder / "cache"), "model.path": str(folder / model)}
    # Rows of the first model are 88 and 96 tokens long, of others 88: a derived model has a program for each length.
    asked = load(folder / "sft.toml", {**SET, **where, **({} if model == "chat-model" else {"data.sequence": "88"})})
    start = lora.start and str(folder / lora.start)
    asked = asked.model_copy(update={"lora": lora.model_copy(update={"start": start})})
    return planned_by(one, asked, steps=steps)


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[tuple[str, str], Traced]:
    """Losses and gradients of the first rank, by job and way."""
    plans = {
        (job, way): _plan(folder, model, lora, one)
        for job, (model, lora, ways) in JOBS.items()
        for way, one in {"one": ONE, **ways}.items()
    }
    plans["half", "fsdp"] = _plan(folder, "chat-model", DROPOUT, FSDP, 2)
    plans["resumed", "tp"] = _plan(folder, "chat-model", DROPOUT, TP)
    return {key: ranks[0] for key, ranks in run_each(plans, folder / "runs", RESUMED).items()}


@pytest.mark.parametrize("job", JOBS)
def test_two_processes_have_the_losses_of_one(ran: dict[tuple[str, str], Traced], job: str) -> None:
    one = ran[job, "one"]
    for way in JOBS[job][2]:
        assert ran[job, way].losses == pytest.approx(one.losses, rel=1e-5), way
        assert ran[job, way].norms == pytest.approx(one.norms, rel=1e-4), way


@pytest.mark.parametrize("job", ["tied", "gpt2", "started"])
def test_one_process_has_the_losses_of_peft(folder: Path, ran: dict[tuple[str, str], Traced], job: str) -> None:
    model, lora, _ = JOBS[job]
    expected = oracle(_plan(folder, model, lora, ONE))
    assert ran[job, "one"].losses == pytest.approx(expected.losses, rel=1e-6)
    assert ran[job, "one"].norms == pytest.approx(expected.norms, rel=1e-4)


def test_what_is_dropped_is_seen(folder: Path, ran: dict[tuple[str, str], Traced]) -> None:
    """The same jobs without dropout have other losses, and adapters that begin with values others than new ones."""
    still = oracle(_plan(folder, "chat-model", LoraPlan(rank=4), ONE))
    for job in ("dropout", "started"):
        assert ran[job, "one"].losses[1:] != pytest.approx(still.losses[1:], rel=1e-5), job
    assert ran["started", "one"].losses[0] != pytest.approx(still.losses[0], rel=1e-5)


def test_it_goes_on_on_another_mesh(ran: dict[tuple[str, str], Traced]) -> None:
    whole = ran["dropout", "one"].losses
    assert ran["half", "fsdp"].losses == pytest.approx(whole[:2], rel=1e-5)
    assert ran["resumed", "tp"].losses == pytest.approx(whole[2:], rel=1e-5)


def test_a_part_that_no_dtensor_describes_begins_as_the_whole_does(folder: Path) -> None:
    plan = _plan(folder, "chat-model", LoraPlan(rank=4), ONE)
    model = build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
    name = "model.layers.0.self_attn.o_proj.lora_A.default.weight"
    whole = dict(initial_adapters(model, 0))[name]
    model.get_parameter(name).data = whole[:, :8].clone()  # a rank's part
    assert torch.equal(dict(initial_adapters(model, 0, {name: tuple(whole.shape)}))[name], whole)


def test_adapters_beside_weights_with_their_inputs_first_are_cut_with_them(folder: Path) -> None:
    """GPT-2's: outputs of c_attn and c_fc are cut, and inputs of c_proj; which adapters follow, not squares at hand."""
    plan = _plan(folder, "gpt2", LoraPlan(rank=4, dora=True), TP)
    for module, a, b in (("attn.c_attn", False, True), ("mlp.c_fc", False, True), ("mlp.c_proj", True, False)):
        name = f"transformer.h.1.{module}.lora"
        assert ("/tp" in plan.layout_of(f"{name}_A.default.weight")) == a, module
        assert ("/tp" in plan.layout_of(f"{name}_B.default.weight")) == b, module
        assert ("/tp" in plan.layout_of(f"{name}_magnitude_vector.default.weight")) == b, module


UNFIT: Mapping[str, tuple[dict[str, Any], str]] = {
    "a rank": ({"rank": 2}, "have rank 4, and lora.rank is 2: take theirs"),
    "an alpha": ({"alpha": 16.0}, "have alpha 8.0, and lora.alpha is 16.0"),
    "fewer": ({"targets": ("q_proj",)}, "have base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"),
    "more": ({"modules_to_save": ("lm_head",)}, "lack base_model.model.lm_head.weight"),
    "nothing": ({"start": "chat-model"}, "has no adapter_config.json"),
}


def test_adapters_that_do_not_fit_are_refused(folder: Path) -> None:
    for name, (fields, why) in UNFIT.items():
        lora = LoraPlan(**{"rank": 4, "start": "started", **fields})
        plan = _plan(folder, "chat-model", lora, ONE)
        with pytest.raises(UserError) as refused:
            build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
        assert why in str(refused.value), name
    shutil.copytree(folder / "started", changed := folder / "pissa", dirs_exist_ok=True)
    settings = json.loads((changed / "adapter_config.json").read_text())
    (changed / "adapter_config.json").write_text(json.dumps({**settings, "init_lora_weights": "pissa"}))
    plan = _plan(folder, "chat-model", LoraPlan(rank=4, start="pissa"), ONE)
    with pytest.raises(UserError, match="which may have changed the weights beside it"):
        build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
    plan = _plan(folder, "wider", LoraPlan(rank=4, start="started"), ONE)
    with pytest.raises(UserError, match="they are adapters of another model"):
        build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)


def test_a_whole_run_of_gpt2_and_of_tied_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2 has 128 positions, fewer than a sample of what a model writes would take. Adapters of another model fit
    the other one."""
    monkeypatch.chdir(folder)
    for model, start in {"gpt2-dropout": {}, "tied": {"lora.start": "started", **GROWN}}.items():
        out = tmp_path / model
        some = {**SET, **start, "data.cache": str(folder / "cache"), "model.path": model, "lora.dropout": "0.1"}
        words = [word for key, value in some.items() for word in ("--set", f"{key}={value}")]
        assert main(["train", "sft.toml", "--steps", "1", "-n", "1", "--out", str(out), *words]) == 0
        assert (out / "adapter" / "adapter_model.safetensors").is_file()
        rows = load_file(out / "adapter" / "adapter_model.safetensors").get(
            "base_model.model.model.embed_tokens.weight"
        )
        assert (rows is not None and len(rows) == 300) == bool(start)
        assert ('started" were trained beside "chat-model"' in " ".join(capsys.readouterr().out.split())) == bool(start)
