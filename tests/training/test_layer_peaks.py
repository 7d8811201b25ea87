"""The largest logit of attention is that of the whole product, of any shape of heads and masks."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tangram.training.step.layer_peaks import QUERIES, largest_logit

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
