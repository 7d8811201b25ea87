"""What a plain model draws in a step: a sample's numbers are its own, in whatever micro-batch; mistakes show."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.relayout.exchange.peers import Peers
from tangram.sharding.local_ops.random_numbers import DrawNumbers, Key, NumberSpan, Samples, bernoulli
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.sharding.local_ops.samples import Placed
from tangram.training.data import Batch, RankBatches
from tangram.training.mesh.drawing import Drawer, DrawSource, counts_of_stages, drawing, drawn_apart, seed_for

ROWS, LENGTH, WIDTH = 4, 6, 8
X = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
STEP = 12
"""The first sample of the step in the job."""


class Draws(nn.Module):
    """A layer around something that draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.inner = draw, nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = self.inner(x_BSH)
        return self.draw(x_BSH) if self.training else x_BSH


def _drop_path(x: Tensor) -> Tensor:
    """As transformers and timm have it."""
    kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), dtype=x.dtype, device=x.device) + 0.5
    return x * kept.floor_()


def _attend(x: Tensor) -> Tensor:
    q = x.view(*x.shape[:2], 2, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).transpose(1, 2).reshape(x.shape)


def _noisy_router(x: Tensor) -> Tensor:
    scores = x.flatten(0, 1)
    scores = scores + torch.randn_like(scores)
    return x * scores.softmax(-1).view(x.shape)


def _again(x: Tensor) -> Tensor:
    """A function that is checkpointed and draws by itself: it runs again in the backward, outside of any module."""

    def run(y: Tensor) -> Tensor:
        return F.dropout(y, 0.4).square()

    return cast(Any, checkpoint)(run, x, use_reentrant=False)


KINDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of channels": lambda x: F.dropout1d(x, 0.4),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "of rows together": lambda x: F.dropout(x.flatten(0, 1), 0.4).view(x.shape),
    "of heads": _attend,
    "sequence first": lambda x: F.dropout(x.transpose(0, 1), 0.4).transpose(0, 1),
    "drop path": _drop_path,
    "drop path in place": lambda x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.6),
    "noisy router": _noisy_router,
    "integers": lambda x: x * torch.randint(0, 5, x.shape[:2], device=x.device)[..., None],
    "gumbel": lambda x: F.gumbel_softmax(x, 0.7),
    "weights, of no samples": lambda x: x * F.dropout(torch.ones(WIDTH), 0.4),
    "a number": lambda x: x * torch.rand([]),
    "an order of the sequence": lambda x: x[:, torch.randperm(x.shape[1])],
    "checkpointed": _again,
}


SOURCES: WeakKeyDictionary[nn.Module, DrawSource] = WeakKeyDictionary()
"""What draws in a model: of those that `made` makes, and of derived ones."""


def trained(
    model: nn.Module, size: int, step: int = STEP, *, seed: int = 7, until: int = 1, loss: Any = None
) -> tuple[Tensor, Tensor]:
    """What a model gives for all samples, and its gradient, in micro-batches of a size; of the last of some steps."""
    found: list[Tensor] = []
    for at in range(until):
        model.zero_grad()
        micro = tuple(Batch(rows, rows, None) for rows in cast("list[Tensor]", X.split(size)))
        firsts = tuple(range(step, step + ROWS, size))
        found = []
        with drawing([SOURCES[model]], seed, RankBatches(micro, 1, firsts, step, ROWS)) as draws:
            for number, batch in enumerate(micro):
                draws.begin(number)
                given = model(batch.inputs_BS)
                (given.sin().sum() if loss is None else loss(given)).backward()
                found.append(given.detach())
        assert SOURCES[model].numbers.samples is None, at
    gradients: list[Any] = [p.grad for p in model.parameters()]
    return torch.cat(found), torch.cat(
        [(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in gradients]
    )


def made(draw: Callable[[Tensor], Tensor]) -> Draws:
    torch.manual_seed(0)
    model = Draws(draw)
    SOURCES[model] = Drawer(model, compiled=False)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_draws_the_same_in_every_micro_batch(kind: str) -> None:
    whole, gradient = trained(made(KINDS[kind]), ROWS)
    for size in (1, 2):
        found, own = trained(made(KINDS[kind]), size, until=2)  # the second step, which knows what the first has seen
        assert torch.allclose(found, whole, atol=1e-6)
        assert torch.allclose(own, gradient, atol=1e-5)
    assert not torch.allclose(trained(made(KINDS[kind]), ROWS, STEP + ROWS)[0], whole), "of another step"
    assert not torch.allclose(trained(made(KINDS[kind]), ROWS, seed=8)[0], whole), "of another seed"


def test_a_whole_batch_draws_what_one_process_draws() -> None:
    """Without any of what is tested: the generator of the step, and numbers of the tensor itself."""
    torch.manual_seed(0)
    plain = Draws(KINDS["dropout"])
    seed_for(torch.device("cpu"), 7, STEP)
    with DrawMode():
        want = plain(X)
    found = trained(made(KINDS["dropout"]), 1)[0]
    assert torch.equal(found == 0, want == 0)
    torch.testing.assert_close(found, want.detach())  # products of one row and of all may round apart


def test_samples_differ_and_calls_do() -> None:
    ones = torch.ones_like(X)

    def twice(x: Tensor) -> Tensor:
        first, second = F.dropout(ones[: len(x)], 0.5), F.dropout(ones[: len(x)], 0.5)
        assert not torch.equal(first, second)
        return x * 0 + first

    found, _ = trained(made(twice), 2)
    assert len({tuple(row.flatten().tolist()) for row in found}) == ROWS


def test_planted_numbers_of_the_micro_batch_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*given: object) -> Placed:
        return Placed(True, {}, "nobody knows")

    def first_ones(first: int, rows: int, total: int) -> Samples:
        return Samples(0, rows, total)

    whole, _ = trained(made(KINDS["dropout"]), ROWS)
    for name, value in {"places_of": nowhere, "Samples": first_ones}.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"tangram.training.mesh.drawing.{name}", value)
            assert not torch.allclose(trained(made(KINDS["dropout"]), 2)[0], whole)


