"""Initial weights depend on names and the seed only; a configuration with a wrong word is refused."""

from contextlib import suppress

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.errors import UserError
from tangram.models.building.build import CAUSAL, build_on_meta, make_config, presets
from tangram.models.building.initial import initial_tensors
from tests.sweep.sizes import build, ways

SMALL = {"vocab_size": 11, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 1}


def test_every_preset_builds_without_memory_and_has_its_size() -> None:
    sizes = {}
    for name in presets():
        model = build_on_meta(make_config(name, {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}))
        assert all(parameter.is_meta for parameter in model.parameters())
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
    tables = {  # with a vocabulary of 257, and not of their own
        "llama-3-8b": 2 * (128_256 - 257) * 4096,
        "llama-3-70b": 2 * (128_256 - 257) * 8192,
        "deepseek-v3": 2 * (129_280 - 257) * 7168,
    }
    assert {name: size + tables.get(name, 0) for name, size in sizes.items()} == {
        "qwen3-1m": 1_247_488,
        "qwen3-2m": 1_820_992,
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
        "deepseek-v3": 671_026_404_352,
    }


def test_initial_tensors_depend_on_the_seed_and_nothing_else() -> None:
    config = make_config("qwen3-1m", SMALL)
    before = torch.random.get_rng_state()
    first = {name: tensor.clone() for name, tensor in initial_tensors(config, 7)}
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(3)
    again = dict(initial_tensors(config, 7))
    assert all(torch.equal(first[name], again[name]) for name in first)
    model = build_on_meta(config)
    assert first.keys() == dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    other = dict(initial_tensors(config, 8))
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    layers = [first[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in range(2)]
    assert not torch.equal(*layers)


EXPERTS = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def test_a_tensor_that_nothing_initialises_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("mixtral", **EXPERTS)
    base = next(one for one in type(build_on_meta(config)).__mro__ if "_init_weights" in vars(one))
    monkeypatch.setattr(base, "_init_weights", lambda self, module: None)
    with pytest.raises(RuntimeError, match=r"leaves model\.layers\.0\.mlp\.gate\.weight without an initial value"):
        list(initial_tensors(config, 0))
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_a_constructor_sets_is_kept_where_the_class_initialises_nothing() -> None:
    config = AutoConfig.for_model("apertus", **{key: EXPERTS[key] for key in EXPERTS if "expert" not in key})
    before = torch.random.get_rng_state()
    tensors = {name: tensor.clone() for name, tensor in initial_tensors(config, 0)}
    assert torch.equal(before, torch.random.get_rng_state())
    whole = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    names = [name for name in tensors if name.endswith(("alpha_p", "alpha_n"))]
    assert len(names) == 4
    assert all(torch.equal(tensors[name], whole[name]) for name in names)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in initial_tensors(config, 0))


def test_what_a_module_around_it_initialises_is_made() -> None:
    """Qwen3-Next's mixture sets the weights of its router: drawn anew for each layer, the same for a seed."""
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 8}
    config = AutoConfig.for_model("qwen3_next", **{**EXPERTS, **heads, **kinds, **sizes})
    first, again = (dict(initial_tensors(config, 0)) for _ in range(2))
    gates = [first[f"model.layers.{layer}.mlp.gate.weight"] for layer in range(2)]
    assert all(0.01 < float(gate.std()) < 0.04 for gate in gates)
    assert not torch.equal(*gates)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_tensor_that_a_class_makes_off_meta_is_put_there() -> None:
    config = AutoConfig.for_model("diffllama", **{key: EXPERTS[key] for key in EXPERTS if "expert" not in key})
    model = build_on_meta(config)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("qwen3-1n", {}, 'no model preset "qwen3-1n"; did you mean "qwen3-1m"'),
        ("zzz", {}, "known are deepseek-v3, llama-3-70b, llama-3-8b, qwen3-1m, qwen3-2m"),
        ("qwen3-1m", {"hiden_size": 3}, 'no field "hiden_size" to change; did you mean "hidden_size"'),
        ("qwen3-1m", {"hidden_size": "wide"}, "hidden_size"),
        ("qwen3-1m", {"to_dict": 3}, 'no field "to_dict" to change'),
        ("qwen3-1m", {"dtype": "bfloat16"}, 'no field "dtype" to change'),
    ],
)
def test_a_wrong_word_is_refused(preset: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_config(preset, change)


@pytest.mark.parametrize("change", [{"hidden_size": -32}, {"num_attention_heads": 0}, {"hidden_act": "gelly"}])
def test_a_model_that_cannot_be_built_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match="a qwen3 model cannot be built with these fields"):
        build_on_meta(make_config("qwen3-1m", change))


FIRST_VALUES = {
    "gpt2": "what ends a block is smaller: set by a rule of the block's",
    "mamba": "the bias of steps is set by the mixer",
    "modernbert-decoder": "a truncated normal, which does nothing on meta",
    "afmoe": "the router's gate is zeros",
    "gemma3": "the tower of images is a model with a rule of its own",
    "gemma3n_text": "the inner model's rule asks the inner model for its size",
}


@pytest.mark.parametrize("kind", FIRST_VALUES)
def test_first_values_are_those_of_transformers(kind: str) -> None:
    assert _other_values(kind) == []


@pytest.mark.slow
def test_first_values_of_every_type() -> None:
    built = {kind: found for kind in CAUSAL if (found := _other_values(kind)) is not None}
    assert len(built) > 170
    assert {kind: names for kind, names in built.items() if names} == {}


def _other_values(kind: str) -> list[str] | None:
    """The tensors whose values have another size or mean than those of transformers' own constructor; None of a type
    that it makes none of.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    for way in ways(kind):
        with suppress(Exception):  # whatever a class raises of a tiny configuration
            config = build(way).config
            model = AutoModelForCausalLM.from_config(config)
            break
    else:
        return None
    theirs = {name: x.detach().float() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    ours = {name: x.float() for name, x in initial_tensors(config, 1)}
    return [name for name, x in ours.items() if not _alike(x, theirs[name])]


def _alike(one: Tensor, other: Tensor) -> bool:
    """Of one value, those values; else about as large: each is a draw of some numbers."""
    if not (bool(one.isfinite().all()) and bool(other.isfinite().all())):
        return torch.equal(one, other)
    sizes = one.square().mean().sqrt(), other.square().mean().sqrt()
    return bool((sizes[0] - sizes[1]).abs() <= max(sizes) * max(0.2, 5 / one.numel() ** 0.5))
