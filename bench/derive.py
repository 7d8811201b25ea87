"""Derivation and choice: how long they take at full size; a step of what is derived beside torch's parallel styles.

The peer of a step is Megatron's plan of a Llama decoder as one writes it with `parallelize_module`: column- and
row-wise products, norms on a part of the sequence, inputs of attention and of the MLP gathered. Both run in the same
processes (two, gloo), on the same values, a forward and a backward at a time in turn; the ratio is that of pairs, with
the interval that holds 95 of 100 medians drawn from them anew. No optimiser, no FSDP: what the two do otherwise.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench._styles import megatron
from tangram.hardware.catalogue.cluster import builtin
from tangram.hardware.measuring.measure import Pairs, Row, paired
from tangram.layout import Mesh
from tangram.models.building.named import named
from tangram.models.capturing.capture import capture
from tangram.models.capturing.fold import folded
from tangram.models.outlines.costs import block_names
from tangram.sharding.choose.choose import choose, priced
from tangram.sharding.derive.derive import WorkRates, derive
from tangram.sharding.derive.layouts import Moved, moved
from tangram.sharding.derive.marking.marks import Mark, marks_of
from tangram.training.mesh.tensor_parallel import parallel
from tangram.training.run.launch import Rank, run_ranks

FULL: dict[str, tuple[str, dict[str, str]]] = {
    "Llama-3-70B": ("llama", {"num_hidden_layers": "80", "hidden_size": "8192", "intermediate_size": "28672",
                              "num_attention_heads": "64", "num_key_value_heads": "8", "vocab_size": "128256"}),
    "DeepSeek-V3": ("deepseek_v3", {}),
}  # fmt: skip
SMALL = {
    "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096,
}  # fmt: skip
BATCH, SEQUENCE = 2, 256
WIDE = {"num_hidden_layers": "2", "hidden_size": "2048", "intermediate_size": "8192", "num_attention_heads": "32",
        "num_key_value_heads": "8", "vocab_size": "32000"}  # fmt: skip
SEVERAL = (("llama", "tp=4 cp=2"), ("llama", "cp=2 tp=4"), ("qwen3", "cp=2 tp=4"), ("gemma3_text", "tp=4 cp=2"),
           ("gpt_oss", "cp=2 tp=4"))  # fmt: skip
"""Tensor and sequence parallelism by the marks that are known, and the sequence cut over another axis as well."""
ALONG = "{model.embed_tokens,model.layers.*,model.norm}: b s/cp h"


def rows(quick: bool) -> Iterable[Row]:
    """The figures; `quick`: layers are few, and steps."""
    for name, (kind, changes) in FULL.items():
        layers = {"num_hidden_layers": "4"} if quick else {}
        yield from _derivation(name, kind, {**changes, **layers})
        yield from _choice(name, kind, {**changes, **layers})
    yield from itertools.chain.from_iterable(_at_once(kind, mesh) for kind, mesh in SEVERAL)
    found = run_ranks(measure, 5 if quick else 40, world=2, on_event=lambda event: None, device="cpu")[0]
    what, pairs = "a forward and a backward, tp=2, sequence parallel", found.pairs
    yield Row(what, "ms", pairs.ours * 1e3, {"by hand": pairs.peer * 1e3})
    yield pairs.row(what, target=1.0)
    yield Row("the furthest gradient from the peer's", "relative", found.apart, target=1e-5)


def _derivation(name: str, kind: str, changes: dict[str, str]) -> Iterable[Row]:
    model, inputs = named(kind, changes).make(1, 4096)
    start = time.perf_counter()
    graph = capture(model, inputs)
    captured = time.perf_counter() - start
    seconds: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        derive(folded(graph, block_names(model)), marks_of(kind) or [], Mesh.parse("tp=8"))
        seconds.append(time.perf_counter() - start)
    yield Row(f"{name}: capture", "s", captured)
    yield Row(f"{name}: derivation over tp=8, folding included", "s", statistics.median(seconds), target=1.0)


def _at_once(kind: str, mesh: str) -> Iterable[Row]:
    """What a rank receives and takes part in, forward and backward, beside moving over one axis after the other."""
    model, inputs = named(kind, WIDE).make(8, 2048)
    graph = folded(capture(model, inputs), block_names(model))
    found = derive(graph, [*(marks_of(kind) or []), Mark.parse(ALONG)], Mesh.parse(mesh))
    (ours, times), (peer, peers) = (_received(moved(found, at_once=at_once)) for at_once in (True, False))
    what, other = f"{kind}, {mesh}, over several axes at once", "one after the other"
    yield Row(f"bytes a rank receives: {what}", "MB", ours / 1e6, {other: peer / 1e6}, target_ratio=1.0)
    yield Row(f"collectives: {what}", "", float(times), {other: float(peers)}, target_ratio=1.0)


def _received(moves: Iterable[Moved]) -> tuple[float, int]:
    sides = [
        (one.times, nbytes, words.count("+") + 1)
        for one in moves
        for words, nbytes in ((one.forward, one.forward_bytes), (one.backward, one.backward_bytes))
        if nbytes
    ]
    return sum(times * nbytes for times, nbytes, _ in sides), sum(times * count for times, _, count in sides)


def _choice(name: str, kind: str, changes: dict[str, str]) -> Iterable[Row]:
    """Over 8 nodes of 8, a batch of 8 x 4096: within what the plan of the marks takes, and less than the best does.

    That plan cuts the batch over the nodes. `choose` is not given it.
    """
    h100, mesh = builtin("h100-8x8"), Mesh.parse("dp=8 tp=8")
    model, inputs = named(kind, changes).make(8, 4096)
    graph = capture(model, inputs)
    marks = [*(marks_of(kind) or []), Mark.parse("input_ids: b/dp s")]
    theirs = priced(derive(folded(graph, block_names(model)), marks, mesh, rates=WorkRates(cluster=h100)), h100)
    limit = theirs.nbytes
    for within, peers in (
        ("within what the plan of the marks takes", {"of the marks": theirs.seconds}),
        ("within 0.95 of what that takes", {}),
    ):
        start = time.perf_counter()
        found = choose(folded(graph, block_names(model)), mesh, h100, memory_limit=limit, seconds=9.0)
        took = time.perf_counter() - start
        yield Row(f"{name}: choice over dp=8 tp=8, {within}", "s", took, target=10.0)
        yield Row(f"{name}: its gap", "ratio", found.gap, target=0.01)
        yield Row(f"{name}: a step by the cluster's model, {limit / 1e9:.0f} GB", "s", found.price.seconds, peers)
        limit = 0.95 * found.price.nbytes


@dataclass(frozen=True)
class Steps:
    """What a rank has measured."""

    pairs: Pairs
    apart: float


def measure(rank: Rank, pairs: int) -> Steps:
    """The task of a rank."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SMALL)
    ours: nn.Module = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    peer = copy.deepcopy(ours)
    devices = init_device_mesh("cpu", (rank.world,), mesh_dim_names=("tp",))
    ids = torch.randint(4096, (BATCH, SEQUENCE))
    inputs = {"input_ids": ids, "position_ids": torch.arange(SEQUENCE)[None].expand(BATCH, -1), "use_cache": False}
    parallel(ours, marks_of("llama") or [], devices, inputs)
    megatron(peer, devices)
    times: list[tuple[float, float]] = []
    for turn in range(pairs + 3):  # the first three warm up
        order = (ours, peer)
        pair = {id(model): _step(model, inputs) for model in (order if turn % 2 else order[::-1])}
        times.append((pair[id(ours)], pair[id(peer)]))
    return Steps(paired(times[3:]), _apart(ours, peer))


def _step(model: nn.Module, inputs: dict[str, Any]) -> float:
    model.zero_grad()
    start = time.perf_counter()
    logits: Tensor = model(**inputs).logits
    ids: Tensor = inputs["input_ids"]
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return time.perf_counter() - start


def _apart(ours: nn.Module, peer: nn.Module) -> float:
    theirs = dict(peer.named_parameters())
    worst = 0.0
    for name, parameter in ours.named_parameters():
        mine, other = _whole(parameter.grad), _whole(theirs[name].grad)
        worst = max(worst, float(cast(Any, mine - other).norm() / cast(Any, other).norm()))
    return worst


def _whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return cast(Any, x).full_tensor() if isinstance(x, DTensor) else x
