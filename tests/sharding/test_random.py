"""Numbers that belong to elements: the generator's known answers, any layout, operators, the proof of rules."""

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch.nn import functional as F

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.layout.syntax import Cut
from tangram.sharding.local_ops import random_numbers
from tangram.sharding.local_ops.local_call import part_of, piece, run
from tangram.sharding.local_ops.local_variants import for_comparison
from tangram.sharding.local_ops.random_numbers import Key
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.sharding.ops.bind import bind
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import bound, builtin
from tangram.sharding.proof.mutate import mutations, planted
from tangram.sharding.proof.prove import prove_operator
from tangram.sharding.proof.simulate import SimWorld, cut, together

aten = torch.ops.aten
X = torch.arange(35.0, dtype=torch.float64).reshape(7, 5).sin().abs()
KEY = Key(7, 3)

KNOWN = [  # counter, key and words from the known-answer file of Random123, philox4x32 with 10 rounds
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_the_generator_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, int], want: str) -> None:
    low = torch.tensor([counter[0] | counter[1] << 32], dtype=torch.uint64).view(torch.int64)
    found = random_numbers.philox(low, Key(key[0] | key[1] << 32, counter[2] | counter[3] << 32))
    assert " ".join(f"{int(word):08x}" for word in found[:, 0]) == want


