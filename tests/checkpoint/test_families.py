"""Families of models: the same bits there and back, what transformers' own classes write, and what does not fit."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.checkpoint.conversion.convert import restructure
from tangram.checkpoint.conversion.find_mapping import choose
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.inspect.family_coverage import cover
from tangram.cli import main
from tangram.errors import UserError
from tangram.layout import Region
from tangram.models.families import (
    families,
    family_named,
    family_of,
    mapping_of,
    megatrons_embedding,
    read_family,
)
from tangram.relayout import BoundMapping, Piece, PieceIndex, TensorSpec, execute, plan
from tests.checkpoint.inventing import LATE, PREFIXES, TIED, invented
from tests.checkpoint.peers.models import HF, save

FOLDER = Path(__file__).parents[2] / "src/tangram/models/families"
NAMES = [family.name for family in families()]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    assert set(a) == set(b)
    return all(a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(a[n], b[n]) for n in a)


def held(values: Mapping[str, Tensor]) -> OpenCheckpoint:
    """Tensors in memory as a checkpoint is opened."""
    pieces = tuple(Piece(None, name, Region.full(tuple(t.shape))) for name, t in values.items())
    specs = {name: TensorSpec(tuple(t.shape), str(t.dtype)) for name, t in values.items()}
    return OpenCheckpoint("memory", Path("memory"), specs, pieces, lambda _, name: values[name], lambda: None)


def cut(values: Mapping[str, Tensor], ranks: int, dim: int) -> OpenCheckpoint:
    """The same as ranks have it: each a part of every tensor along a dim, uneven where it does not divide.

    What TP, EP and PP ranks write of a torch_dist are such parts: of rows, columns, experts or layers.
    """
    whole = held(values)
    pieces: list[Piece] = []
    for name, spec in whole.specs.items():
        at = min(dim, len(spec.shape) - 1)
        step = max(1, -(-spec.shape[at] // ranks)) if spec.shape else 1
        for first in range(0, spec.shape[at], step) if spec.shape else ():
            last = min(first + step, spec.shape[at])
            offsets = [first if i == at else 0 for i in range(len(spec.shape))]
            sizes = [last - first if i == at else n for i, n in enumerate(spec.shape)]
            pieces.append(Piece((at, first, last), name, Region.box(offsets, sizes)))
        if not spec.shape:
            pieces.append(Piece((0, 0, 1), name, Region.full(())))

    def read(place: Any, name: str) -> Tensor:
        at, first, last = place
        return values[name].narrow(at, first, last - first) if values[name].dim() else values[name]

    return replace(whole, pieces=tuple(pieces), read=read)


def moved(source: OpenCheckpoint, bound: BoundMapping) -> dict[str, Tensor]:
    """What a mapping makes of it."""
    made = {name: torch.empty(spec.shape) for name, spec in bound.target.specs.items()}
    pieces = [Piece(None, name, Region.full(tuple(t.shape))) for name, t in made.items()]
    steps = plan(bound, PieceIndex(source.pieces, bound.source), pieces)
    execute(steps, source.read, {(None, name): t for name, t in made.items()})
    return made


# ------------------------------------------------------------ any configuration


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_there_and_back_for_any_configuration(name: str, data: st.DataObject) -> None:
    """Heads, groups, experts, vocabulary, layers, biases and ties: the same bits, whoever's names and padding."""
    there_and_back(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_there_and_back_for_many_configurations(name: str, data: st.DataObject) -> None:
    there_and_back(name, data)


def there_and_back(name: str, data: st.DataObject) -> None:
    def some(first: int, last: int) -> int:
        return data.draw(st.integers(first, last))

    family = family_named(name)
    layers, groups, size, experts, words = some(1, 4), some(1, 3), some(1, 3), some(1, 12), some(1, 9)
    late, predictor, local = name in LATE, data.draw(st.booleans()), data.draw(st.booleans())
    divisor = data.draw(st.sampled_from([1, 8, 64]))
    config = {
        "architectures": list(family.architectures[:1]), "num_hidden_layers": layers, "num_key_value_heads": groups,
        "num_attention_heads": groups * some(1, 3), "head_dim": size, "vocab_size": words, "num_experts": experts,
        "first_k_dense_replace": min(some(0, 3), layers),
    }  # fmt: skip
    if name == "gpt2":
        config = {"architectures": config["architectures"], "n_layer": layers, "n_head": groups, "vocab_size": words}
    if name == "qwen3_next":
        kinds = data.draw(
            st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=layers, max_size=layers)
        )
        heads = some(1, 3)
        config |= {
            "layer_types": kinds, "linear_num_key_heads": heads, "linear_num_value_heads": heads * some(1, 3),
            "linear_key_head_dim": some(1, 3), "linear_value_head_dim": some(1, 3),
        }  # fmt: skip
    if not late and data.draw(st.booleans()):
        config["tie_word_embeddings"] = data.draw(st.booleans())
    if name in ("llama", "qwen3", "glm4_moe") and data.draw(st.booleans()):
        config |= {"attention_bias": True, "mlp_bias": name == "llama", "use_qk_norm": True}
    if name in ("llama", "qwen3", "gpt2", "mixtral") and data.draw(st.booleans()):
        kind = "ForSequenceClassification"
        config["architectures"] = [re.sub("ForCausalLM|LMHeadModel", kind, config["architectures"][0])]
    shapes = invented(name, config, size, experts, predictor, release := some(0, 1))
    values = {key: torch.randn(shape) for key, shape in shapes.items()}
    if name == "qwen3_next":  # subtracting 1 and adding it again keeps these
        values = {key: one.mul(256).round().div(256) for key, one in values.items()}
    if name in PREFIXES and data.draw(st.booleans()):  # as newer configurations say it
        own = ("architectures", "tie_word_embeddings")
        inner = {key: config.pop(key) for key in [*config] if key not in own}
        config["text_config"] = inner
    if late and predictor:  # its copies
        values[f"model.layers.{layers}.embed_tokens.weight"] = values["model.embed_tokens.weight"].clone()
        values[f"model.layers.{layers}.shared_head.head.weight"] = values["lm_head.weight"].clone()
    assert family_of(config) == family
    hf = held(values)
    there = moved(hf, choose(hf, "torch_dist", config, local=local, divisor=divisor).bound)
    core = cut(there, some(1, 4), some(0, 2))
    rows = core.specs[megatrons_embedding(core.specs) or ""].shape[0]
    assert rows % divisor == 0
    assert rows - words < divisor
    back = moved(core, choose(core, "hf", config).bound)
    if release and len(PREFIXES.get(name, ())) > 1:  # the way back has the names of the first release
        model, tower = PREFIXES[name][1], PREFIXES[name][0]
        back = {renamed(key, tower, model): one for key, one in back.items()}
    assert same(back, values)
    for one in (hf, core):
        fit = cover(one, family, config)
        assert fit.complete, fit
        assert fit.covered == len(one.specs)


