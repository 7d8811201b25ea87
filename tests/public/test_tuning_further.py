"""Public reports about fine-tuning: masks, pairs, adapters after adapters, and tokens that were added."""

from __future__ import annotations

import json
import math
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.cli import main
from tangram.models.lora.adapter_files import save_adapters, stored_adapters
from tangram.planner.local.strategies import Strategy
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.training.data import IGNORE, open_corpus, prepare, step_batches, tokens_of
from tangram.training.state.build_model import build_unsharded, source_of
from tests.training.data.test_chat import encoded, tokens_at
from tests.training.pairs import write_pairs
from tests.training.tuning_tasks import planned_by, run_each, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for
ONE = Strategy("one process", "dp=1", ("dp",), shard="dp")
NO_ENDS = (
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<as>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<as>{% endif %}"
)
"""Nothing ends an answer but the begin of the next question (as GLM's, Bailing's)."""
ENDED = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
"""What a question ends with is the end of a document, and the first token of an answer follows it."""


def test_of_an_answer_that_is_not_learnt_the_end_is_not(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#10827: answers before the last were left out of the loss, and the ends behind them not."""
    (tmp_path / "chat-model").mkdir()
    (tmp_path / "chat-model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]
    for learnt in ([5], [3, 5], [1, 3, 5]):
        tokens = tokens_at(tmp_path, NO_ENDS)
        rows = [{**one, "train": n in learnt} if one["role"] == "assistant" else one for n, one in enumerate(turns)]
        ((ids, counts),) = encoded(tokens, {"messages": rows})
        runs = groupby(zip(ids, counts, strict=True), lambda one: one[1])
        found = [tokens.spelled([i for i, _ in some]) for counted, some in runs if counted]
        assert found == [turns[n]["content"] + "<|im_start|>" for n in learnt]


@pytest.mark.parametrize("packing", ["single", "best-fit"])
def test_what_follows_the_end_of_a_question_is_learnt(tmp_path: Path, packing: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5213: packed, the token behind each end token between turns was in no loss."""
    tokens = tokens_at(tmp_path, ENDED)
    turns = [{"role": role, "content": f"{role}"} for _ in range(2) for role in ("user", "assistant")]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("\n".join(json.dumps({"messages": turns}) for _ in range(4)))
    some = {"data.packing": packing, "data.sequence": "128", "data.global_batch": "4", "data.micro_batch": "4"}
    job = load(tmp_path / "sft.toml", {**some, "data.cache": str(tmp_path / "cache")})
    prepare(job.data, tokens, lambda event: None)
    corpus, here = open_corpus(job.data, tokens), torch.device("cpu")
    taken = step_batches(corpus, job.data, seed=0, first_sample=0, index=0, size=1, micro_steps=1, device=here)
    (batch,) = taken.micro
    found: list[list[int]] = cast(Any, torch.stack([batch.inputs_BS, batch.labels_BS], -1).flatten(0, 1)).tolist()
    learnt: list[tuple[int, int]] = [(token, label) for token, label in found if label != IGNORE]
    of_answer = len("assistant") + 1
    assert len(learnt) >= 4 * 2 * of_answer
    assert learnt.count((tokens.end, ord("a"))) == len(learnt) / of_answer


def test_neither_answer_of_a_pair_is_longer_than_a_sample(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#4402: the chosen answer was cut to the length asked for, and the rejected one beside its
    prompt was not."""
    folder = write_pairs(tmp_path)
    tokens = tokens_of(load(folder / "dpo.toml", {"data.sequence": "48"}))
    for chosen, rejected in (("yes", "no " * 40), ("yes " * 40, "no"), ("yes " * 40, "no " * 40)):
        row = {"prompt": "so?", "chosen": [{"role": "assistant", "content": chosen}],
               "rejected": [{"role": "assistant", "content": rejected}]}  # fmt: skip
        (both,) = tokens.encode([json.dumps(row).encode()])
        one, other = (side.tolist() for side in tokens.documents(both))
        assert max(map(len, (one, other))) == 48
        context = [[n % tokens.vocabulary for n in side if n % (2 * tokens.vocabulary) >= tokens.vocabulary]
                   for side in (one, other)]  # fmt: skip
        assert context[0] == context[1] != []


def test_preferences_after_adapters_begin_with_them_as_the_reference(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#8974: adapters that were tuned before were compared with the model without them, so the
    loss was 0 from the first step on."""
    folder = write_pairs(tmp_path)
    some = {"data.sequence": "64", "data.global_batch": "4", "data.cache": str(folder / "cache"), "lora.rank": "4",
            "run.steps": "3", "optimiser.lr": "1e-2", "optimiser.schedule": "constant"}  # fmt: skip
    plan = planned_by(ONE, load(folder / "dpo.toml", some), 4)
    model = build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    save_adapters(model, folder / "tuned", str(folder / "chat-model"))
    plan = planned_by(ONE, load(folder / "dpo.toml", {**some, "lora.start": str(folder / "tuned")}), 4)
    ((ran,),) = run_each({("dpo", "one"): plan}, folder / "runs").values()
    assert ran.losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert ran.losses[2] < math.log(2) - 1e-3


def test_adapters_with_ranks_and_scales_of_their_own_are_summed_as_they_are(tmp_path: Path) -> None:
    """huggingface/peft#3449, huggingface/peft#3744: of several, the scales by the root of the rank were counted twice,
    and ranks that differ by layer were lost."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    config = AutoConfig.for_model("llama", num_attention_heads=2, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    asked: dict[str, dict[str, Any]] = {
        "a": {"r": 4, "use_rslora": True, "rank_pattern": {"layers.1.self_attn.q_proj": 2}},
        "b": {"r": 8, "alpha_pattern": {"o_proj": 3}},
    }
    weights = "model.layers.{}.self_attn.{}.weight"
    want = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "base").named_parameters())
    want = {
        weights.format(n, p): want[weights.format(n, p)].detach().clone() for n in (0, 1) for p in ("q_proj", "o_proj")
    }
    for name, options in asked.items():
        own = LoraConfig(lora_alpha=6, target_modules=["q_proj", "o_proj"], init_lora_weights=False, **options)
        model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), own)
        model.save_pretrained(tmp_path / name)
        for key in want:
            want[key] += model.base_model.model.get_submodule(key.removesuffix(".weight")).get_delta_weight("default")
    words = ["checkpoint", "convert", str(tmp_path / "base"), str(tmp_path / "merged"), "--to", "hf"]
    assert main([*words, "--adapter", str(tmp_path / "a"), "--adapter", str(tmp_path / "b")]) == 0
    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    for key, value in want.items():
        torch.testing.assert_close(merged[key].detach(), value, rtol=1e-5, atol=1e-6)


KINDS = ("", "lora.trainable_token_indices = [260]", 'lora.targets = ["embed_tokens"]')


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_have_the_rows_that_their_model_has_not(tmp_path: Path, kind: str) -> None:
    """huggingface/peft#2898: adapters beside a vocabulary that has grown lack the rows of new tokens, so that who loads
    them has others there."""
    folder = write_folder(tmp_path)
    job = folder / "sft.toml"
    job.write_text(f"{job.read_text()}model.change = {{ vocab_size = 263 }}\n{kind}\n")
    plan = planned_by(ONE, load(job, {"data.sequence": "96", "data.cache": str(folder / "cache")}))
    model, other = (_whole(plan) for _ in range(2))
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    save_adapters(model, folder / "adapter", str(folder / "chat-model"), tables=True)
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "chat-model")
    base.resize_token_embeddings(263, mean_resizing=False)
    read: Any = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    ids = torch.arange(230, 263)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model.eval()(ids).logits, rtol=1e-5, atol=1e-6)
        for name, value in stored_adapters(other, folder / "adapter", all_of_it=True):
            other.get_parameter(name).copy_(value)
        assert torch.equal(other.eval()(ids).logits, model(ids).logits)


def _whole(plan: Plan) -> Any:
    return build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
