"""What a choice costs, beside numbers by hand and beside what autograd saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.hardware.catalogue import cluster
from tangram.hardware.catalogue.cluster import collective_seconds
from tangram.layout import Mesh
from tangram.models.capturing.capture import capture
from tangram.sharding.choose.choose import priced
from tangram.sharding.choose.options import fits
from tangram.sharding.choose.transition_time import Kind, StepTimes
from tangram.sharding.derive.derive import derive
from tangram.sharding.derive.problem.states import SAME, SEVERAL, SUM, State, cut

H100 = cluster.builtin("h100-8x8")
N = 800e6


def one(
    source: Sequence[State], target: Sequence[State], kind: Kind = "plain", *, grad: bool = True, micro: int = 1
) -> float:
    axes = ("dp", "tp")[2 - len(source) :]
    mesh = Mesh.parse("dp=8 tp=8" if len(source) == 2 else "tp=8")
    steps = StepTimes(H100, mesh, axes, micro)
    return float(steps.seconds([tuple(source)], [tuple(target)], N, kind, differentiable=grad)[0, 0])


def on(what: str, nbytes: float, stride: int = 1) -> float:
    return collective_seconds(H100, what, nbytes, 8, stride)


def bytes_only(what: str, nbytes: float, stride: int = 1) -> float:
    return on(what, nbytes, stride) - on(what, 0.0, stride)


def test_one_axis_there_and_back() -> None:
    gather, scatter, reduce = (on(what, N) for what in ("all-gather", "reduce-scatter", "all-reduce"))
    assert one([cut(0)], [SAME], grad=False) == pytest.approx(gather)
    assert one([cut(0)], [SAME]) == pytest.approx(gather)  # each rank has the whole gradient
    assert one([cut(0)], [SEVERAL]) == pytest.approx(gather + scatter)
    assert one([SUM], [cut(1)]) == pytest.approx(scatter + gather)
    assert one([SUM], [SAME]) == pytest.approx(reduce)
    assert one([SAME], [SEVERAL]) == pytest.approx(reduce)
    assert one([cut(0)], [cut(1)]) == pytest.approx(2 * on("all-to-all", N / 8))
    assert one([SAME], [cut(0)], grad=False) == 0.0
    assert one([cut(0)], [SUM]) == float("inf")


def test_the_other_axis_leaves_less_to_move() -> None:
    slow, quick = on("all-gather", N / 8, 8), on("all-gather", N / 8)
    assert one([cut(0), cut(1)], [SAME, cut(1)], grad=False) == pytest.approx(slow)
    assert one([cut(0), cut(1)], [cut(0), SAME], grad=False) == pytest.approx(quick)
    both = one([cut(0), cut(1)], [SAME, SAME], grad=False)  # over the slow link first, while there is less
    assert both == pytest.approx(slow + on("all-gather", N))
    sliced = one([cut(0), SAME], [SAME, cut(1)], grad=False)  # cut first, then gathered
    assert sliced == pytest.approx(slow)


def test_an_axis_above_another_in_one_dim_is_moved_with_it() -> None:
    nested = one([cut(0), cut(0)], [SAME, cut(0)], grad=False)
    assert nested == pytest.approx(on("all-gather", N, 8) + on("all-gather", N))
    apart = one([cut(0), cut(0, 8)], [SAME, cut(0, 8)], grad=False)  # blocks over dp, each cut over tp
    assert apart == pytest.approx(on("all-gather", N / 8, 8))
    inner = one([cut(0), cut(0)], [cut(0), SAME], grad=False)
    assert inner == pytest.approx(on("all-gather", N / 8))


def test_parameters_are_gathered_twice_and_their_gradients_summed_once_a_step() -> None:
    gather, reduce = bytes_only("all-gather", N), bytes_only("all-reduce", N)
    assert one([cut(0)], [SEVERAL], "kept") == pytest.approx(3 * gather)
    assert one([cut(0)], [SAME], "kept") == pytest.approx(2 * gather)
    assert one([cut(0)], [cut(1)], "kept") == float("inf")
    assert one([SAME], [SEVERAL], "kept") == pytest.approx(reduce)
    assert one([SAME], [SEVERAL], "kept", micro=4) == pytest.approx(reduce / 4)
    assert one([cut(0)], [SEVERAL], "standing") == float("inf")
    assert one([SAME], [SEVERAL], "standing", micro=4) == pytest.approx(reduce / 4)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_even_together(seed: int) -> None:
    """Beside the positions that ranks hold: each cut takes, of each block, one of k parts that are as large."""
    draw = np.random.default_rng(seed)
    n = int(draw.choice([6, 8, 12, 16, 24]))
    cuts = [(int(draw.choice([1, 2, 3, 4])), int(draw.choice([2, 3]))) for _ in range(2)]
    even = all(border % step == 0 for border, step in _borders(n, cuts))
    assert fits(n, cuts) == even


def _borders(n: int, cuts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    (a, j), (b, k) = sorted(cuts)
    return [(n, a * j * k)] if a == b else [(b, a * j), (n, b * k)]


def test_what_is_saved_is_what_autograd_saves() -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    config = AutoConfig.for_model("llama", num_hidden_layers=3, vocab_size=64, **heads)
    model: nn.Module = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    inputs = {"input_ids": torch.randint(64, (4, 16)), "use_cache": False}
    plan = derive(capture(model, inputs), [], Mesh.parse("tp=2"))  # nothing is cut
    found: dict[int, tuple[int, Tensor]] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes(), x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logits: Tensor = model(**inputs).logits
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    positions = (1, 1, 16, 8)
    own = [n for at, (n, x) in found.items() if at not in held and x.is_floating_point() and x.shape != positions]
    assert priced(plan, H100).saved == sum(own) + logits.untyped_storage().nbytes()
    assert priced(plan, H100).states == sum(p.numel() for p in model.parameters()) * (4 + 4 + 12)