def renamed(key: str, before: tuple[str, str], after: tuple[str, str]) -> str:
    """A name of one release as another has it."""
    pairs = [*zip(before, after, strict=True)]
    pairs.append(tuple(tower.replace("vision_tower", "multi_modal_projector") for tower in (before[1], after[1])))
    return next((new + key.removeprefix(old) for old, new in pairs if key.startswith(old)), key)


# ------------------------------------------------------------ transformers' own


def test_a_family_is_a_short_file() -> None:
    files = [*FOLDER.glob("*.toml"), *FOLDER.glob("shared/*.toml")]
    assert {file.stem for file in FOLDER.glob("*.toml")} == set(NAMES)
    assert all(len(file.read_text().splitlines()) < (60 if file.stem == "qwen3_next" else 40) for file in files)
    architectures = [one for family in families() for one in family.architectures]
    assert len(set(architectures)) == len(architectures)


def test_each_architecture_is_proved_with_transformers_own_class(tmp_path: Path) -> None:
    """Random weights of each row go there and back with the same bits, and transformers loads them."""
    proved: set[str] = set()
    for row in HF:
        model = save(row, tmp_path / row / "hf", torch.bfloat16)
        source = open_any(tmp_path / row / "hf")
        config = json.loads(source.small["config.json"])
        proved.update(config["architectures"])
        restructure(
            source, choose(source, "torch_dist", config, divisor=96).bound, tmp_path / row / "core", "torch_dist"
        )
        core = open_any(tmp_path / row / "core")
        back = choose(core, "hf", config).bound
        restructure(core, back, tmp_path / row / "back", "hf", small=source.small)
        before, after = (load_file(tmp_path / row / side / "model.safetensors") for side in ("hf", "back"))
        assert same(before, after), row
        loaded, told = type(model).from_pretrained(tmp_path / row / "back", output_loading_info=True)
        assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (row, told)
        own = loaded.state_dict()  # in which transformers may keep a tensor in more bits
        assert all(torch.equal(own[key].to(t.dtype), t) for key, t in model.state_dict().items()), row
    heads = {"LlamaForSequenceClassification"}  # the head of any family; GPT-2 lists its own
    assert proved == {one for family in families() for one in family.architectures} | heads


