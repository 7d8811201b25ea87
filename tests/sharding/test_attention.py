"""Attention as transformers calls it, on simulated ranks: heads, batch and queries cut, and nothing moves."""

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tangram.cli import main
from tangram.layout import Layout, Mesh
from tangram.layout.syntax import Cut
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import bound, builtin, parse_lines
from tangram.sharding.proof import shapes
from tangram.sharding.proof.execute import check, run_reference, ways
from tangram.sharding.proof.mutate import mutations, planted
from tangram.sharding.proof.prove import prove_operator
from tangram.sharding.proof.simulate import SimWorld, cut, together

B, H, S, D = 4, 6, 5, 8
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


STEP = torch.arange(S)[:, None] - torch.arange(S)[None, :]
CAUSAL = torch.zeros(1, 1, S, S, dtype=torch.float64).masked_fill(STEP < 0, -torch.inf)
WINDOW = torch.zeros(1, 1, S, S, dtype=torch.float64).masked_fill((STEP < 0) | (STEP > 1), -torch.inf)
ROWS = (STEP >= 0).expand(B, 1, S, S).clone()
ROWS[1, :, :, 0] = ROWS[1, :, 1:, 1:].any()  # each row of the batch has a mask of its own
ROWS[2, :, 3:, 0] = False


@lru_cache
def functions() -> dict[str, Callable[..., Any]]:
    pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.qwen3 import modeling_qwen3

    eager, sinks = modeling_qwen3.eager_attention_forward, modeling_gpt_oss.eager_attention_forward
    return {"eager": eager, "sinks": sinks, "sdpa": sdpa_attention_forward}


