"""What loops of one's own do with a model beside calling it: as on one process, or refused in a sentence.

Each idiom is of public code. Before they were refused, a layer that was called by itself gave a rank's part, `.data`
that was set stayed without effect, and a model traced by torch.fx gave each rank other numbers: all in silence.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import tangram
from tangram.errors import UserError
from tangram.training.run.launch import Rank, run_ranks
from tests.training.oracle.warm import once

Idiom = Callable[[Any], Any]
func = cast("Any", torch.func)
MARKS = {"up.weight": "16/tp 8", "up.bias": "16/tp", "down.weight": "8 16/tp"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def rows(count: int = 3) -> Tensor:
    return torch.linspace(-1, 1, count * 8).view(count, 8)


def checkpointed(model: Any) -> Tensor:
    """Its first call is within: what capturing saves is not what the checkpoint counts."""
    x = rows().requires_grad_()
    cast("Any", checkpoint)(model, x, use_reentrant=False).sum().backward()
    return cast("Tensor", x.grad)


def hessian_vector(model: Any) -> Tensor:
    x = rows().requires_grad_()
    (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def each(change: Callable[[Tensor], object]) -> Idiom:
    def idiom(model: Any) -> Tensor:
        model(rows())
        with torch.no_grad():
            for p in model.parameters():
                change(p)
        return model(rows())

    return idiom


def stepped(kind: Any, **settings: Any) -> Idiom:
    def idiom(model: Any) -> Tensor:
        optimiser = kind(model.parameters(), **settings)
        for _ in range(2):
            optimiser.zero_grad()
            model(rows()).pow(2).sum().backward()
            optimiser.step()
        return model(rows())

    return idiom


def within(context: Callable[[], Any]) -> Idiom:
    def idiom(model: Any) -> Tensor:
        with context():
            y = model(rows())
        y.sum().backward()
        return model.norm.weight.grad

    return idiom


def replaced(model: Any) -> Tensor:
    model.norm.weight = nn.Parameter(torch.full((8,), 2.0))
    return model(rows())


def doubled(model: Any) -> Tensor:
    before = model.up.forward
    model.up.forward = lambda x: 2 * before(x)
    return model(rows())


def let_go(model: Any) -> Tensor:
    """What stood in a parameter's place before is nobody's any more: its memory is free."""
    model(rows())
    before = weakref.ref(getattr(model.up.weight, "_local_tensor", model.up.weight.data))
    model.double()
    return torch.tensor(float(before() is None))


ALIKE: Mapping[str, Idiom] = {
    "memory of another type": let_go,
    "checkpointed": checkpointed,
    "a jacobian": lambda m: torch.autograd.functional.jacobian(m, rows()),
    "a hessian and a vector": hessian_vector,
    "functional_call": lambda m: func.functional_call(m, dict(m.named_parameters()), (rows(),)),
    "weights that are clamped by data": each(lambda p: p.data.clamp_(-0.01, 0.01)),
    "weights that are averaged by data": each(lambda p: p.data.copy_(p.data * 2)),
    "weights that are written into": each(lambda p: p.mul_(2)),
    "another parameter": replaced,
    "another type": lambda m: m.double()(rows().double()).float(),
    "its own state": lambda m: (m.load_state_dict({k: 2 * v for k, v in m.state_dict().items()}), m(rows()))[1],
    "no rows": lambda m: m(rows(0)).sum()[None],
    "a layer around": lambda m: nn.Sequential(m, nn.ReLU())(rows()),
    "another forward of a layer": doubled,
    "tensors that are kept elsewhere": within(torch.autograd.graph.save_on_cpu),
    "a fused update": stepped(optim.AdamW, lr=0.01, fused=True),
    "AMSGrad": stepped(optim.Adam, lr=0.01, amsgrad=True),
    "RMSprop": stepped(optim.RMSprop, lr=0.01),
}
ALONE, TRANSFORMS = "is called outside of the model's forward", "cannot be called within torch.func"
REFUSED: Mapping[str, tuple[Idiom, str]] = {
    "a layer by itself": (lambda m: m.up(rows()), f"a module with up.weight {ALONE}"),
    "layers in another order": (lambda m: nn.Sequential(m.norm, m.up)(rows()), ALONE),
    "the forward of its class": (lambda m: Net.forward(m, rows()), ALONE),
    "the forward of its class, later": (lambda m: (m(rows()), Net.forward(m, rows())), ALONE),
    "traced by torch.fx": (lambda m: torch.fx.symbolic_trace(m)(rows()), ALONE),
    "data that is set": (lambda m: each(lambda p: setattr(p, "data", p.data * 2))(m), ".data was set"),
    "plain data that is set": (lambda m: (setattr(m.up.weight, "data", torch.ones(16, 8)), m(rows())), ".data was set"),
    "a copy": (lambda m: copy.deepcopy(m)(rows()), "a parallel model has no copies"),
    "exported": (lambda m: torch.export.export(m, (rows(),)), "cannot be exported or traced"),
    "traced": (lambda m: torch.jit.trace(m, rows()), "cannot be exported or traced"),
    "jacrev": (lambda m: func.jacrev(m)(rows()), TRANSFORMS),
    "vjp": (lambda m: func.vjp(m, rows()), TRANSFORMS),
    "jvp": (lambda m: func.jvp(m, (rows(),), (rows(),)), TRANSFORMS),
    "vmap": (lambda m: torch.vmap(m)(rows()[:, None]), TRANSFORMS),
    "linearize": (lambda m: func.linearize(m, rows()), TRANSFORMS),
}


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def on_ranks(rank: Rank, _: None) -> dict[str, float | str]:
    """How far each is off that of one process, or why it is refused."""
    seen: dict[str, float | str] = {}
    for name, idiom in {**ALIKE, **{name: idiom for name, (idiom, _) in REFUSED.items()}}.items():
        with contextlib.suppress(Exception):
            seen[name] = "an error that is none of ours"
            model = made()
            tangram.parallelize(model, "tp=2", MARKS, inputs={"x": rows()})
            try:
                found, right = idiom(model), idiom(made()) if name in ALIKE else None
                seen[name] = float((getattr(found, "full_tensor", lambda y=found: y)() - right).abs().max())
            except UserError as error:
                seen[name] = str(error)
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float | str]]:
    def run(_: object) -> list[dict[str, float | str]]:
        return [*run_ranks(on_ranks, None, world=2, on_event=lambda _: None, device="cpu")]

    return once(tmp_path_factory, "idioms", run)


@pytest.mark.parametrize("name", ALIKE)
def test_as_on_one_process(ranks: list[dict[str, float | str]], name: str) -> None:
    assert all(isinstance(own[name], float) and cast("float", own[name]) < 2e-5 for own in ranks), ranks[0][name]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks: list[dict[str, float | str]], name: str) -> None:
    assert all(REFUSED[name][1] in str(own[name]) for own in ranks), ranks[0][name]
