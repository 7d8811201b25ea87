"""One checkpoint through its life: trained on one mesh, then on another, adapted, merged, exported and used.

    stages x experts x tensor -> FSDP -> Hugging Face -> LoRA by peft -> merged -> transformers generates

python examples/chain.py FOLDER      (8 small processes train; with `FOLDER 4` experts lie over the tensor axis alone)

Digests, which do not know layouts, prove at each step which tensors have not changed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tangram.checkpoint import digest_of, read_manifest
from tangram.cli import main as command

MODEL = {
    "model_type": "qwen3_moe", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "tie_word_embeddings": False, "max_position_embeddings": 64,
}  # fmt: skip
ADAPTED = ("q_proj", "v_proj", "o_proj")
JOB = """
[model]
path = "{folder}/config.json"
freeze = ["model.embed_tokens.weight", "*.mlp.gate.weight"]    # embeddings and routers stay as they are
[data]
tokenizer = "bytes"
cache = "{folder}/tokens"
sequence = 32
global_batch = 8
micro_batch = 2
[[data.sources]]
path = "stdlib"
pattern = "json/*.py"
[optimiser]
lr = 1e-2
schedule = "constant"
[checkpoint]
every_steps = 1
[run]
steps = {steps}
device = "cpu"
"""
WIDE = """
version = 3
mesh = "pp=2 ep={experts} tp=2"
[axes]
pipeline = ["pp"]
expert = ["ep"]
tensor = ["tp"]
[pipeline]
stages = [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]]
[layouts.parameters]
"*.[qkv]_proj.weight" = "(heads/tp d) h"
"*.o_proj.weight" = "h (heads/tp d)"
"*.experts.*" = "experts/ep/tp _ _"
"*embed_tokens.weight" = "v/tp h"
"lm_head.weight" = "v/tp h"
"*" = "..."
[layouts.sizes]
d = 8
[layouts.marks]
"{{*.q_proj,*.embed_tokens,lm_head}}.weight" = "out/tp in"
"*.experts.{{gate_up_proj,down_proj}}" = "experts/ep/tp _ _"
"{{model.embed_tokens,model.norm}}" = "b s/ep h"
"model.layers.*" = "b s/ep/tp h"
"""
NARROW = """
version = 3
mesh = "dp=2"
[axes]
data = ["dp"]
[layouts.parameters]
"*" = "_/dp ..."
"""


def tangram(*arguments: object) -> None:
    """`tangram` as on the command line."""
    assert command([*map(str, arguments)]) == 0


def digests(checkpoint: Path) -> dict[str, str]:
    """Of the model's tensors in one of Tangram's checkpoints."""
    tensors = read_manifest(checkpoint).tensors
    return {name.removeprefix("model."): t.digest for name, t in tensors.items() if name.startswith("model.")}


def train(folder: Path, processes: int) -> Path:
    """A step on a mesh of stages, experts and tensor parts, and one more with FSDP on two processes."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    wide = WIDE.format(experts=processes // 4)
    (folder / "wide.toml").write_text(wide + JOB.format(folder=folder, steps=1))
    (folder / "narrow.toml").write_text(NARROW + JOB.format(folder=folder, steps=2))
    tangram("train", folder / "wide.toml", "--out", folder / "run")
    tangram("train", folder / "narrow.toml", "--resume", "--out", folder / "run")
    first, second = (folder / "run" / "checkpoint" / f"step-{step:08}" for step in (1, 2))
    same = {name for name, one in digests(first).items() if digests(second)[name] == one}
    assert same == {name for name in digests(first) if "embed_tokens" in name or name.endswith("mlp.gate.weight")}
    meshes = ", then ".join(str(read_manifest(one).mesh) for one in (first, second))
    print(f"trained: {meshes}; not changed: the {len(same)} frozen tensors of {len(digests(first))}")
    return second


def adapt(folder: Path, exported: Path) -> list[int]:
    """Two steps of LoRA on attention, by peft alone; what the model with the adapter generates then."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(exported)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=64, target_modules=list(ADAPTED)))
    optimiser = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=0.1)
    tokens = torch.randint(0, 256, (4, 32))
    for _ in range(2):  # B begins at zero, so A moves in the second
        peft(input_ids=tokens, labels=tokens).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    peft.save_pretrained(str(folder / "adapter"))
    return generated(peft)


def generated(model: Any) -> list[int]:
    """What a model adds to ten tokens, greedily."""
    asked = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.eval().generate(input_ids=torch.arange(65, 75)[None], **asked)[0, 10:].tolist()


def tune(folder: Path, trained: Path) -> None:
    """From the trained checkpoint to a model that transformers runs, with an adapter merged into it."""
    tangram("checkpoint", "convert", trained, folder / "exported", "--to", "hf")
    expected = adapt(folder, folder / "exported")
    adapter = ("--adapter", folder / "adapter")
    tangram("checkpoint", "convert", trained, folder / "merged", "--to", "hf", *adapter)
    assert generated(AutoModelForCausalLM.from_pretrained(folder / "exported")) != expected
    assert generated(AutoModelForCausalLM.from_pretrained(folder / "merged")) == expected
    before = digests(trained)
    after = {
        name: digest_of(one)
        for name, one in safetensors.torch.load_file(folder / "merged" / "model.safetensors").items()
    }
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {name for name in before if name.split(".")[-2] in ADAPTED}
    same = len(before) - len(changed)
    print(f"merged: {len(changed)} tensors with an adapter; {same} others have the digests of {trained.name}")
    print(f"generated: {expected}")


def main(folder: Path, processes: int) -> None:
    folder.mkdir(parents=True)
    tune(folder, train(folder, processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 8)