KINDS: dict[str, tuple[str, int, Tensor | None, bool]] = {
    "dense, eager": ("eager", H, None, False),
    "causal, eager": ("eager", H, CAUSAL, False),
    "groups, eager": ("eager", 3, CAUSAL, False),
    "window, eager": ("eager", 3, WINDOW, False),
    "sinks, eager": ("sinks", 3, CAUSAL, False),
    "dense, sdpa": ("sdpa", H, None, False),
    "causal, sdpa": ("sdpa", H, None, True),
    "groups, sdpa": ("sdpa", 3, None, False),
    "causal groups, sdpa": ("sdpa", 3, None, True),
    "window, sdpa": ("sdpa", 3, WINDOW, False),
    "window as booleans, sdpa": ("sdpa", 3, WINDOW == 0, False),
    "rows of their own, sdpa": ("sdpa", 3, ROWS, False),
}
CUTS = {  # the mesh; queries; keys and values; sinks; the mask
    "heads": ("x=3", "b h/x s d", "b h/x s d", "h/x", "b h s t"),
    "batch": ("x=3", "b/x h s d", "b/x h s d", "h", "b/x h s t"),
    "heads and batch": ("x=2 y=3", "b/x h/y s d", "b/x h/y s d", "h/y", "b/x h s t"),
    "queries": ("x=2", "b h s/x d", "b h s d", "h", "b h s/x t"),
    "queries by turns": ("x=2", "b h s/x:zigzag d", "b h s d", "h", "b h s/x:zigzag t"),
    "all three": ("x=2 y=3 z=2", "b/x h/y s/z d", "b/x h/y s d", "h/y", "b/x h s/z t"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CUTS)
def test_attention_on_ranks_is_the_plain_one_and_moves_nothing(kind: str, name: str) -> None:
    function, groups, mask, causal = KINDS[kind]
    mesh, *texts = CUTS[name]
    leaves = [some(B, H, S, D), some(B, groups, S, D), some(B, groups, S, D).flip(0), some(H)]
    leaves = [t.requires_grad_() for t in leaves[: 4 if function == "sinks" else 3]]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None) -> Tensor:
        module = SimpleNamespace(num_key_value_groups=H // groups, training=False, sinks=sinks)
        more = {"is_causal": causal} if function == "sdpa" else {}
        return functions()[function](module, q, k, v, mask, scaling=0.3, **more)[0]

    want = run(*(*leaves, None)[:4], mask)
    cotangent = some(*want.shape)
    expected = torch.autograd.grad(want, leaves, cotangent)
    world = SimWorld(Mesh.parse(mesh), builtin())

    def simulated(tensor: Tensor, text: str) -> Tensor:
        dims = [d if n > 1 else d.partition("/")[0] for d, n in zip(text.split(), tensor.shape, strict=True)]
        return cut(tensor, Layout.parse(" ".join(dims)).bind(tuple(tensor.shape)), world)

    given = [simulated(t, text) for t, text in zip(leaves, (texts[0], texts[1], texts[1], texts[2]), strict=False)]
    found = run(*(*given, None)[:4], None if mask is None else simulated(mask, texts[3]))
    assert found.own_layout.axes == set(mesh.replace("=", "").translate({ord(c): " " for c in "123"}).split())  # pyright: ignore
    got = together(found)  # pyright: ignore
    assert torch.allclose(got, want)
    for one, other in zip(torch.autograd.grad(got, leaves, cotangent), expected, strict=True):
        assert torch.allclose(one, other)
    assert world.moved == 0


CALLS = {
    "causal groups": OpCall.of(KERNEL, (some(3, 6, 5, 4), some(3, 2, 5, 4), some(3, 2, 5, 4), 0.0, True), {}),
    "one group": OpCall.of(KERNEL, (some(3, 6, 5, 4), some(3, 1, 7, 4), some(3, 1, 7, 4)), {}),
    "mask": OpCall.of(KERNEL, (some(3, 6, 5, 4), some(3, 6, 5, 4), some(3, 6, 5, 4)), {"attn_mask": CAUSAL}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_is_proved_with_every_factor_and_map(name: str) -> None:
    call = CALLS[name]
    own, expected = bound(builtin(), call), run_reference(call)
    assert {"b", "s"} < {*own.cuttable}
    assert expected.differentiated == {0, 1, 2}
    tried = [*ways(own, (2, 3, 5))]
    tried += [({"s": (Cut("x", *args),)}, Mesh.parse("x=2")) for args in (("zigzag", ()), ("cyclic", (1,)))]
    for cuts, mesh in tried:
        assert check(call, own, cuts, mesh, expected) is None


def test_causal_queries_need_their_note() -> None:
    call = CALLS["causal groups"]
    line = builtin().find(call)
    assert line is not None
    rule = next(rule for what, rule in mutations(line.rule) if "without causal" in what)
    assert prove_operator(planted(builtin(), line, rule), "x", [call]).kind == "refuted"


def test_kernels_of_other_devices_have_the_shapes_of_their_rules_and_are_said_to_be_unproved() -> None:
    for name, calls in shapes.calls().items():
        for call in calls:
            factors = bound(builtin(), call).cuttable
            assert factors
            tried, wrong = shapes.check(builtin(), call)
            assert not wrong
            assert tried >= 5 * len(factors), name
    table = builtin().with_lines(
        parse_lines("_scaled_dot_product_flash_attention : b s h e, b t h e, b t h f -> b s h f, b s h, ... ; same(2)")
    )
    _, wrong = shapes.check(table, shapes.calls()["_scaled_dot_product_flash_attention"][0])
    assert "shape" in wrong or "Error" in wrong


def test_the_command_names_what_it_cannot_prove(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("expecttest")
    assert main(["shard", "check", "_flash_attention_forward"]) == 0
    shown = capsys.readouterr().out
    assert "_flash_attention_forward: unproved: no sample of it runs on this machine; the shapes of its parts" in shown
    dropout = OpCall.of(torch.ops.aten._scaled_dot_product_flash_attention.default, (*(some(2, 4, 3, 8),) * 3, 0.5), {})
    assert not bound(builtin(), dropout).cuttable
