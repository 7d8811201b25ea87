"""A factor that is whole may have another size in each tensor: no tensor gets the size of another."""

import torch

from tangram.layout import Layout, Mesh
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.proof.execute import run_reference
from tangram.sharding.proof.propagated import check
from tangram.sharding.propagation.propagate import propagate

aten = torch.ops.aten
X, W = torch.randn(1, 3, 4), torch.randn(3, 3, 3)
CONVOLUTION = OpCall.of(aten.convolution.default, (X, W, None, [1], [1], [1], False, [0], 1), {})


def test_the_space_of_an_image_and_of_its_weight() -> None:
    layouts = [Layout.parse(text).bind(t.shape) for text, t in (("_ _ _/x", X), ("_ _ _/x", W))]
    found = propagate(builtin(), CONVOLUTION, [*layouts, None], Mesh.parse("x=2"))
    assert [None if one is None else one.shape for one in found.inputs] == [(1, 3, 4), (3, 3, 3), None]
    assert {one.place for one in found.relayouts} == {0, 1}
    assert check(found, run_reference(CONVOLUTION).results) is None
