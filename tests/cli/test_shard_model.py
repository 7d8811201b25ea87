"""`tangram shard MODEL`: what a user types, and what is printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

import tangram
from tangram.cli import main
from tangram.errors import UserError
from tangram.sharding import read_marks
from tests.public.parallelize_tasks import sees_images

FIELDS = ("num_hidden_layers=2", "hidden_size=64", "vocab_size=128")
SMALL = (*(word for field in FIELDS for word in ("--set", field)), "--batch", "2", "--sequence", "16")

TWO = ("qwen3", "--mesh", "tp=2", *SMALL)
CHOOSE = ("qwen3", "--mesh", "dp=2 tp=2", *SMALL, "--choose", "--cluster", "h100-8x8")


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["shard", *words]) == code
    answer = capsys.readouterr()
    return answer.err if code else answer.out


def test_the_marks_that_come_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [" ".join(line.split()) for line in said(capsys, "qwen3", "--mesh", "tp=2", *SMALL).splitlines()]
    assert any(line.startswith("model.layers.{0..1}.self_attn.o_proj.weight 64 x 4096 _ _/tp") for line in lines)
    assert any("model.layers.{0..1}" in line and "reduce-scatter / all-gather tp 2" in line for line in lines)
    assert "layouts of" in lines[-1]


def test_without_marks_transformers_own_plan_counts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [" ".join(line.split()) for line in said(capsys, "qwen2", "--mesh", "tp=2", *SMALL[:8]).splitlines()]
    assert any(
        line.startswith("model.layers.{") and ".self_attn.o_proj.weight" in line and "_ _/tp" in line for line in lines
    )


def test_an_encoder_with_a_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("prophetnet", "--mesh", "tp=2", *(w for one in PROPHETS for w in ("--set", one)), "--sequence", "8")
    marks = ("--mark", "*.{query,key,value}_proj.weight: o/tp i", "--mark", "*.out_proj.weight: o i/tp")
    told = said(capsys, *words, *marks)
    assert "prophetnet.decoder.layers.0.cross_attn.query_proj.weight" in told
    hint = said(capsys, *words, code=2)
    assert "nor has transformers a tensor-parallel plan of it" in hint
    assert "--choose --cluster" in hint


PROPHETS = ("num_encoder_layers=1", "num_decoder_layers=1")


def test_marks_are_chosen_by_the_command_that_a_model_without_any_is_sent_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.device("meta"):
        model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(num_hidden_layers=1))
        ids = torch.ones(2, 64, dtype=torch.long)
    with pytest.raises(UserError, match="no mark names the axis tp") as error:
        tangram.derive(model, "tp=2", inputs={"input_ids": ids, "labels": ids})
    command = shlex.split(str(error.value).split("`")[1])
    assert command[:7] == ["tangram", "shard", "modernbert", "--batch", "2", "--sequence", "64"]
    typed = [str(tmp_path / "own.marks") if word == "FILE" else word for word in command[2:]]
    said(capsys, *typed, "--set", "num_hidden_layers=1")
    marks = read_marks(tmp_path / "own.marks")
    assert tangram.derive(model, "tp=2", marks, inputs={"input_ids": ids, "labels": ids}).parameters


def test_a_type_without_any_such_head_is_made_by_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "dpr"}')
    assert "give the FILE.py:function that makes it" in said(capsys, str(tmp_path), "--mesh", "tp=2", code=2)


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marks = tmp_path / "my.marks"
    marks.write_text("# mine\n*.q_proj.weight: out/tp in\nmodel.layers.*: b/dp s/tp h\n")
    words = ("model", "qwen3", "--mesh", "dp=2 tp=2", "--marks", str(marks), *SMALL, "--json")
    found = json.loads(said(capsys, *words))
    assert found["parameters"]["model.layers.1.self_attn.q_proj.weight"] == "_=4096/tp _=64"
    assert found["modules"]["model.layers.1"] == "_=2/dp _=16/tp _=64"
    each = [(m["forward_bytes"] + m["backward_bytes"]) * m["times"] for m in found["moved"]]
    assert found["bytes"] == pytest.approx(sum(each))


def test_a_model_that_looks_at_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": 32, **small}))
    found = json.loads(said(capsys, str(tmp_path), "--mesh", "tp=2", "--batch", "2", "--json"))
    assert found["parameters"]["vit.layers.1.mlp.fc2.weight"] == "_=32 _=48/tp"
    assert found["modules"]["vit.layers.1"].startswith("_=2/tp _=5 ")  # 32 x 32 in patches of 16, and one more


def test_a_model_of_images_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = small | {"model_type": "llama", "vocab_size": 96, "num_key_value_heads": 2}
    seen = small | {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
    fields = {"model_type": "llava", "text_config": text, "vision_config": seen, "image_token_index": 90}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    words = (str(tmp_path), "--mesh", "dp=2 tp=2", "--batch", "4", "--sequence", "24")
    marks = (
        "*.layers.*.{q,k,v}_proj.weight: o/tp i",
        "*.embed_tokens: b/dp s h",
        "*.vision_tower.embeddings: b/dp s h",
    )
    found = json.loads(said(capsys, *words, *(word for mark in marks for word in ("--mark", mark)), "--json"))
    for tower in ("language_model", "vision_tower.encoder"):
        assert found["parameters"][f"model.{tower}.layers.0.self_attn.q_proj.weight"] == "_=32/tp _=32"
        assert found["modules"][f"model.{tower}.layers.0"].startswith("_=4/dp")
    tiled = {"model_type": "llava_next", "image_grid_pinpoints": [[96, 96], [32, 64], [64, 32]]}  # 1 + 2 tiles
    (tmp_path / "config.json").write_text(json.dumps(fields | tiled))
    found = json.loads(said(capsys, str(tmp_path), "--mesh", "tp=2", "--batch", "4", "--sequence", "24", "--json"))
    assert found["modules"]["model.vision_tower.encoder.layers.0"].startswith("_=12")
    assert "a smolvlm model reads pixel_attention_mask" in said(capsys, "smolvlm", "--mesh", "tp=2", code=2)


def test_a_model_that_reads_how_large_its_images_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = cast(Any, sees_images()).config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = (str(tmp_path), "--mesh", "tp=2", "--batch", "2", "--sequence", "24", "--json")
    found = json.loads(said(capsys, *words))
    assert found["parameters"]["model.language_model.layers.0.mlp.up_proj.weight"] == "_=48/tp _=32"
    assert "model.visual.blocks.1" in found["modules"]


OWN = """
import torch