def test_nothing_is_drawn_in_evaluation_and_nothing_looked_at_that_does_not_draw() -> None:
    model = made(KINDS["dropout"])
    assert torch.equal(trained(model.eval(), 2)[0], model.inner(X))
    plain = made(lambda x: x)
    trained(plain, 2)
    with drawing([SOURCES[plain]], 7, RankBatches((Batch(X, X, None),), 1, (0,), 0, ROWS)) as draws:
        assert draws._mode is None  # pyright: ignore[reportPrivateUsage]


def test_a_model_that_begins_to_draw_is_looked_at_from_then_on() -> None:
    model = made(lambda x: F.dropout(x, 0.4) if model.late else x)
    cast(Any, model).late = False
    trained(model, 2)
    cast(Any, model).inner.register_module("drop", nn.Dropout(0.2))  # as another mode does
    want = trained(made(KINDS["dropout"]), ROWS)[0]
    cast(Any, model).late = True
    with pytest.raises(UserError, match="draw them in every step"):
        trained(model, 2)
    drop = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))
    drop.load_state_dict({f"0.{name}": value for name, value in model.inner.state_dict().items()})
    SOURCES[drop] = Drawer(drop, compiled=False)
    trained(drop, 2)
    cast(Any, drop[1]).p = 0.4
    assert torch.allclose(trained(drop, 2)[0], want, atol=1e-6)


def test_what_a_loss_draws_is_of_the_step_too() -> None:
    seen: list[float] = []

    def loss(x: Tensor) -> Tensor:
        seen.append(float(torch.rand([])))
        return x.sum()

    trained(made(lambda x: x), 2, until=2, loss=loss)
    assert len({*seen}) > 1
    assert seen[:2] == seen[2:]


def test_operators_that_are_not_counted_draw_by_the_micro_batch() -> None:
    def draw(x: Tensor) -> Tensor:
        before = torch.get_rng_state()
        found = F.rrelu(x, training=True) * torch.poisson(torch.ones(len(x), 1, 1) * 3)
        assert not torch.equal(before, torch.get_rng_state())
        return found

    found = [trained(made(draw), 2)[0] for _ in range(2)]
    assert torch.equal(*found)
    assert not torch.equal(found[0], trained(made(draw), 4)[0])


def _looking(x: Tensor) -> Tensor:
    return F.dropout(x, 0.4) if float(x.sum()) > -1e9 else x


def test_code_that_looks_at_values_draws_by_the_micro_batch() -> None:
    found = [trained(made(_looking), 2)[0] for _ in range(2)]
    assert torch.equal(*found)
    assert float((found[0] == 0).float().mean()) > 0.2