def test_what_a_configuration_means_that_does_not_say_it() -> None:
    """Published Gemmas say nothing of ties."""
    for family in families():
        config = {"num_hidden_layers": 1, "vocab_size": 3, "num_attention_heads": 1, "head_dim": 1}
        config |= dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"), 1)
        config |= {"linear_key_head_dim": 1, "linear_value_head_dim": 1}
        text = mapping_of(family, {**config, "first_k_dense_replace": 0}).text
        assert ("lm_head" in text) == (family.name not in TIED), family.name


# ------------------------------------------------------------ what does not fit


def told(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> Any:
    capsys.readouterr()
    assert main(["checkpoint", "family", *map(str, arguments)]) == code
    out = capsys.readouterr()
    return json.loads(out.out) if "--json" in arguments else out.out + out.err


def test_what_a_family_does_not_name_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = save("qwen2", tmp_path / "hf").state_dict()
    convert = ["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "core"), "--to", "torch_dist"]
    assert main(convert) == 0
    assert "27 named, 0 not, 0 missing\n" in told(capsys, 0, tmp_path / "hf")
    for source, names, bias in (("hf", "Hugging Face", 6), ("core", "Megatron-core", 2)):
        fit = told(capsys, 1, tmp_path / source, "llama", "--json")
        assert (fit["family"], fit["names"], fit["whole"]) == ("llama", names, False)
        assert fit["missing"] == []
        assert len(fit["uncovered"]) == bias
        assert all(name.endswith(".bias") for name in fit["uncovered"])
    text = told(capsys, 1, tmp_path / "core", "mixtral")
    assert "missing    decoder.layers.1.mlp.router.weight" in text
    assert "not named  decoder.layers.1.mlp.linear_fc2.weight" in text

    gone = "model.layers.1.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != gone} | {"x": torch.ones(1)}, tmp_path / "hf/model.safetensors")
    fit = told(capsys, 1, tmp_path / "hf", "--json")
    assert (fit["missing"], fit["uncovered"], fit["covered"]) == ([gone], ["x"], 26)
    save_file({n: t[:7] if n == gone else t for n, t in tensors.items()}, tmp_path / "hf/model.safetensors")
    assert "the tensors of a family are alike" in told(capsys, 1, tmp_path / "hf")


def test_experts_are_counted_by_those_that_are_there(tmp_path: Path) -> None:
    save("mixtral", tmp_path / "hf")
    source = open_any(tmp_path / "hf")
    config = json.loads(source.small["config.json"])
    gone = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    less = replace(source, specs={name: spec for name, spec in source.specs.items() if name != gone})
    assert cover(less, family_of(config), config).missing == (gone,)
    none = replace(source, specs={name: spec for name, spec in source.specs.items() if ".experts." not in name})
    assert "model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight" in cover(none, family_of(config), config).missing


def test_codes_of_gpt_oss_without_a_configuration_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = save("gpt_oss", tmp_path / "hf").state_dict()
    blocks = {n: t for n, t in tensors.items() if not n.endswith("_proj") or ".experts." not in n}
    for name in tensors.keys() - blocks.keys():
        blocks[f"{name}_blocks"] = torch.zeros(4, 8, 1, 16, dtype=torch.uint8)
        blocks[f"{name}_scales"] = torch.zeros(4, 8, 1, dtype=torch.uint8)
    save_file(blocks, tmp_path / "hf/model.safetensors")
    assert main(["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "x"), "--to", "torch_dist"]) == 2
    assert "config says how model.layers.0.mlp.experts.down_proj_blocks is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hf", "nowhere"], "--family nowhere: there is no such file, and families are deepseek_v3, gemma"),
        (["alone"], "there is no config.json, which says what the model is: give --config DIR"),
        (["nothing"], "is not there"),
        (["hf", "own.toml"], "the family own includes nothing; there are decoder, ends, experts, gated, heads"),
        (["hf", "part.toml"], "the family part has a [[part]] without a mapping"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text('architectures = ["A"]\ninclude = ["nothing"]\n')
    (tmp_path / "part.toml").write_text('architectures = ["A"]\npart = [{ when = "x" }]\n')
    for folder in ("hf", "alone"):
        (tmp_path / folder).mkdir()
        save_file({"a": torch.ones(1)}, tmp_path / folder / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    said = told(capsys, 2, *arguments)
    assert words in said
    assert said.count("\n") == 1


def test_ones_own_tables_win_over_those_that_are_included(tmp_path: Path) -> None:
    """Words and defaults of a file of one's own, and `or` between conditions."""
    (tmp_path / "own.toml").write_text(
        'architectures = ["A"]\ninclude = ["decoder", "gated"]\nwords = { mlp_norm = "ln_2" }\n'
        'defaults = { tie_word_embeddings = true }\n[[part]]\nwhen = "a and b or not c"\nmapping = "x -> y"\n'
    )
    own = read_family(tmp_path / "own.toml")
    config = {"num_hidden_layers": 1, "vocab_size": 3, "c": 1}
    text = mapping_of(own, config).text
    assert "model.layers.{l}.ln_2.weight -> decoder.layers.{l}.mlp.linear_fc1.layer_norm_weight" in text
    assert "lm_head" not in text
    assert "x -> y" not in text
    assert "x -> y" in mapping_of(own, {**config, "a": 1, "b": 1}).text
    assert "x -> y" in mapping_of(own, {**config, "c": 0}).text
    assert "lm_head" in mapping_of(own, {**config, "tie_word_embeddings": False}).text
    (tmp_path / "own.toml").write_text('architectures = ["A"]\npart = [{ mapping = "$no -> y" }]\n')
    with pytest.raises(UserError, match="which is no size and no word of it"):
        mapping_of(read_family(tmp_path / "own.toml"), config)


# ------------------------------------------------------------ torchtitan's names


@pytest.mark.parametrize("release", ["0.2", "0.3"])
@pytest.mark.parametrize("row", ["llama", "smollm3-as-llama", "qwen3_moe"])
def test_what_torchtitan_saved_becomes_transformers(row: str, release: str, tmp_path: Path) -> None:
    """Its names of two releases, and Llama's queries and keys turned in pairs; `make interop` asks its own adapters."""
    tied = row.startswith("smollm3")
    kind = "llama" if tied else row
    model = save(kind, tmp_path / "hf", **({"tie_word_embeddings": True} if tied else {}))
    before, config = load_file(tmp_path / "hf/model.safetensors"), model.config
    titan = as_torchtitan(before, config, release)
    if tied:
        titan["output.weight" if release == "0.2" else "lm_head.weight"] = titan["tok_embeddings.weight"]
    torch.save(titan, tmp_path / "titan.pt")
    convert = ["checkpoint", "convert", str(tmp_path / "titan.pt"), str(tmp_path / "back"), "--to", "hf"]
    assert main([*convert, "--config", str(tmp_path / "hf")]) == 0
    assert same(load_file(tmp_path / "back/model.safetensors"), before)


def as_torchtitan(tensors: Mapping[str, Tensor], config: Any, release: str) -> dict[str, Tensor]:
    """Plain indexing and renaming, which no mapping makes."""
    late = release == "0.3"
    parts = {
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "lm_head" if late else "output",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        "self_attn": "attention", "mlp.gate": "moe.router.gate", "model.layers": "layers",
        **{f"{x}_proj": f"{'qkv_linear.' if late else ''}w{x}" for x in "qkv"},
    }  # fmt: skip
    made: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        own = next((n for key, n in heads.items() if f"{key}.weight" in name), None)
        if own and config.model_type == "llama":  # halves of a head become pairs of neighbours
            half = tensor.shape[0] // own // 2
            tensor = tensor[[h * 2 * half + two * half + i for h in range(own) for i in range(half) for two in (0, 1)]]
        if (match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name)) is not None:
            number = {"gate": "w1", "up": "w3", "down": "w2"}[match[3]]
            deep = f"routed_experts.inner_experts.{number}_{'EDF' if number == 'w2' else 'EFD'}"
            experts.setdefault(f"layers.{match[1]}.moe.{deep if late else f'experts.{number}'}", []).append(tensor)
            continue
        for old, new in parts.items():
            name = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, name)
        made[name] = tensor
    return {**made, **{name: torch.stack(some) for name, some in experts.items()}}


def test_a_type_of_model_says_what_its_configuration_leaves_out() -> None:
    """`architectures` may be missing, of GPT-2 and of models with images as of all others."""
    for kind, fields in HF.values():
        base = {key: fields[key] for key in ("vision_config",) if key in fields}
        family = {"ministral": "llama", "mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2"}.get(kind, kind)
        family = "gemma3_vl" if kind == "gemma3" else family
        assert family_of({"model_type": kind, **base}).name == family