DISTRIBUTIONS = {
    "uniform": (lambda at: random_numbers.uniform(at, KEY), 0.5, 1 / 12),
    "uniform of float64": (lambda at: random_numbers.uniform(at, KEY, torch.float64, -1, 3), 1.0, 16 / 12),
    "normal": (lambda at: random_numbers.normal(at, KEY), 0.0, 1.0),
    "normal of float64": (lambda at: random_numbers.normal(at, KEY, torch.float64), 0.0, 1.0),
    "bernoulli": (lambda at: random_numbers.bernoulli(at, 0.3, KEY).double(), 0.3, 0.21),
    "integers": (lambda at: random_numbers.integers(at, KEY, -3, 4).double(), 0.0, 4.0),
    "exponential": (lambda at: random_numbers.exponential(at, KEY), 1.0, 1.0),
    "geometric": (lambda at: random_numbers.geometric(at, 0.25, KEY), 4.0, 12.0),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_mean_and_variance_are_the_distributions(name: str) -> None:
    make, mean, variance = DISTRIBUTIONS[name]
    n = 100_000
    made = make(torch.arange(n)).double()
    assert abs(float(made.mean()) - mean) < 4 * (variance / n) ** 0.5
    assert abs(float(made.var()) / variance - 1) < 0.03
    half = made[: n // 2] - mean, made[n // 2 :] - mean
    assert abs(float((half[0] * half[1]).mean()) / variance) < 0.02, "one half is not the other"
    assert abs(float(((made[1:] - mean) * (made[:-1] - mean)).mean()) / variance) < 0.02, "nor a neighbour"


def test_tails_and_quarters_of_distributions() -> None:
    at = torch.arange(100_000)
    assert abs(float((random_numbers.normal(at, KEY).abs() < 1).double().mean()) - 0.6827) < 0.006
    assert abs(float((random_numbers.cauchy(at, KEY).abs() < 1).double().mean()) - 0.5) < 0.006
    x = torch.linspace(1e-12, 1, 1001, dtype=torch.float64)
    assert torch.allclose(random_numbers._log(x), x.log(), 1e-14, 1e-15)
    cosine, sine = random_numbers._circle(x[:-1])
    assert torch.allclose(cosine, (x[:-1] * 2 * torch.pi).cos(), 0, 2e-15)
    assert torch.allclose(sine, (x[:-1] * 2 * torch.pi).sin(), 0, 2e-15)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert (
            0
            <= float(random_numbers.uniform(at, KEY, dtype).min())
            <= float(random_numbers.uniform(at, KEY, dtype).max())
            < 1
        )


LAYOUTS = ["a/x b", "a b/x", "a/x b/y", "a/x/y b", "a/y:cyclic[2]/x b", "(a/x b=4)/y", "a/x:zigzag b", "a b //x"]


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("mesh", ["x=1 y=1", "x=2 y=1", "x=3 y=2", "x=5 y=2"])
def test_an_element_has_its_number_in_every_layout(text: str, mesh: str) -> None:
    layout, axes = Layout.parse(text).bind((28,) if text.startswith("(") else (7, 4)), Mesh.parse(mesh)
    at = torch.arange(28)
    whole_of = {
        f: f(at) for f in (lambda at: random_numbers.uniform(at, KEY), lambda at: random_numbers.normal(at, KEY))
    }
    seen = torch.zeros(28, dtype=torch.int64)
    for rank in range(axes.size):
        own = random_numbers.places(layout, axes, rank)
        seen[own.flatten()] += 1
        for draw, want in whole_of.items():
            assert torch.equal(draw(own), want[own]), "bit for bit"
    assert bool((seen > 0).all())


def test_ranks_seeds_and_streams_draw_nothing_twice() -> None:
    layout, mesh = Layout.parse("a/x b").bind((64, 256)), Mesh.parse("x=4")
    parts = [
        random_numbers.uniform(random_numbers.places(layout, mesh, r), KEY, torch.float64).flatten() for r in range(4)
    ]
    parts += [random_numbers.uniform(torch.arange(64 * 256), key, torch.float64) for key in (Key(8, 3), Key(7, 4))]
    together_ = torch.cat(parts)
    assert len(together_.unique()) == len(together_)


def test_dropout_is_the_same_for_every_layout_and_scales() -> None:
    mesh, x = Mesh.parse("x=3"), torch.ones(7, 5)
    want = random_numbers.dropout(x, 0.25, Layout.parse("a b").bind((7, 5)), mesh, 0, seed=1)
    assert set(want.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    layout = Layout.parse("a/x b").bind((7, 5))
    parts = [random_numbers.dropout(p, 0.25, layout, mesh, r, seed=1) for r, p in enumerate(x.chunk(3))]
    assert torch.equal(torch.cat(parts), want)
    assert not torch.equal(
        random_numbers.dropout(x, 0.25, Layout.parse("a b").bind((7, 5)), mesh, 0, 1, stream=1), want
    )
    with pytest.raises(UserError, match="not a part of"):
        random_numbers.dropout(x, 0.25, layout, mesh, 0, seed=1)
    with pytest.raises(UserError, match="between 0 and 1"):
        random_numbers.dropout(x, 1.25, layout, mesh, 0, seed=1)
    with pytest.raises(UserError, match="no int64 is drawn"):
        random_numbers.uniform(torch.arange(3), KEY, torch.int64)
    with pytest.raises(UserError, match="cannot be drawn"):
        random_numbers.integers(torch.arange(3), KEY, 3, 3)


CALLS = {
    "native_dropout": lambda: OpCall.of(aten.native_dropout.default, (X, 0.4, True), {}),
    "bernoulli": lambda: OpCall.of(aten.bernoulli.default, (X,), {}),
    "bernoulli_.Tensor": lambda: OpCall.of(aten.bernoulli_.Tensor, (X, X[0]), {}),
    "uniform_": lambda: OpCall.of(aten.uniform_.default, (X, -1.0, 2.0), {}),
    "normal.Tensor_Tensor": lambda: OpCall.of(aten.normal.Tensor_Tensor, (X, X[:, :1]), {}),
    "randn_like": lambda: OpCall.of(aten.randn_like.default, (X,), {"dtype": torch.float32}),
    "exponential_": lambda: OpCall.of(aten.exponential_.default, (X, 2.0), {}),
    "randint_like": lambda: OpCall.of(aten.randint_like.low_dtype, (X, -3, 9), {}),
}
CUTS = [("x=1", ("x",)), ("x=2", ("x",)), ("x=3", ("x",)), ("x=5", ("x",)), ("x=2 y=3", ("x", "y"))]
MAPS = ["", "zigzag", "cyclic"]


@pytest.mark.parametrize("name", CALLS)
def test_a_cut_operator_draws_bit_for_bit_what_the_whole_one_draws(name: str) -> None:
    call = CALLS[name]()
    factors = bound(builtin(), call)
    with random_numbers.using(KEY):
        want = for_comparison(call, factors).run()
    for mesh, axes in CUTS:
        for map_ in MAPS:
            args = (2,) if map_ == "cyclic" else ()
            first = {factors.cuttable[0]: tuple(Cut(axis, map_, args) for axis in axes)}
            both = {f: (Cut(axis, map_, args),) for f, axis in zip(factors.cuttable, axes, strict=False)}
            for cuts in (first, both):
                world = Mesh.parse(mesh)
                for rank in range(world.size):
                    part = part_of(factors, cuts, world, rank)
                    pairs = zip(call.tensors, factors.inputs, strict=True)
                    local: list[Tensor | None] = [
                        t if t is None or d is None else piece(t, d, part, factors) for t, d in pairs
                    ]
                    with random_numbers.using(KEY):
                        found = run(call, factors, part, local)
                    for r, w, dims in zip(found, want, factors.outputs, strict=True):
                        assert torch.equal(r, piece(w, dims, part, factors))


def test_the_rule_of_what_draws_is_proved_and_needs_its_note() -> None:
    call = CALLS["native_dropout"]()
    assert prove_operator(builtin(), "native_dropout", [call]).kind == "proved"
    line = builtin().find(call)
    assert line is not None
    found = dict(mutations(line.rule))
    verdict = prove_operator(planted(builtin(), line, found["without counted()"]), "native_dropout", [call])
    assert verdict.kind == "refuted"


def test_a_call_with_a_generator_of_its_own_is_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    call = OpCall.of(aten.bernoulli.p, (X, 0.5), {"generator": generator})
    assert not bound(builtin(), call).cuttable
    with DrawMode(1):
        assert torch.equal(
            torch.rand(3, generator=generator), torch.rand(3, generator=torch.Generator().manual_seed(3))
        )


def test_a_model_with_dropout_draws_on_ranks_what_it_draws_in_one_process() -> None:
    w = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def model(x: Tensor, w: Tensor) -> Tensor:
        x = F.dropout(x @ w, 0.3, True)
        x = F.dropout(x, 0.1, True)
        return (x * torch.rand_like(x)).sum()

    leaf = w.clone().requires_grad_()
    with DrawMode(seed=5):
        want = model(X, leaf)
    (gradient,) = torch.autograd.grad(want, [leaf])
    for text, mesh in (("a/x b", "x=2"), ("a b/x", "x=3"), ("a/x b/y", "x=2 y=2")):
        world = SimWorld(Mesh.parse(mesh), builtin(), seed=5)
        own = w.clone().requires_grad_()
        found = together(model(cut(X, Layout.parse(text).bind((7, 5)), world), own))  # pyright: ignore
        assert torch.allclose(found, want)
        assert torch.allclose(torch.autograd.grad(found, [own])[0], gradient)
        assert world.drawn == 3
    other = SimWorld(Mesh.parse("x=2"), builtin(), seed=6)
    assert not torch.allclose(together(model(cut(X, Layout.parse("a/x b").bind((7, 5)), other), w)), want)  # pyright: ignore


def test_a_rule_bound_by_hand_needs_no_generator_to_be_whole() -> None:
    call = CALLS["uniform_"]()
    line = builtin().find(call)
    assert line is not None
    assert bind(line.rule, call).cuttable == [".2", ".1"]


def test_operators_that_take_functions_run_as_they_are() -> None:
    """A model with a scan in one process, beside which its parts are compared."""
    x = torch.arange(6.0).view(3, 2)
    with DrawMode(seed=5):
        last, steps = scan_op(lambda c, y: [c + y, c * y], [torch.zeros(2)], [x], additional_inputs=())
    assert torch.equal(last, x.sum(0))
    assert torch.equal(steps, (x.cumsum(0) - x) * x)