class Uncopied(Draws):
    """With something in it that cannot be copied."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__(draw)
        self.lock = Lock()


WHY: Mapping[str, tuple[Callable[[], Draws], str]] = {
    "code that looks at values": (
        lambda: Draws(_looking),
        r"it does not run, .*test_drawing.py:\d+: .*values of a tensor",
    ),
    "no copy": (lambda: Uncopied(KINDS["dropout"]), "Uncopied cannot be copied, .*keep lock, a lock, out of the model"),
    "other rows": (
        lambda: Draws(lambda x: x * F.dropout(torch.ones(len(x) * len(x), WIDTH), 0.4)[: len(x), None]),
        r"samples stand in no dim of the \[4, 8\] that .* in Draws draws",
    ),
    "pairs": (
        lambda: Draws(lambda x: F.dropout(x.unflatten(0, (2, -1)), 0.4).flatten(0, 1)),
        r"with one sample more it does not run, .*test_drawing.py:\d+: ",
    ),
}


@pytest.mark.parametrize("kind", WHY)
def test_what_is_not_drawn_as_by_one_process_is_told_once_with_the_reason(kind: str) -> None:
    make, why = WHY[kind]
    model = make()
    SOURCES[model] = Drawer(model, compiled=False)
    trained(model, ROWS)  # of the whole batch at once
    assert drawn_apart([(type(model).__name__, SOURCES[model])]) == []
    trained(model, 2, until=2)
    (said,) = drawn_apart([(type(model).__name__, SOURCES[model])])
    assert re.fullmatch(
        rf"some of what {type(model).__name__} draws at random is each micro-batch's own, .*: .*{why}.*", said
    )
    trained(model, 2)
    assert drawn_apart([(type(model).__name__, SOURCES[model])]) == []


class Asking(nn.Module):
    """Code that looks at a value, which no run without memory has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(8, WIDTH)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        return self.inner(input_ids) * int(input_ids[0, 0])


def test_stages_of_a_model_that_does_not_run_without_values_are_refused_with_its_line() -> None:
    plan: Any = SimpleNamespace(
        pipeline=SimpleNamespace(stages=(("inner",), ())), data=SimpleNamespace(sequence=LENGTH)
    )
    with pytest.raises(UserError, match=r"Asking does not run without values, .*test_drawing.py:\d+: "):
        counts_of_stages(Asking(), plan)


def test_what_other_ranks_stages_have_drawn_is_told_on_the_first_once(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[list[str]] = []

    def said(_: Peers, own: list[str]) -> list[list[str]]:
        words.append(own)
        return [own, ["of the second stage"], ["of the second stage"]]

    monkeypatch.setattr(Peers, "all_words", said)
    model = WHY["other rows"][0]()
    SOURCES[model] = Drawer(model, compiled=False)
    trained(model, 2, until=2)
    (first, second) = drawn_apart([("stage 0", SOURCES[model])], Peers())
    assert words == [[first]]
    assert second == "of the second stage"


def test_nothing_is_told_of_a_model_that_draws_as_one_process_or_not_at_all() -> None:
    looking = Draws(lambda x: x * 1 if float(x.sum()) > -1e9 else x)
    SOURCES[looking] = Drawer(looking, compiled=False)
    for model in (looking, made(KINDS["dropout"])):
        trained(model, 2)
        assert drawn_apart([(type(model).__name__, SOURCES[model])]) == []


def test_a_generator_of_ones_own_is_left_alone() -> None:
    def draw(x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(len(x)))

    want = torch.rand((2, *X.shape[1:]), generator=torch.Generator().manual_seed(2))
    model = made(draw)
    assert torch.allclose(trained(model, 2)[0][:2], model.inner(X[:2]) * want)


def test_a_compiled_block_draws_the_same() -> None:
    model = made(KINDS["dropout"])
    want = trained(model, 2)[0]
    other = made(KINDS["dropout"])
    cast(Any, other).draw = torch.compile(KINDS["dropout"], backend="eager")
    assert torch.equal(trained(other, 2)[0], want)


@pytest.mark.parametrize("start", [0, 1, 2, 3, 6])
def test_numbers_in_a_row_are_those_one_by_one(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram.sharding.local_ops.random_numbers._AT_ONCE", 8)
    span = NumberSpan(start, (3, 7))
    for p in (0.0, 0.3, 0.9, 1.0):
        assert torch.equal(bernoulli(span, p, Key(5, 6)), bernoulli(span.numbers, p, Key(5, 6)))


def test_numbers_of_a_part_are_those_of_the_global_batch() -> None:
    whole = torch.arange(3 * 10 * 5).view(3, 10, 5)
    numbers = DrawNumbers(Samples(4, 2, 10), {(3, 2, 5): 5, (6, 5): 0})
    at, key = numbers.of_all(NumberSpan(0, (3, 2, 5)), (3, 2, 5), Key(1, 0))
    assert isinstance(at, Tensor)
    assert torch.equal(at, whole[:, 4:6])
    assert key == Key(1, 0)
    assert numbers.of_all(NumberSpan(0, (6, 5)), (6, 5), Key(1, 0)) == (NumberSpan(0, (6, 5)), Key(1, 0))
    assert numbers.of_all(NumberSpan(0, (4,)), (4,), Key(1, 0)) == (NumberSpan(0, (4,)), Key(1, 5))
