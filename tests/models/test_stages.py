"""Stages of a model, one after the other, are the model; what is no chain of modules is refused with the reason."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.errors import UserError
from tangram.models.building.build import token_inputs
from tangram.models.capturing.capture import capture
from tangram.models.capturing.stages import (
    Stages,
    Through,
    keep_stages,
    refuse_unlike_chain,
    refuse_unlike_modules,
    tied_modules,
)

FIELDS = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere": {"logit_scale": 0.5},
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "layer_types": 3 * ["full_attention"],
    },
}
BEFORE: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({}, "transformer.wte transformer.wpe | transformer.h | transformer.ln_f lm_head"),
    "gpt_bigcode": ({}, "transformer.wte transformer.wpe | transformer.h | transformer.ln_f lm_head"),
    "opt": (
        {"word_embed_proj_dim": 16, "ffn_dim": 64},
        "model.decoder.embed_tokens model.decoder.embed_positions model.decoder.project_in | model.decoder.layers | "
        "model.decoder.final_layer_norm model.decoder.project_out lm_head",
    ),
    "biogpt": (
        {"scale_embedding": True},
        "biogpt.embed_tokens biogpt.embed_positions | biogpt.layers | biogpt.layer_norm output_projection",
    ),
    "xglm": (
        {"d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 64},
        "model.embed_tokens | model.layers | model.layer_norm lm_head",
    ),
    "bloom": (
        {"n_layer": 3, "n_head": 4},
        "transformer.word_embeddings transformer.word_embeddings_layernorm | transformer.h | transformer.ln_f lm_head",
    ),
    "openai-gpt": (  # of which blocks give lists
        {"n_layer": 3, "n_head": 4, "n_embd": 32},
        "transformer.tokens_embed transformer.positions_embed | transformer.h | lm_head",
    ),
    "granite": ({"embedding_multiplier": 3.0}, "model.embed_tokens | model.layers | model.norm lm_head"),
}
"""Types that do something to embeddings before their blocks: add positions, scale, project, norm; and their modules."""
TUPLES = {"gptj": {"rotary_dim": 4}, "codegen": {"rotary_dim": 4}, "gpt_neox": {}}
"""Two types whose blocks give tuples, of which their code takes the first, and one without."""
BLOCKS = "model.layers"
THREE: Stages = (
    ("model.embed_tokens", f"{BLOCKS}.0"),
    (f"{BLOCKS}.1",),
    (f"{BLOCKS}.2", "model.norm", "lm_head"),
)


def made(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**FIELDS, **MORE.get(kind, {}), **changes})
    return cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32).train()


def stage(model: nn.Module, stages: Stages, number: int) -> nn.Module:
    return keep_stages(copy.deepcopy(model), stages, [number], tied_modules(model, stages))[0]


@pytest.mark.parametrize("kind", ["llama", *MORE])
def test_stages_one_after_the_other_are_the_model(kind: str) -> None:
    model = made(kind)
    refuse_unlike_chain(capture(model, token_inputs(1, 8)), THREE)
    parts = [stage(model, THREE, number) for number in range(3)]
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12)  # two documents in a row
    x: Tensor = ids
    for part in parts:
        x = part(x, position_ids=positions)
    whole = cast(Any, model)(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(x, whole)
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("kind", TUPLES)
def test_stages_of_blocks_that_give_tuples_are_the_model(kind: str) -> None:
    model = made(kind, **TUPLES[kind])
    base = cast(Any, model).base_model_prefix
    embed, layers, norm, head = (
        (f"{base}.wte", f"{base}.h", f"{base}.ln_f", "lm_head")
        if kind != "gpt_neox"
        else (f"{base}.embed_in", f"{base}.layers", f"{base}.final_layer_norm", "lm_head")
    )
    stages = ((embed, f"{layers}.0"), (f"{layers}.1",), (f"{layers}.2", norm, head))
    model.eval()
    ids = torch.randint(64, (3, 8), generator=torch.Generator().manual_seed(1))  # three samples
    x: Tensor = ids
    for number in range(3):
        x = stage(model, stages, number)(x)
    assert torch.equal(x, cast(Any, model)(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("kind", BEFORE)
def test_stages_of_a_model_that_does_something_before_its_blocks_are_the_model(kind: str) -> None:
    changes, names = BEFORE[kind]
    model = made(kind, **changes).eval()
    before, (layers,), after = (part.split() for part in names.split(" | "))
    stages = ((*before, f"{layers}.0"), (f"{layers}.1",), (f"{layers}.2", *after))
    refuse_unlike_modules(model, stages)
    refuse_unlike_chain(capture(model, token_inputs(1, 8)), stages)
    ids = torch.randint(3, 64, (2, 32), generator=torch.Generator().manual_seed(1))  # as many tokens as a row has
    positions = torch.cat([torch.arange(5), torch.arange(27)]).expand(2, 32)
    told = {} if kind == "bloom" else {"position_ids": positions}  # which takes none
    x: Tensor = ids
    for part in keep_stages(copy.deepcopy(model), stages, (0, 1, 2)):
        x = part(x, **told)
    assert torch.equal(x, cast(Any, model)(input_ids=ids, use_cache=False, **told).logits)


def test_stages_of_one_rank_share_their_modules_with_its_model() -> None:
    whole, model = made("qwen3"), made("qwen3")
    first, last = keep_stages(model, THREE, (0, 2))
    blocks = [cast(Any, one).model.layers for one in (model, first, last)]
    assert blocks[0][0] is blocks[1][0]
    assert blocks[0][2] is blocks[2][2]
    assert all(isinstance(one, Through) for one in (blocks[0][1], blocks[1][1], blocks[1][2], blocks[2][0]))
    own = {name for part in (first, last) for name, _ in part.named_parameters()}
    assert own == {name for name, _ in model.named_parameters()} < {name for name, _ in whole.named_parameters()}
    # What no stage names each has by itself, around one memory.
    rotary = [cast(Any, one).model.rotary_emb for one in (model, first, last)]
    assert len(set(rotary)) == 3
    model.to(torch.float64)
    assert {one.inv_freq.data_ptr() for one in rotary} == {rotary[0].inv_freq.data_ptr()}
    assert last.get_parameter("lm_head.weight").dtype == torch.float64
    # Hooks of the one are not the other's.
    first.register_forward_hook(lambda *_: 0 / 0)
    assert not model._forward_hooks
    assert not last._forward_hooks
    with pytest.raises(UserError, match="a rank of a pipeline has stages of a model only"):
        model(torch.zeros(1, 4, dtype=torch.long))


def test_gradients_through_stages_are_the_models() -> None:
    model = made("qwen3")
    parts = [stage(model, THREE, number) for number in range(3)]
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    x: Tensor = ids
    for part in parts:
        x = part(x)
    x.square().mean().backward()
    cast(Any, model)(input_ids=ids, use_cache=False).logits.square().mean().backward()
    want = dict(model.named_parameters())
    for part in parts:
        for name, parameter in part.named_parameters():
            torch.testing.assert_close(parameter.grad, want[name].grad, rtol=1e-6, atol=1e-9)


def test_settings_of_a_module_that_is_not_there_can_be_read() -> None:
    layer = cast(Any, made("llama")).model.layers[0]
    through = Through(layer)
    assert cast(Any, through).hidden_size == layer.hidden_size
    assert not list(through.parameters())


def test_a_model_that_reads_the_parts_of_another_stages_modules_is_refused_by_its_line() -> None:
    model = made("rwkv", attention_hidden_size=32)
    stages = (("rwkv.embeddings", "rwkv.blocks.0"), ("rwkv.blocks.1", "rwkv.blocks.2", "rwkv.ln_out", "head"))
    first = stage(model, stages, 0)
    with pytest.raises(UserError, match=r"modeling_rwkv\.py:\d+ looks up attention in a module that another stage"):
        first.eval()(torch.zeros(1, 4, dtype=torch.long))
    assert not hasattr(Through(nn.Linear(2, 2)), "left_out")  # whoever only asks goes on


def refused(model: nn.Module, stages: Stages) -> str:
    try:
        refuse_unlike_modules(model, stages)
        refuse_unlike_chain(capture(model, token_inputs(1, 8)), stages)
    except UserError as error:
        return str(error)
    return "nothing"


def test_a_module_that_is_not_there() -> None:
    assert refused(made("llama"), (("model.embed",), ("lm_head",))) == (
        'pipeline.stages names "model.embed", which is no module of a LlamaForCausalLM'
    )


def test_a_parameter_of_no_stage() -> None:
    assert refused(made("llama"), (THREE[0], THREE[1], (f"{BLOCKS}.2", "lm_head"))) == (
        "model.norm.weight is in no stage of the pipeline: name its module in pipeline.stages"
    )


def test_a_stage_of_which_nothing_is_trained() -> None:
    model = made("llama")
    for name in THREE[0]:
        model.get_submodule(name).requires_grad_(False)
    assert refused(model, THREE) == (
        "nothing of stage 0 of the pipeline is trained: give it modules that model.freeze leaves"
    )


def test_tied_weights_across_stages() -> None:
    model = made("llama", tie_word_embeddings=True)
    assert refused(model, THREE) == (
        "model.embed_tokens.weight and lm_head.weight are one tensor, and stage 0 of the pipeline has the one and "
        'stage 2 the other: add pipeline.tied = ["model.embed_tokens"], so that both keep it'
    )
    without = (*THREE[:2], tuple(name for name in THREE[2] if name != "lm_head"))
    assert refused(model, without) == (
        "lm_head.weight is in no stage of the pipeline: name its module in pipeline.stages"
    )
    between = ((*THREE[0], "lm_head"), THREE[1], (f"{BLOCKS}.2", "model.norm"))
    assert "lm_head" in refused(model, between)
    cast(Any, model).model.layers[1].mlp.up_proj.weight = cast(Any, model).model.layers[0].mlp.up_proj.weight
    assert refused(model, THREE).endswith(
        "weights are tied to those of the last stage only; set model.change.tie_word_embeddings = false"
    )
    with pytest.raises(UserError, match=r"names model.layers.0, whose \S+ is no tensor of the last stage"):
        refuse_unlike_modules(made("llama", tie_word_embeddings=True), THREE, ("model.embed_tokens", f"{BLOCKS}.0"))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", "model.embed_tokens | model.layers | model.norm lm_head"),
        ("gemma3_text", "model.embed_tokens | model.layers | model.norm lm_head"),
        *((kind, BEFORE[kind][1]) for kind in ("gpt2", "opt", "bloom", "granite", "openai-gpt")),
    ],
)
def test_stages_with_tied_weights_are_the_model(kind: str, names: str) -> None:
    model = made(kind, **BEFORE.get(kind, ({},))[0], tie_word_embeddings=True).eval()
    before, (layers,), after = (part.split() for part in names.split(" | "))
    stages = ((*before, f"{layers}.0"), (f"{layers}.1",), (f"{layers}.2", *after))
    tied = tied_modules(model, stages)
    assert tied == (before[0],)
    parts = [stage(model, stages, number) for number in range(3)]
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    x: Tensor = ids
    for part in parts:
        x = part(x)
    whole = cast(Any, model)(input_ids=ids, use_cache=False).logits
    assert torch.equal(x, whole)
    x.square().mean().backward()
    whole.square().mean().backward()
    first, last = (dict(parts[at].named_parameters()) for at in (0, 2))
    word = f"{before[0]}.weight"  # by the model's own name in both
    both = cast(Tensor, first[word].grad) + cast(Tensor, last[word].grad)
    torch.testing.assert_close(both, model.get_parameter(word).grad, rtol=1e-5, atol=1e-8)
    assert first.keys() & last.keys() == {word}
    assert word not in dict(parts[1].named_parameters())


def test_modules_out_of_turn() -> None:
    assert '"model.layers.1" out of turn' in refused(
        made("llama"), ((*THREE[0][:1], *THREE[1]), THREE[0][1:], THREE[2])
    )


class Doubles(nn.Module):
    """Something is done between its first layer and its second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(64, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        return self.b(self.a(input_ids) * 2)


def test_what_is_done_at_a_cut_is_refused() -> None:
    assert "nothing is done in between" in refused(Doubles(), (("a",), ("b",)))


class Keeps(nn.Module):
    """All its layers are handed what code outside of modules makes of the embeddings, or of the token ids."""

    def __init__(self, ids: bool, shape: bool = False) -> None:
        super().__init__()
        self.ids, self.shape = ids, shape
        self.a, self.b, self.c = (nn.Embedding(64, 8), nn.Linear(8, 8), nn.Bilinear(8, 8, 8))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        a = self.a(input_ids)
        kept = (input_ids > 3).unsqueeze(-1).expand(-1, -1, 8).float() if self.ids else a.sin()
        return self.c(self.b(a), torch.ones_like(kept) if self.shape else kept)


def test_what_code_makes_of_a_former_stage_is_refused() -> None:
    for ids in (True, False):
        assert refused(Keeps(ids), (("a",), ("b",), ("c",))) == (
            "c (stage 2) takes a tensor that is made in stage 0, past the modules between them: put both into one stage"
        )
        assert refused(Keeps(ids, shape=True), (("a",), ("b",), ("c",))) == "nothing"


class Skips(nn.Module):
    """What its first layer makes goes into the third, past the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Embedding(64, 8), nn.Linear(8, 8), nn.Bilinear(8, 8, 8))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        a = self.a(input_ids)
        return self.c(self.b(a), a)


def test_what_passes_modules_by_is_refused() -> None:
    assert "takes a tensor that is made in stage 0, past the modules between them" in refused(
        Skips(), (("a",), ("b",), ("c",))
    )


class Twice(nn.Module):
    """A layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(64, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        return self.b(self.b(self.a(input_ids)))


def test_a_module_that_runs_twice_is_refused() -> None:
    assert refused(Twice(), (("a",), ("b",))) == (
        "b runs twice in a forward: this version cuts no such model into stages"
    )


def test_what_a_stage_calls_itself_is_at_a_line_of_its_own_whoever_calls_it() -> None:
    part = stage(made("qwen3"), THREE, 0)
    inputs = {"x": torch.zeros(2, 8, dtype=torch.long)}
    one = capture(part, inputs)
    other = capture(part, inputs)  # called from another line
    assert [(call.run, call.line, call.function) for call in one.calls] == [
        (call.run, call.line, call.function) for call in other.calls
    ]
    assert [call.line.partition(":")[0] for call in one.calls if call.function == "clone"] == [
        "tangram/models/capturing/stages.py"
    ]
