"""The largest logit of attention is that of the whole product, of any shape of heads and masks."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tangram.training.parallel.apply import KEPT
from tangram.training.step.layer_peaks import QUERIES, Calls, largest_logit

S = QUERIES  # each query is looked at
MASKS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.5},
    "bool": {"attn_mask": torch.ones(S, S).tril(-1).bool().index_fill(0, torch.tensor(0), True)},
    "float": {"attn_mask": torch.full((3, 1, S, S), -torch.inf).triu(1)},
    "one for all queries": {"attn_mask": (torch.arange(S) < 9)[None, None, None]},
}


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", MASKS)
def test_it_is_the_largest_that_is_seen(kind: str, groups: int) -> None:
    torch.manual_seed(groups)
    q, k, options = torch.randn(3, 4, S, 8), torch.randn(3, groups, S, 8), MASKS[kind]
    k[..., -1, :] *= 50  # behind most queries
    q[..., -1, :] = 0
    logits = q[0] @ k[0].repeat_interleave(4 // groups, 0).mT * options.get("scale", 8**-0.5)
    seen = torch.ones(S, S).bool()
    if options.get("is_causal") or kind == "float":
        seen = seen.tril()
    elif kind != "none" and kind != "scaled":
        seen = options["attn_mask"].expand(1, 1, S, S)[0, 0]
    assert largest_logit(q, k, options) == pytest.approx(float(logits[:, seen].max()), rel=1e-6)


@pytest.mark.parametrize("shapes", [((0, 2, 4, 8), (0, 2, 4, 8)), ((1, 2, 0, 8), (1, 2, 0, 8)), ((4, 8), (4, 8))])
def test_of_nothing_it_is_nothing(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert largest_logit(torch.ones(shapes[0]), torch.ones(shapes[1]), {}) == 0


def test_what_a_model_compiles_by_itself_stays_as_it_is() -> None:
    """Dynamo traces through the mode, and refused what it did there: training would have ended in the tenth step."""

    @torch.compile(fullgraph=True, backend="eager")
    def attends(q: Tensor, k: Tensor) -> Tensor:
        return flex_attention(q, k, k) + scaled_dot_product_attention(query=q, key=k, value=k)

    q, k = torch.randn(2, 1, 2, 128, 16)
    expected = attends(q, k)
    with Calls() as mode:
        assert torch.equal(attends(q, k), expected)
        scaled_dot_product_attention(query=q, key=k, value=k)
    assert torch.equal(mode.seen[-1][0], q)


def test_what_is_recomputed_is_the_same_though_it_was_looked_at() -> None:
    """Kept results are told apart by their order, so that a matmul of a look within would take another's place."""
    kept = [one.default for kind in ("matmuls", "attention") for one in KEPT[kind] if hasattr(one, "default")]
    linear = torch.nn.Linear(8, 8)

    def forward(x: Tensor) -> Tensor:
        heads = linear(x).view(1, 2, 64, 4)
        seen = scaled_dot_product_attention(heads, heads, heads)[0]
        return torch.bmm(seen, seen.mT).sin()

    def gradient(looks: bool) -> Tensor:
        x = torch.linspace(-1, 1, 512).view(64, 8).requires_grad_()
        with Calls() if looks else nullcontext():
            contexts = partial(create_selective_checkpoint_contexts, kept)
            result = checkpoint(forward, x, use_reentrant=False, context_fn=contexts)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        return gradient

    assert torch.equal(gradient(looks=True), gradient(looks=False))
