"""Which tensors a mark's pattern names."""

import torch

from tangram.sharding.derive.marking.marks import Mark, matched, matching
from tangram.sharding.derive.of_model import graph_of
from tests.sharding.derive.test_marks_files import tiny


def test_a_star_at_the_end_is_not_what_is_inside() -> None:
    names = ["layers.0", "layers.0.mlp", "layers.1", "norm"]
    assert matching("layers.*", names) == {"layers.0", "layers.1"}
    assert matching("*.mlp", names) == {"layers.0.mlp"}
    assert matching("*", names[1:2]) == {"layers.0.mlp"}


def test_each_of_several_patterns_is_looked_up_by_itself() -> None:
    ids = torch.zeros(2, 8, dtype=torch.long)
    graph = graph_of(tiny("llama"), {"input_ids": ids, "use_cache": False}, torch.float32)
    found = matched(graph, Mark.parse("{model.embed_tokens,model.layers.*,model.norm}: b s/cp h"))
    assert {"model.embed_tokens", "model.norm", "model.layers.0"} <= found.keys()
    assert not any(name.startswith("model.layers.0.") for name in found)
