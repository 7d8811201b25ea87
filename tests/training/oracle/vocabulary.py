"""A vocabulary that is cut: the loss is computed from logits in parts."""

from collections.abc import Mapping
from typing import Any

from tests.training.oracle.axes import CP
from tests.training.strategies import GATHERED, MARKS, TWO_STAGES, Strategy, derived

VOCABULARY = 260
"""So that it has even parts."""
IN_PARTS = {**MARKS, "{model.embed_tokens.weight,lm_head.weight}": "v/tp h"}


ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def _lies(data: str, cut: str = "/tp", ends: tuple[str, ...] = ENDS) -> dict[str, str]:
    dp = f"/{data}" if data else ""
    return {**dict.fromkeys(ends, f"v{cut}{dp} h"), **derived(data)}


OVER_VOCABULARY: Mapping[str, tuple[int, Strategy]] = {
    "vocabulary over two": (2, Strategy("one=1 tp=2", ("one",), ("tp",), _lies(""), IN_PARTS)),
    "vocabulary inside fsdp": (4, Strategy("dp=2 tp=2", ("dp",), ("tp",), _lies("dp"), IN_PARTS)),
    "vocabulary and context": (
        4,
        Strategy("cp=2 tp=2", (), ("tp",), _lies(""), {**IN_PARTS, **GATHERED}, axes=CP),
    ),
    "vocabulary over two axes": (
        4,
        Strategy(
            "tq=2 tp=2",
            (),
            ("tq", "tp"),
            _lies("", "/tq/tp", ("lm_head.weight",)),
            {**MARKS, "lm_head.weight": "v/tq/tp h"},
        ),
    ),
    "tied vocabulary inside fsdp": (
        4,
        Strategy("dp=2 tp=2", ("dp",), ("tp",), _lies("dp", ends=ENDS[:1]), {**MARKS, ENDS[0]: "v/tp h"}),
    ),
    "stages of a vocabulary": (
        4,
        Strategy("pp=2 one=1 tp=2", ("one",), ("tp",), _lies(""), IN_PARTS, stages=TWO_STAGES),
    ),
}
GEMMA: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
    "sliding_window": 64,
    "query_pre_attn_scalar": 8,
}
"""A head that is the embedding, and logits that are bent."""
