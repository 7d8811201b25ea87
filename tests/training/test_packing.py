"""Documents that are packed into one row are kept apart by the models that say so, and the others are found out."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tangram.errors import UserError
from tangram.training.objective.packing import respects_documents, settle, why_not_causal

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "llama": SIZES,
    "qwen3": SIZES,
    "gemma3_text": {**SIZES, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}


def build(family: str, attention: str, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def logits(model: nn.Module, ids_S: Tensor, positions_S: Tensor) -> Tensor:
    return model(input_ids=ids_S[None], position_ids=positions_S[None], use_cache=False).logits[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_document_behind_others_has_the_logits_it_has_alone(family: str, attention: str) -> None:
    model = build(family, attention, **FAMILIES[family]).eval()
    lengths = (5, 1, 9, 7)
    documents = [torch.randint(3, 64, (length,)) for length in lengths]
    packed_SV = logits(model, torch.cat(documents), torch.cat([torch.arange(length) for length in lengths]))
    alone_SV = torch.cat([logits(model, ids_S, torch.arange(len(ids_S))) for ids_S in documents])
    run_on_SV = logits(model, torch.cat(documents), torch.arange(sum(lengths)))
    assert torch.allclose(packed_SV, alone_SV, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(packed_SV, run_on_SV, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_models_that_keep_documents_apart_pass(family: str, dtype: torch.dtype) -> None:
    model = build(family, "sdpa", **FAMILIES.get(family, GPT2)).to(dtype).train()
    assert respects_documents(model)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_whose_embedding_is_frozen_is_judged() -> None:
    model = build("llama", "sdpa", **SIZES)
    model.get_input_embeddings().requires_grad_(False)
    assert respects_documents(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
        ("gpt_oss", {**SIZES, "num_local_experts": 4}),  # makes its masks without position ids
        ("lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}),  # a convolution runs on over documents
    ],
)
def test_models_that_mix_documents_are_found_out(family: str, sizes: dict[str, Any], dtype: torch.dtype) -> None:
    assert not respects_documents(build(family, "eager", **sizes).to(dtype))


class Wrapped(nn.Module):
    """A model behind which a mistake is planted."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()


class NoPositions(Wrapped):
    """Position ids are dropped on the way."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return self.model(input_ids=input_ids, use_cache=use_cache)


class PositionsRunOn(Wrapped):
    """Attention keeps documents apart, but their positions do not begin anew."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        document_BS = (position_ids == 0).cumsum(-1)
        same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
        mask_B1SS = torch.where(same_BSS.tril()[:, None], 0.0, torch.finfo(torch.float32).min)
        run_on_BS = torch.arange(input_ids.shape[1])[None]
        return self.model(input_ids=input_ids, position_ids=run_on_BS, attention_mask=mask_B1SS, use_cache=use_cache)


class LeaksALittle(Wrapped):
    """A ten-thousandth of the first token's embedding comes through to every logit."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        kept: list[Tensor] = []
        handle = self.get_input_embeddings().register_forward_hook(lambda _, args, output: kept.append(output))
        output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
        handle.remove()
        output.logits = output.logits + 1e-4 * kept[0][:, :1].sum(-1, keepdim=True).to(output.logits.dtype)
        return output


@pytest.mark.parametrize(
    ("mistake", "family", "dtype"),
    [
        (NoPositions, "llama", torch.float32),
        (NoPositions, "qwen3", torch.bfloat16),
        (PositionsRunOn, "gpt2", torch.float32),
        (LeaksALittle, "llama", torch.float32),
        (LeaksALittle, "llama", torch.bfloat16),
    ],
)
def test_planted_mistakes_are_found_out(mistake: type[Wrapped], family: str, dtype: torch.dtype) -> None:
    model = build(family, "sdpa", **FAMILIES.get(family, GPT2)).to(dtype)
    assert respects_documents(model)
    assert not respects_documents(mistake(model))


def test_relative_positions_may_run_on() -> None:
    assert respects_documents(PositionsRunOn(build("llama", "sdpa", **SIZES)))


def test_a_model_in_which_no_token_sees_another_is_not_judged_good() -> None:
    model = build("llama", "sdpa", **SIZES)
    for name, parameter in model.named_parameters():
        if "o_proj" in name:
            nn.init.zeros_(parameter)
    assert not respects_documents(model)


BERT = {**SIZES, "max_position_embeddings": 64}
CAUSAL = {
    "llama": SIZES,
    "gpt2": GPT2,
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt_oss": {**SIZES, "num_local_experts": 4},
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"]},
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "bert": {**BERT, "is_decoder": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("family", CAUSAL)
def test_causal_models_are_found_causal(family: str, positions: bool, dtype: torch.dtype) -> None:
    model = build(family, "eager", **CAUSAL[family]).to(dtype).train()
    assert why_not_causal(model, positions=positions) == ""
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


class SeesOneAhead(Wrapped):
    """A ten-thousandth of the next token's embedding, at one place only."""

    place = 6

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        kept: list[Tensor] = []
        handle = self.get_input_embeddings().register_forward_hook(lambda _, args, output: kept.append(output))
        output = self.model(input_ids=input_ids, use_cache=use_cache)
        handle.remove()
        ahead_BV = 1e-4 * kept[0][:, self.place + 1].sum(-1, keepdim=True).to(output.logits.dtype)
        here_S = torch.arange(input_ids.shape[1]) == self.place
        output.logits = output.logits + here_S[None, :, None] * ahead_BV[:, None]
        return output


class SeesTheLast(SeesOneAhead):
    """The place before the last alone sees the last."""

    place = 14


