"""Adapters of experts that lie in one tensor: one process and meshes of two beside transformers and peft."""

import copy
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.cli import main
from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.models.lora import expert_adapters
from tangram.models.lora.adapter_files import merge_adapters, save_adapters, stored_adapters
from tangram.models.lora.adapters import Adapters, adapted_layers, add_adapters
from tangram.models.lora.bases import base_weights
from tangram.models.lora.expert_adapters import factors_of
from tangram.planner.local.derived_layouts import ModelAxis
from tangram.planner.local.strategies import TENSOR, Strategy
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import LoraPlan
from tangram.training.data import tokens_of
from tangram.training.objective.expert_loads import Loads
from tangram.training.state.build_model import build_unsharded, source_of
from tests.training.small import SMALL_MODEL
from tests.training.tuning_tasks import Named, Traced, assert_as_expected, oracle, planned_by, run_each, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "ep": Strategy("experts", "ep=2", (), (ModelAxis("ep", "expert", "sequence"),)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
}
COMMON = {"data.sequence": "96", "data.global_batch": "8", "optimiser.schedule": "constant", "optimiser.lr": "1e-3"}
TARGETS = ("q_proj", "v_proj", "experts.gate_up_proj", "experts.down_proj")
STEPS = 3
FIELDS: Mapping[str, Mapping[str, int]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
}


SOME = {"qwen3_moe": ("one", "ep"), "gpt_oss": tuple(WAYS)}


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def plans(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Plan]:
    """By family and way, with the tokens made."""
    family = request.param
    folder = write_folder(tmp_path_factory.mktemp("experts"), family=family, fields=FIELDS[family])
    asked = load(folder / "sft.toml", {**COMMON, "data.cache": str(folder / "cache")})
    lora = LoraPlan(rank=4, alpha=16.0, targets=TARGETS)
    asked = asked.model_copy(update={"lora": lora, "run": asked.run.model_copy(update={"steps": STEPS})})
    return {(family, way): planned_by(one, asked) for way, one in WAYS.items() if way in SOME[family]}


def test_losses_and_gradients_are_those_of_peft(plans: dict[tuple[str, str], Plan], tmp_path: Path) -> None:
    one = next(plan for (_, way), plan in plans.items() if way == "one")
    expected = oracle(one)
    model = build_unsharded(one, source_of(one, tokens_of(one)), torch.device("cpu"), values=False)
    factors = {factor.name: factor for factor in factors_of(model)}
    assert len(factors) == 2 * 2 * 2  # of two weights in two layers

    def as_peft(rank: Traced) -> Traced:
        gradients: Named = {}
        for name, value in rank.gradients.items():
            factor = factors.get(name)
            stored = f"{factor.stored}.default.weight" if factor else name
            gradients[stored] = factor.matrix(torch.from_numpy(value)).numpy() if factor else value
        return replace(rank, gradients=gradients)

    for (_, way), ranks in run_each(plans, tmp_path).items():
        assert_as_expected([as_peft(rank) for rank in ranks], expected, way, STEPS)


