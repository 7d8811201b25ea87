"""Paddle's flex checkpoint with Paddle itself on the other side: it saves and we read, we write and it loads.

    make interop

Two ranks are Paddle's own processes (gloo), under its launcher; one rank is this process.
"""

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.formats.paddle.flex import WRITTEN
from tangram.cli import main
from tests.checkpoint.test_paddle import check_saved, same, tensors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    paddle = pytest.importorskip("paddle", reason="the extra `paddle` is not installed")
    import paddle.distributed as dist

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/checkpoint/peers/paddle_save.py"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Paddle reports every step of a load."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def on_two_ranks(logs: Path, *arguments: object) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    command += ["--log_dir", str(logs), str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    said = "\n".join(file.read_text(errors="replace")[-2000:] for file in sorted(logs.glob("workerlog.*")))
    assert done.returncode == 0, said


def convert(*arguments: object) -> None:
    assert main(["checkpoint", "convert", *map(str, arguments)]) == 0


def loaded(folder: Path) -> dict[str, Tensor]:
    """What Paddle loads on one rank, into tensors of other values."""
    specs = open_any(folder).specs
    raw = {_raw(folder, name): name for name in specs}
    wanted: dict[str, Any] = {
        theirs: paddle.full(list(specs[name].shape), 77).astype(specs[name].dtype) for theirs, name in raw.items()
    }
    dist.load_state_dict(wanted, str(folder), safetensors=True)
    return {raw[theirs]: torch_of(tensor, specs[raw[theirs]].dtype) for theirs, tensor in wanted.items()}


def torch_of(tensor: Any, dtype: str) -> Tensor:
    bits = tensor.numpy()  # of bfloat16 its bits, as uint16
    kind = getattr(torch, dtype)
    return torch.from_numpy(bits.copy()).view(kind) if dtype == "bfloat16" else torch.from_numpy(bits.copy()).to(kind)


def _raw(folder: Path, name: str) -> str:
    """The name in the files."""
    from tangram.checkpoint.formats.paddle.flex import SUFFIXES

    param, _, state = name.rpartition(".")
    return f"{param}.{SUFFIXES[state]}" if state in SUFFIXES and param in open_any(folder).specs else name


def test_two_ranks_save_and_we_read_we_write_and_one_and_two_ranks_load(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    on_two_ranks(tmp_path / "logs", "save", tmp_path / "saved")
    check_saved(tmp_path / "saved")

    convert(tmp_path / "saved/pickled", tmp_path / "ours", "--to", "paddle", "--shard-size", "150")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 8
    expected = tensors(open_any(tmp_path / "ours"))
    assert same(expected, tensors(open_any(tmp_path / "saved/safetensors")))
    assert same(loaded(tmp_path / "ours"), expected)

    shapes = {_raw(tmp_path / "ours", n): (list(t.shape), str(t.dtype)[6:]) for n, t in expected.items()}
    (tmp_path / "out").mkdir()
    on_two_ranks(tmp_path / "logs2", "load", tmp_path / "ours", tmp_path / "out", json.dumps(shapes))
    halves = [np.load(tmp_path / "out" / f"{rank}.npz") for rank in (0, 1)]
    for name, tensor in expected.items():
        own = [half[_raw(tmp_path / "ours", name)] for half in halves]
        whole = np.concatenate(own) if own[0].shape != tuple(tensor.shape) else own[0]
        assert np.array_equal(whole, tensor.double().numpy()), name


def test_every_type_that_is_written_is_loaded(tmp_path: Path) -> None:
    made = {name: (torch.arange(6) % 2).reshape(2, 3).to(getattr(torch, name)) for name in sorted(WRITTEN)}
    save_file(made, tmp_path / "model.safetensors")
    (tmp_path / "mine").write_text("{name*} -> {name*}")
    convert(tmp_path, tmp_path / "ours", "--to", "paddle", "--mapping", tmp_path / "mine")
    wanted = {name: paddle.zeros([2, 3]).astype(name) for name in made}
    dist.load_state_dict(wanted, str(tmp_path / "ours"), safetensors=True)
    for name, tensor in wanted.items():
        real = tensor.real() if name.startswith("complex") else tensor
        assert real.astype("float32").numpy().tolist() == [[0, 1, 0], [1, 0, 1]], name


# ------------------------------------------------------------ a model

LAYERS, HEADS, GROUPS, SIZE, HIDDEN, INNER, WORDS = 2, 4, 2, 4, 12, 20, 31
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": SIZE, "vocab_size": WORDS, "tie_word_embeddings": False,
}  # fmt: skip


def model() -> dict[str, Tensor]:
    """Weights by transformers' names and shapes."""
    heads, groups = HEADS * SIZE, GROUPS * SIZE
    shapes = {"model.embed_tokens.weight": (WORDS, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (WORDS, HIDDEN)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        linear = {"q": (heads, HIDDEN), "k": (groups, HIDDEN), "v": (groups, HIDDEN), "o": (HIDDEN, heads)}
        shapes |= {f"{at}self_attn.{key}_proj.weight": shape for key, shape in linear.items()}
        shapes |= {f"{at}self_attn.{key}_norm.weight": (SIZE,) for key in "qk"}
        shapes |= {f"{at}mlp.{key}_proj.weight": (INNER, HIDDEN) for key in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (HIDDEN, INNER)}
        shapes |= {f"{at}{key}_layernorm.weight": (HIDDEN,) for key in ("input", "post_attention")}
    torch.manual_seed(0)
    return {name: torch.randn(shape) * 0.5 for name, shape in shapes.items()}


def logits(library: Any, w: Mapping[str, Any], ids: Any) -> Any:
    """The same decoder in torch and in Paddle: each with its own Linear; without positions."""
    f = library.nn.functional
    n = ids.shape[0]

    def norm(x: Any, name: str) -> Any:
        return x * ((x * x).mean(-1, keepdim=True) + 1e-6) ** -0.5 * w[name]

    x = f.embedding(ids, w["model.embed_tokens.weight"])
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (f.linear(h, w[f"{at}self_attn.{key}_proj.weight"]) for key in "qkv")
        q = norm(q.reshape([n, GROUPS, HEADS // GROUPS, SIZE]), at + "self_attn.q_norm.weight")
        k = norm(k.reshape([n, GROUPS, SIZE]), at + "self_attn.k_norm.weight")
        scores = library.einsum("ngrd,mgd->grnm", q, k) + library.triu(library.full([n, n], -1e9), 1)
        mixed = library.einsum("grnm,mgd->ngrd", f.softmax(scores, -1), v.reshape([n, GROUPS, SIZE]))
        x = x + f.linear(mixed.reshape([n, HEADS * SIZE]), w[at + "self_attn.o_proj.weight"])
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (f.linear(h, w[f"{at}mlp.{key}_proj.weight"]) for key in ("gate", "up"))
        x = x + f.linear(f.silu(gate) * up, w[at + "mlp.down_proj.weight"])
    return library.einsum("nh,vh->nv", norm(x, "model.norm.weight"), w["lm_head.weight"])


def test_a_model_of_transformers_computes_the_same_in_paddle(tmp_path: Path) -> None:
    weights = model()
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/config.json").write_text(json.dumps(CONFIG))
    convert(tmp_path / "hf", tmp_path / "there", "--to", "paddle", "--shard-size", "2KB")
    ids = [3, 30, 7, 7, 0, 12]
    expected = logits(torch, weights, torch.tensor(ids))
    theirs = {name: paddle.to_tensor(tensor.numpy()) for name, tensor in loaded(tmp_path / "there").items()}
    got = logits(paddle, theirs, paddle.to_tensor(ids)).numpy()
    assert np.abs(got - expected.numpy()).max() < 2e-6 * float(expected.abs().max()) * 10
    dist.save_state_dict(theirs, str(tmp_path / "again"), safetensors=True)
    convert(tmp_path / "again", tmp_path / "back", "--to", "hf", "--config", tmp_path / "hf")
    assert same(load_file(tmp_path / "back/model.safetensors"), weights)