class Unnamed(SeesOneAhead):
    """The same in a model that does not say which its embeddings are: only the logits can tell, of a larger leak."""

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        output = self.model(input_ids=input_ids, use_cache=use_cache)
        output.logits = output.logits + 1e-3 * output.logits.roll(-1, 1)
        return output


class Prefix(Wrapped):
    """The first eight tokens see each other."""

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        seen_SS = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).tril()
        seen_SS[:8, :8] = True
        mask_B1SS = torch.where(seen_SS, 0.0, torch.finfo(torch.float32).min).expand(len(input_ids), 1, -1, -1)
        return self.model(input_ids=input_ids, attention_mask=mask_B1SS, use_cache=use_cache)


@pytest.mark.parametrize(
    ("mistake", "dtype"),
    [
        (SeesOneAhead, torch.float32),
        (SeesOneAhead, torch.bfloat16),
        (SeesTheLast, torch.float32),
        (Unnamed, torch.float32),
        (Prefix, torch.float32),
    ],
)
def test_planted_looks_ahead_are_found_out(mistake: type[Wrapped], dtype: torch.dtype) -> None:
    model = build("llama", "eager", **SIZES).to(dtype)
    assert why_not_causal(model) == ""
    assert "what stands to the right of a token reaches it" in why_not_causal(mistake(model))


@pytest.mark.parametrize("asked", ["auto", "single"])
def test_a_bidirectional_model_is_refused_with_the_way_out(asked: Any) -> None:
    with pytest.raises(UserError, match=r"BertLMHeadModel cannot .* the right .*model\.change\.is_decoder = true"):
        settle(build("bert", "eager", **BERT), asked, None, lambda mine: mine)


def test_packed_documents_need_a_causal_model_too() -> None:
    bidirectional = build("gemma3_text", "eager", **FAMILIES["gemma3_text"], use_bidirectional_attention=True)
    with pytest.raises(UserError, match="Gemma3ForCausalLM "):
        settle(bidirectional, "auto", None, lambda mine: mine)


class Layered(Wrapped):
    """Looks a layer up by a number that is not there, as Zamba2 of few layers."""

    def forward(self, **given: Any) -> Any:
        return {0: self.model}[1](**given)


class Reversible(torch.autograd.Function):
    """Has no backward in evaluation, as Reformer's layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("to train it, use model.train()")


class Untrained(Wrapped):
    def forward(self, **given: Any) -> Any:
        found = self.model(**given)
        found.logits = Reversible.apply(found.logits)
        return found


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Layered, r"\d+: KeyError: 1$"), (Untrained, "AssertionError: to train it, use model.train")],
)
def test_what_a_model_raises_is_one_sentence_with_its_line(kind: type[Wrapped], says: str) -> None:
    with pytest.raises(UserError, match=rf"{kind.__name__} cannot compute 31 rows of 16 tokens: .*{says}"):
        settle(kind(build("llama", "eager", **SIZES)), "auto", None, lambda mine: mine)


def test_a_model_whose_weights_are_zero_cannot_be_judged_causal() -> None:
    model = build("llama", "sdpa", **SIZES)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert "cannot be told" in why_not_causal(model)


@pytest.mark.parametrize(
    ("family", "asked", "before", "found", "why"),
    [
        ("llama", "auto", None, "packed", "LlamaForCausalLM keeps them apart"),
        ("llama", "packed", None, "packed", "as the plan says"),
        ("llama", "single", None, "single", "as the plan says"),
        ("llama", "best-fit", None, "best-fit", "as the plan says"),
        ("llama", "auto", "best-fit", "best-fit", "as in the run that goes on"),
        ("llama", "auto", "single", "single", "as in the run that goes on"),
        ("llama", "auto", "packed", "packed", "as in the run that goes on"),
        ("bloom", "auto", None, "single", "BloomForCausalLM would let a document see the one"),
        ("mamba", "single", None, "single", "as the plan says"),
    ],
)
def test_what_the_packing_comes_to(family: str, asked: Any, before: Any, found: str, why: str) -> None:
    settled = settle(build(family, "eager", **CAUSAL[family]), asked, before, lambda mine: mine)
    assert settled.packing == found
    assert settled.why.startswith(why)


@pytest.mark.parametrize(("asked", "before"), [("packed", None), ("auto", "packed"), ("best-fit", None)])
def test_a_model_that_mixes_documents_is_refused_with_the_way_out(asked: Any, before: Any) -> None:
    with pytest.raises(UserError, match=r'windows of its own with data\.packing = "single"'):
        settle(build("bloom", "eager", **CAUSAL["bloom"]), asked, before, lambda mine: mine)


def test_one_rank_that_says_no_decides_for_all() -> None:
    asked: list[bool] = []

    def another_says_no(mine: bool) -> bool:
        asked.append(mine)
        return mine and len(asked) > 1

    assert settle(build("llama", "sdpa", **SIZES), "auto", None, another_says_no).packing == "single"
    assert asked == [True, True]


@pytest.mark.parametrize(("packing", "calls"), [("auto", 2), ("packed", 2), ("single", 1)])
def test_a_model_is_called_once_for_each_probe_with_inputs_of_one_kind(packing: Any, calls: int) -> None:
    """A derived model derives a program for each size of its inputs, and for what has gradients and what has none."""
    model = build("llama", "sdpa", **SIZES)
    kinds: list[tuple[Any, ...]] = []

    def note(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        kinds.append((kwargs["input_ids"].shape, kwargs.keys(), torch.is_grad_enabled()))

    model.register_forward_pre_hook(note, with_kwargs=True)
    settle(model, packing, None, lambda mine: mine)
    assert len(kinds) == calls
    assert all(kind == kinds[0] for kind in kinds)
    assert all(p.grad is None for p in model.parameters())