def model(batch, sequence):
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return net, {"input": torch.zeros(batch, sequence, 8)}

def nothing(batch, sequence):
    return None

def broken(batch, sequence):
    raise ValueError("no luck")
"""


def test_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    given = ("--mesh", "tp=2", "--batch", "2", "--sequence", "6")
    mark = ("--mark", "0.weight: out/tp in")
    found = json.loads(said(capsys, f"{file}:model", *given, *mark, "--json"))
    assert found["parameters"] == {
        "0.weight": "_=16/tp _=8",
        "0.bias": "_=16/tp",
        "2.weight": "_=4 _=16/tp",
        "2.bias": "_=4",
    }
    for name, sentence in (
        ("nothing", "own.py:nothing gives no pair of a module and its keyword arguments"),
        ("broken", "own.py:broken does not run: ValueError: no luck"),
        ("missing", "own.py has no function missing"),
    ):
        assert sentence in said(capsys, f"{file}:{name}", *given, *mark, code=2)
    assert "no marks come with Tangram for a model of one's own" in said(capsys, f"{file}:model", *given, code=2)
    assert "leave out --set" in said(capsys, f"{file}:model", *given, "--set", "a=1", code=2)
    told = said(capsys, f"{file}:model", *given, "--choose", "--cluster", "h100-8x8", "--seconds", "0")
    assert "nothing to compare it with: no marks come with Tangram for a model of one's own\n" in told


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("qwen33", "--mesh", "tp=2"),
            '"qwen33" is no preset, no directory or configuration file, no type of model, and no F',
        ),
        (("qwen3", "--mesh", "tp=2", "--set", "hiden_size=3"), 'has no field "hiden_size"'),
        (("no.py:model", "--mesh", "tp=2", "--mark", "a: b/tp"), "no.py:model: there is no file no.py"),
        (("ctrl", "--mesh", "tp=2"), "no marks come with Tangram for a ctrl model"),
        (("qwen3", "--mesh", "tp"), '"tp" is no mesh: write each axis with its number of ranks, as in "dp=2 tp=4"'),
        (("qwen3", "--mesh", "tp=x"), "is no mesh at '=x'"),
        (("qwen3", "--mesh", ""), "the mesh has no axis"),
        (("qwen3", "--mesh", "tp=2 tp=2"), "an axis stands twice"),
        (("qwen3", "--mesh", "tp=2", "--mark", "q_proj", *SMALL), "a mark is written as `name: layout`"),
        (("qwen3", "--mesh", "tp=2", "--marks", "/no/file"), "cannot be read"),
        (("qwen3", "--mesh", "tp=2", "--marks", "/dev/null"), "there is no mark in "),
        (("qwen3", "--mesh", "tp=2", "--mark", "a: o/tp ("), "'a: o/tp (' cannot be read: the end of the text is not"),
        (
            ("qwen3", "--mesh", "tp=2", *SMALL, "--set", "num_key_value_heads=5"),
            "cannot be captured: transformers/",
        ),
        ((*TWO, "--mark", "*.q_prj.weight: o/tp i"), "names no tensor of the model; the nearest is model.layers."),
        ((*TWO, "--mark", "{model.norm,lm_head}.weight: o/tp i"), "names unlike tensors, model.norm.weight of 1 dims"),
        ((*TWO, "--mark", "lm_head.weight: o/dp i"), "names the axis dp, which is none of the mesh `tp=2`"),
        ((*TWO, "--mark", "lm_head.weight: o/tp"), "does not fit lm_head.weight: 'o/tp' has 1 dims, but the tensor"),
        ((*TWO, "--mark", "lm_head.weight: Shard(0)"), 'takes a layout, and not Shard(0): write "a/tp ..."'),
        ((*TWO, "--mark", "lm_head.weight: P(None, 'tp')"), "not P(None, 'tp'): write \"a b/tp ...\""),
        ((*TWO, "--mark", "lm_head.weight: (o/tp + 8) i"), "knows cuts of factors and of products, no others"),
        (
            ("qwen3", "--mesh", "tp=2", "--cluster", "h100-8x"),
            "there is no cluster 'h100-8x' (did you mean 'h100-8x8'?): there are cpu-2, h100-8x8, and DEVICE-8x32",
        ),
        ((*TWO, "--choose"), "--choose needs a cluster: give --cluster, a file or one of cpu-2, h100-8x8"),
        ((*TWO, "--memory", "80GB"), "--memory limits what is chosen: give --choose, too"),
        ((*TWO, "--write", "my.marks"), "--write writes what is chosen: give --choose, too"),
        ((*CHOOSE, "--job", "job.toml"), "--job is what a plan is written for: give --write with its file, too"),
        (
            (*CHOOSE, "--write", "/nowhere/my.marks"),
            "the file cannot be written to /nowhere/my.marks: give a file in a fo",
        ),
        ((*CHOOSE, "--write", "my.toml", "--job", "no.toml"), "there is no plan file no.toml"),
        ((*CHOOSE, "--memory", "80 parsecs"), '"80 parsecs" is no memory: write a number above 0 with one of MB, GB'),
        ((*CHOOSE, "--memory", "0GB"), '"0GB" is no memory'),
        ((*CHOOSE, "--memory", "1MB"), "the model does not fit over `dp=2 tp=2` into 0.001 GB a rank: the least it"),
        ((*CHOOSE, "--why", "lm_head.weight"), "--why and --diff are of plans that follow from marks: leave out --ch"),
        (
            (*CHOOSE, "--mark", "*.q_proj.weight: o/tp i", "--mark", "*.0.*.q_proj.weight: o i/tp"),
            "contradict each other on model.layers.0.self_attn.q_proj.weight over tp",
        ),
        (
            ("qwen3", "--mesh", "dp=3 ep=5 tp=5", "--choose", "--cluster", "h100-8x8"),
            "has 75 ranks and the cluster h100-8x8 64: take a smaller mesh",
        ),
        (("qwen3", "--mesh", "dp=16 tp=8", "--cluster", "h100-8x8"), "has 64 ranks, and an axis spans 128: take a sm"),
        (
            ("qwen3", "--mesh", "tp=2 | x=2", *SMALL, "--mark", "lm_head.weight: o/tp i/x"),
            "axes tp and x are not",
        ),
    ],
)
def test_mistakes_are_one_sentence(words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = said(capsys, *words, code=2)
    assert sentence in error
    assert error.count("\n") == 1


def test_a_cluster_gives_the_rates(capsys: pytest.CaptureFixture[str]) -> None:
    plain, same = (json.loads(said(capsys, *TWO, *words, "--json")) for words in ((), ("--cluster", "h100-8x8")))
    assert plain["moved"] == same["moved"]
    assert plain["parameters"] == same["parameters"]


def test_a_plan_is_chosen_beside_that_of_the_marks(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [" ".join(line.split()) for line in said(capsys, *CHOOSE).splitlines()]
    assert any(line.startswith("model.layers.{0..1}.self_attn.o_proj.weight 64 x 4096") for line in lines)
    assert any(line.startswith("from the model's marks") for line in lines)
    assert lines[-1].startswith("the best there is within 80 GB, by this model; chosen in ")
    found = json.loads(said(capsys, *CHOOSE, "--json"))
    assert 0 < found["bound"] <= found["chosen"]["seconds"] <= found["marked"]["seconds"]
    assert found["chosen"]["bytes"] <= found["memory"] == 80e9
    assert found["marks"] == []


def test_a_choice_is_written_as_marks_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marks = tmp_path / "chosen.marks"
    words = ("qwen3", "--mesh", "dp=2", *SMALL, "--batch", "1024")  # as much work as is worth a collective
    chosen = json.loads(said(capsys, *words, "--choose", "--cluster", "h100-8x8", "--write", str(marks), "--json"))
    assert 0 < len(chosen["written"]) < 8
    assert [line for line in marks.read_text().splitlines() if not line.startswith("#")] == chosen["written"]
    derived = json.loads(said(capsys, *words, "--marks", str(marks), "--json"))
    assert derived["parameters"] == chosen["parameters"]
    assert derived["bytes"] == pytest.approx(chosen["bytes"])


def test_a_model_without_marks_is_chosen_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("ctrl", "--mesh", "tp=2", "--set", "n_layer=2", "--batch", "2", "--sequence", "16", "--choose")
    words += ("--set", "embd_pdrop=0.0", "--set", "resid_pdrop=0.0")
    told = said(capsys, *words, "--cluster", "h100-8x8", "--seconds", "0")
    assert "nothing to compare it with: no marks come with Tangram for a ctrl model" in told


def test_why(capsys: pytest.CaptureFixture[str]) -> None:
    node = "model.layers.{0..1}.self_attn.o_proj.weight"
    said_of = said(capsys, "qwen3", "--mesh", "tp=2", *SMALL, "--why", node)
    lines = [" ".join(line.split()) for line in said_of.splitlines()]
    assert lines[0] == f"{node}: 64 x 4096 as _ _/tp, one of 2 alike"
    assert any("mm m k/tp, k/tp n -> m n sum:tp modeling_qwen3.py:" in line for line in lines)
    assert any(line.startswith("tp _ _/tp as derived") for line in lines)
    found = json.loads(said(capsys, "qwen3", "--mesh", "tp=2", *SMALL, "--why", node, "--json"))
    assert found["chains"][0]["tensor"] == "model.layers.{0..1}.self_attn.q_proj.weight"
    assert "the nearest is lm_head" in said(capsys, "qwen3", "--mesh", "tp=2", *SMALL, "--why", "lm_haed", code=2)


def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    told = said(capsys, "qwen3", "--mesh", "tp=2", *SMALL, "--html", str(file))
    assert told.startswith("a rank receives ")
    assert told.endswith(f'all of it is in "{file}", for a browser\n')
    assert "model.layers.{0..1}.self_attn.q_proj.weight" in file.read_text()
    elsewhere = str(tmp_path / "none" / "plan.html")
    assert "cannot be written" in said(capsys, "qwen3", "--mesh", "tp=2", *SMALL, "--html", elsewhere, code=2)
    both = said(capsys, "qwen3", "--mesh", "tp=2", *SMALL, "--html", str(file), "--why", "lm_head", code=2)
    assert "--why and --html are one at a time" in both


def test_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marks = tmp_path / "whole.marks"
    cut = "{*.q_proj.weight,*.up_proj.weight,model.embed_tokens.weight,lm_head.weight}: out/tp in"
    marks.write_text(f"{cut}\nmodel.layers.*: b s h\n")
    words = ("qwen3", "--mesh", "tp=2", *SMALL, "--diff", "shipped", str(marks))
    lines = [" ".join(line.split()) for line in said(capsys, *words).splitlines()]
    assert "where axis shipped whole.marks a rank receives" in lines
    assert not any("q_proj.weight" in line for line in lines)  # the same
    assert "with shipped, " in lines[-1]
    assert "with whole.marks: " in lines[-1]
    found = json.loads(said(capsys, *words, "--json"))
    assert sum(one["other_bytes"] - one["one_bytes"] for one in found["moves"]) == pytest.approx(
        found["bytes"][1] - found["bytes"][0]
    )
    assert "cannot be read" in said(capsys, *words[:-1], "/no/file", code=2)
    assert "leave out --mark and --marks" in said(capsys, *words, "--marks", str(marks), code=2)


def test_contradictory_marks(capsys: pytest.CaptureFixture[str]) -> None:
    marks = ("--mark", "*.q_proj.weight: o/tp i", "--mark", "*.q_proj.weight: o i/tp")
    assert main(["shard", "qwen3", "--mesh", "tp=2", *SMALL, *marks]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("  mm in model.layers.{0..1}.self_attn.q_proj (modeling_qwen3.py:")
    assert [line.split(":")[0] for line in lines[-3:-1]] == [
        "  without 1, so that it lies as _ _/tp",
        "  without 2, so that it lies as _/tp _",
    ]
    assert lines[-1].startswith("error: the marks `*.q_proj.weight: o/tp i` and `*.q_proj.weight: o i/tp` contradict ")
    assert len(lines) < 15
    assert main(["shard", "qwen3", "--mesh", "tp=2", *SMALL, *marks, "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["conflict"]["fixes"]) == 2
