"""Tiny causal language models of transformers' classes, and what two ranks and a plain single process make of them."""

# ruff: noqa: N806  a tensor carries its dims in its name

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.errors import UserError
from tangram.models.building.initial import initial_tensors
from tangram.planner.local import strategies
from tangram.planner.local.derived_layouts import ModelAxis
from tangram.planner.local.model_costs import Counted
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.data import BYTES, open_corpus, prepare, sample_ids
from tangram.training.mesh.world import make_world
from tangram.training.run.launch import Rank
from tangram.training.run.rank import settled_packing, with_packing
from tangram.training.state import build_model
from tangram.training.step import loop, optimiser_step
from tests.training.small import small_tables, write_text

# By what classes call them; each takes those that it knows.
SIZES: Mapping[str, Any] = {
    "vocab_size": 257,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "word_embed_proj_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 256),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout", "activation_dropout", "hidden_dropout_prob", "emb_pdrop"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "summary_first_dropout", "residual_dropout"), 0.0),
}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
GROUPS = {"n_group": 1, "topk_group": 1}

# Beyond the sizes: what a class needs to be this small.
OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**HYBRID, "attn_layer_indices": [1]},
    "bart": {"is_decoder": True},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": {**LATENT, **GROUPS, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, **GROUPS, "first_k_dense_replace": 1},
    "dots1": {"n_shared_experts": 1, **GROUPS},
    "falcon": {"new_decoder_architecture": True},
    "falcon_h1": {"mamba_d_ssm": 64, **HYBRID},
    "glm4_moe_lite": {**LATENT, **GROUPS, "head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**HYBRID, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "minicpm3": {**LATENT},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "roberta": {"pad_token_id": 1, "is_decoder": True},
    "xglm": {"pad_token_id": 1},
    "youtu": {**LATENT},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "layer_types": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


_PACKED = """
apertus arcee aria_text beam bitnet codegen cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3
diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese
gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense
hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4_text mellum
mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder
moshi nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
"""
PACKED = frozenset(_PACKED.split())
"""Types of models that keep packed documents apart."""
_SINGLE = """
afmoe bailing_hybrid bamba biogpt bloom falcon falcon_h1 falcon_mamba gpt_oss granitemoehybrid inkling2_text
inkling_text jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax mpt nemotron_h olmo_hybrid openai-gpt opt
qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma roberta rwkv xglm zamba2 zaya
"""
SINGLE = frozenset(_SINGLE.split())
"""Types that do not, and train on windows of one document each."""
CAUSAL: Mapping[str, str] = {
    family: packing
    for packing, families in (("packed", sorted(PACKED)), ("single", sorted(SINGLE)))
    for family in families
}
_AHEAD = "what stands to the right of a token"
_UNUSED = 'encoder_attn.k_proj.weight" got no gradient: name it and'
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("bert", "big_bird", "cpmant", "electra", "megatron-bert", "roformer"), _AHEAD),
    **dict.fromkeys(("bart", "marian", "trocr"), 'encoder_attn.k_proj.weight" got no gradient: name it and'),
}
"""Types that are refused as these tests make them, and what the sentence says."""


def table() -> str:
    """What docs/training-models.md says of them."""
    rows = (
        ("packed documents, kept apart", PACKED),
        ("windows of one document", SINGLE),
        ("refused", REFUSED),
    )
    lines = ["| trained on | `model_type` |", "|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {', '.join(sorted(families))} |" for what, families in rows)])


def write_config(folder: Path, family: str, **changes: Any) -> Path:
    """The configuration of a tiny model of this type, in a file."""
    known = AutoConfig.for_model(family)
    fields = known.to_dict().keys() | getattr(known, "attribute_map", {}).keys()
    sizes = {name: value for name, value in SIZES.items() if name in fields}
    own = dict(OWN.get(family, {}))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family, **sizes, **own, **changes}))
    return folder / "config.json"


_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Ran:
    """What came of a model: the packing that it was found fit for, and of each step the loss and all gradients."""

    packing: str
    losses: tuple[float, ...]
    gradients: tuple[Mapping[str, npt.NDArray[np.float32]], ...]


def plan_of(text: Path, config: Path, *, change: Mapping[str, Any], freeze: Sequence[str]) -> Plan:
    """A plan of FSDP over two ranks that trains a model from its configuration."""
    tables = small_tables(
        text,
        model={"path": str(config), "change": dict(change), "freeze": list(freeze)},
        data={"sequence": 16, "global_batch": 4, "micro_batch": 1},
        optimiser={"lr": 1e-3},
    )
    del tables["model"]["preset"]
    return Plan.model_validate(tables)


TENSOR = strategies.Strategy("tensor", "tp=2", (), (strategies.TENSOR,))
CONTEXT = strategies.Strategy("context", "cp=2", (), (ModelAxis("cp", "context", "gathered"),))


def over_an_axis(plan: Plan, strategy: strategies.Strategy) -> Plan:
    """The same over a model axis of two ranks, from the marks that are known for the model."""
    job = Job.model_validate({name: getattr(plan, name) for name in Job.model_fields})
    counted = Counted(job, build_model.source_of(plan, BYTES).config)
    made = strategies.plan_of(strategy, job, counted)
    return made.model_copy(update={"data": plan.data})