SMALL = {**SMALL_MODEL, "vocab_size": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
OF_DEEPSEEK = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
               "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}  # fmt: skip
ROWS: Mapping[str, tuple[dict[str, Any], Any, str]] = {
    "mixtral": ({}, "all-linear", ""),
    "gpt_oss": ({}, ["experts.down_proj"], ""),  # no linear layer beside
    "qwen2_moe": ({"shared_expert_intermediate_size": 24}, "all-linear", ""),
    "deepseek_v3": (OF_DEEPSEEK, "all-linear", "shared_experts.down_proj"),  # peft could not load those
}


def _drawn(name: str, targets: Any, **options: Any) -> Any:
    """A mixture on the CPU, and its adapters with values that are not those that they begin with."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SMALL, **dict.fromkeys(COUNTS, 4), **ROWS[name][0]})
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = copy.deepcopy(model)
    add_adapters(model, Adapters(rank=4, alpha=8.0, targets=targets, **options))
    values = {n: torch.randn(p.shape) * 0.3 for n, p in model.named_parameters() if p.requires_grad}
    model.load_state_dict(values, strict=False, assign=True)
    return plain, model, values


@pytest.mark.parametrize("name", ROWS)
def test_what_is_saved_is_what_peft_reads_and_merges(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    _, targets, none = ROWS[name]
    plain, model, values = _drawn(name, targets)
    have, have_none = adapted_layers(model)
    assert "experts.down_proj" in have
    assert (none in have_none) if none else (have_none == ["lm_head"] or targets != "all-linear")
    plain.save_pretrained(tmp_path / "model")
    ids = torch.arange(32)[None]
    with torch.no_grad():
        logits = model(ids).logits
        assert (plain(ids).logits - logits).abs().max() > 0.01
        save_adapters(model, tmp_path / "adapter", str(tmp_path / "model"))
        read: Any = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
        torch.testing.assert_close(read.eval()(ids).logits, logits, rtol=0, atol=0)
        again = dict(stored_adapters(model, tmp_path / "adapter", all_of_it=True))
        assert again.keys() == values.keys()
        assert all(torch.equal(again[one], value) for one, value in values.items())
        merge_adapters(model)
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)
    assert [*model.state_dict()] == [*AutoModelForCausalLM.from_config(model.config).state_dict()]
    convert = ["checkpoint", "convert", str(tmp_path / "model"), str(tmp_path / "merged"), "--to", "hf"]
    main([*convert, "--adapter", str(tmp_path / "adapter")])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")  # of peft about parameters
def test_experts_may_have_other_ranks(tmp_path: Path) -> None:
    from peft import PeftModel

    options = {"ranks": {"experts.down_proj": 2}, "alphas": {"experts.gate_up_proj": 20.0}, "rslora": True}
    plain, model, values = _drawn("mixtral", "all-linear", **options)
    assert {values[f"model.layers.0.mlp.experts.lora_right.{one}"].shape[1] for one in ("down_proj",)} == {2}
    plain.save_pretrained(tmp_path / "model")
    ids = torch.arange(32)[None]
    with torch.no_grad():
        logits = model(ids).logits
        save_adapters(model, tmp_path / "adapter", str(tmp_path / "model"))
        read: Any = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
        torch.testing.assert_close(read.eval()(ids).logits, logits, rtol=1e-5, atol=1e-6)
        convert = ["checkpoint", "convert", str(tmp_path / "model"), str(tmp_path / "merged"), "--to", "hf"]
        assert main([*convert, "--adapter", str(tmp_path / "adapter")]) == 0
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-5)


def test_the_backward_makes_the_weights_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With recompute and without, nothing of a made weight is kept, and gradients are those of weights that are."""
    _, model, values = _drawn("mixtral", "all-linear")
    sizes = {tuple(p.shape) for n, p in model.named_parameters() if n.endswith("_proj") and ".base_layer." in n}
    ids, kept = torch.arange(32)[None], list[tuple[int, ...]]()

    def gradients() -> dict[str, torch.Tensor]:
        kept.clear()
        model.zero_grad()
        with saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
            loss = model(ids, labels=ids).loss
        loss.backward()
        return {name: model.get_parameter(name).grad.clone() for name in values}

    made = gradients()
    assert not any(sorted(shape) in [sorted(size) for size in sizes] for shape in kept)
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    recomputed = gradients()
    model.activation_checkpointing_disable()
    monkeypatch.setattr(expert_adapters, "made_again", lambda *of: nullcontext())
    plain = gradients()
    assert any(sorted(shape) in [sorted(size) for size in sizes] for shape in kept)
    for name, value in plain.items():
        assert torch.equal(made[name], value), name
        assert torch.equal(recomputed[name], value), name


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dropout": 0.1}, "beside which peft knows no lora.dropout"),
        ({"dora": True}, "beside which peft knows no lora.dora"),
        ({"targets": ["experts.gate_proj"]}, 'did you mean "gate_up_proj"?'),
        ({"targets": ["mlp.experts"]}, "adapters stand beside linear layers"),
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    model = build_on_meta(AutoConfig.for_model("mixtral", **SMALL, num_local_experts=4))
    with pytest.raises(UserError, match=re.escape(why)):
        add_adapters(model, Adapters(rank=2, alpha=2.0, **options))


def test_a_base_in_4_bits_has_experts_unless_they_are_left_out_by_name() -> None:
    fields = {**SMALL, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 64}
    model = build_on_meta(AutoConfig.for_model("mixtral", **fields, num_local_experts=4))
    add_adapters(model, Adapters(rank=2, alpha=2.0))
    own = {name for name in base_weights(model, block=64) if "experts" in name}
    assert own == {f"model.layers.{n}.mlp.experts.base_layer.{one}_proj" for n in (0, 1) for one in ("gate_up", "down")}
    assert not [name for name in base_weights(model, ["experts"]) if "experts" in name]


def test_a_weight_is_not_read_without_its_adapter() -> None:
    _, model, _ = _drawn("gpt_oss", ["experts.down_proj"])
    experts = model.model.layers[0].mlp.experts
    assert experts.num_experts == 4
    assert experts.gate_up_proj is experts.base_layer.gate_up_proj  # which has none
    with pytest.raises(AttributeError, match="down_proj has an adapter and is read outside"):
        _ = experts.down_proj


class Names(TorchFunctionMode):
    """Of the functions of torch that code calls."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_tokens_of_experts_are_counted_by_the_name_of_the_layer() -> None:
    """It was that of the module that an adapter stands around."""
    _, model, _ = _drawn("mixtral", "all-linear")
    loads = Loads([model], torch.device("cpu"), every=1)
    with Names() as names:
        model.train()(torch.arange(32)[None])
    assert "topk" in names.called
    assert "scatter_add_" not in names.called  # a derived model would take it for a call of the layer's line
    counted: dict[str, Any] = loads._counted  # pyright: ignore[reportPrivateUsage]
    assert {name: int(own.counts.sum()) for name, own in counted.items()} == {
        f"model.layers.{n}.mlp.experts": 64 for n in range(2)
    }