def train_all(rank: Rank, plans: Mapping[str, Plan]) -> dict[str, Ran | str]:
    """The task of the ranks: two steps of each model by Tangram's own path; of one that is refused, why."""
    group = dist.group.WORLD
    assert group is not None
    found: dict[str, Ran | str] = {}
    for family, plan in plans.items():
        world = make_world(plan, rank.index, rank.device, group)
        try:
            found[family] = _trained(plan, world)
        except (UserError, RuntimeError, TypeError, ValueError, AttributeError, ImportError, IndexError) as error:
            found[family] = f"{type(error).__name__}: {error}"
    return found


def _trained(plan: Plan, world: Any) -> Ran:
    source = build_model.source_of(plan, BYTES)
    model = build_model.build(plan, source, world, values=True)
    plan = with_packing(plan, settled_packing(model, None, source).packing)
    model = replace(model, plan=plan)
    optimiser = optimiser_step.make_adamw(model.module, plan.optimiser)
    corpus = open_corpus(plan.data, BYTES)
    losses: list[float] = []
    gradients: list[Mapping[str, npt.NDArray[np.float32]]] = []
    model.module.train()
    for step in range(2):
        batches = loop.step_batches(
            corpus,
            plan.data,
            seed=plan.seed,
            first_sample=step * plan.data.global_batch,
            index=world.data_index,
            size=world.data_size,
            micro_steps=plan.micro_steps,
            device=world.device,
        )
        losses.append(loop.train_step(model, optimiser, batches, lr=1e-3).loss)
        gradients.append({name: _whole(p) for name, p in model.module.named_parameters()})
    return Ran(plan.data.packing, tuple(losses), tuple(gradients))


def _whole(parameter: nn.Parameter) -> npt.NDArray[np.float32]:
    gradient = parameter.grad
    if gradient is None:  # of a parameter that nothing was computed with
        return np.zeros(parameter.shape, np.float32)
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone().numpy()


def plain(plan: Plan, packing: str) -> Ran:
    """The same in one process, without Tangram's loop: each piece of a document alone, nothing beside or behind it."""
    plan = plan.model_copy(update={"data": plan.data.model_copy(update={"packing": packing})})
    config = build_model.source_of(plan, BYTES).config
    model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).train()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, whole in initial_tensors(config, plan.seed):
            tensors[name].copy_(whole)
    optimiser = optimiser_step.make_adamw(model, plan.optimiser)
    losses: list[float] = []
    gradients: list[Mapping[str, npt.NDArray[np.float32]]] = []
    for step in range(2):
        optimiser.zero_grad()
        pieces = _pieces(plan, step)
        counted = sum(len(piece) - 1 for piece in pieces)
        total = torch.zeros(())
        for piece in pieces:
            logits_SV = model(input_ids=piece[None, :-1], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits_SV.float(), piece[1:], reduction="sum")
        loss = total / counted
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.optimiser.clip_norm)
        optimiser_step.set_lr(optimiser, 1e-3, plan.optimiser.lr)
        optimiser.step()
        losses.append(float(loss.detach()))
        gradients.append({name: _whole(p) for name, p in model.named_parameters()})
    return Ran(packing, tuple(losses), tuple(gradients))


def _pieces(plan: Plan, step: int) -> list[Tensor]:
    """Of the samples of a step: the tokens of each document that it has something of."""
    corpus, single = open_corpus(plan.data, BYTES), plan.data.packing == "single"
    found: list[Tensor] = []
    rows = sample_ids(corpus, plan.data, plan.seed, step * plan.data.global_batch, plan.data.global_batch)
    for source, window in rows:
        split = corpus.training[source]
        start, stop = (int(place[0]) for place in split.spans([window], plan.data.sequence, single=single))
        ends = [int(end) for end in split.end_D.tolist() if start < end <= stop]
        places = [start, *ends, stop + 1]
        for begin, end in pairwise(places):
            if end - begin > 1:
                found.append(torch.from_numpy(split.read(begin, end)))
    return found


def apart(ours: Ran, right: Ran) -> float:
    """The largest relative difference of a loss or a parameter's gradient (of one near 0: to a part of the whole)."""
    found = [abs(one - other) / abs(other) for one, other in zip(ours.losses, right.losses, strict=True)]
    for one, other in zip(ours.gradients, right.gradients, strict=True):
        assert one.keys() == other.keys()
        norms = {name: float(np.linalg.norm(gradient)) for name, gradient in other.items()}
        least = 1e-3 * float(np.linalg.norm(list(norms.values())))
        found += [float(np.linalg.norm(one[name] - other[name])) / max(norms[name], least) for name in other]
    return max(found)


def prepared(
    folder: Path,
    families: Sequence[str],
    *,
    change: Mapping[str, Any] = MappingProxyType({}),
    freeze: Sequence[str] = (),
) -> dict[str, Plan]:
    """Their plans, with the text in the cache."""
    text = write_text(folder / "text")
    plans = {
        family: plan_of(text, write_config(folder / family, family), change=change, freeze=freeze)
        for family in families
    }
    prepare(next(iter(plans.values())).data, BYTES, lambda event: None)
    return plans


if __name__ == "__main__":
    print(table())
