"""What one case is, and the functions that show the cases: a few lines each, which a script repeats word for word.

A body sees only torch and the names that a script imports (`script.py`), and computes the same with plain tensors as
with DTensors. It draws its inputs with the seed that the frame has set.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import (
    local_map,  # pyright: ignore[reportUnknownVariableType]
    register_sharding,
)
from torch.distributed.tensor.placement_types import Placement

FOUND_WITH = "2.13.0"
"""The torch with which each row's `found` was seen."""

Verdict = Literal["right", "wrong", "raises", "hangs", "not run"]
"""right: DTensor gives what plain torch gives; wrong: it gives something else and says nothing; raises: it refuses
what plain torch does, or falls over; hangs: a rank waits for ever; not run: no verdict, for a reason that is told."""

Direction = Literal["forward", "backward"]

Place = Callable[[Tensor, Placement], Tensor]
"""Takes a tensor that every rank has whole and its placement on the one mesh axis; gives the DTensor, or, for the
oracle, the tensor as it is."""

Body = Callable[..., Tensor]
"""Takes a `Place` and the row's settings, and computes with what it placed: the same lines serve DTensor and oracle."""


@dataclass(frozen=True, slots=True)
class CompareCase:
    """One thing that DTensor is, or was, wrong about."""

    name: str
    """Letters, digits and hyphens: the name of its script, too."""
    wrong: str
    """What goes wrong, in one sentence for somebody who uses the operator."""
    operator: str
    inputs: tuple[Placement, ...]
    """The placements of the inputs, in the order in which the body places them."""
    body: Body
    settings: Mapping[str, str | int] = field(default_factory=dict[str, str | int])
    direction: Direction = "forward"
    """Whether the wrong value is a result or a gradient."""
    expected: Verdict = "wrong"
    """With torch FOUND_WITH; `right` for something reported upstream that did not show there any more."""
    ranks: int = 2
    issue: str = ""
    """Where upstream it is reported ("owner/repository#number"); empty where no report is known."""
    limit: float = 60.0
    """Seconds after which a rank that is not done is said to hang."""


def scan(place: Place, operator: str) -> Tensor:
    x = place(torch.rand(2, 6), Shard(1))
    return getattr(torch, operator)(x, dim=-1)


def convolution(place: Place, operator: str, cut_x: int, cut_weight: int) -> Tensor:
    spatial = int(operator[4])  # of conv1d, conv2d
    x = place(torch.rand(2, 4, *[6] * spatial), Replicate() if cut_x < 0 else Shard(cut_x))
    weight = place(torch.rand(4, 4, *[3] * spatial), Replicate() if cut_weight < 0 else Shard(cut_weight))
    return getattr(F, operator)(x, weight, padding=1)


def depthwise_convolution(place: Place) -> Tensor:
    x = place(torch.rand(2, 4, 6), Shard(1))
    return F.conv1d(x, place(torch.rand(4, 1, 3), Shard(0)), padding=1, groups=4)


def patches_gradient(place: Place) -> Tensor:
    x = place(torch.rand(2, 3, 8, 8), Shard(3)).requires_grad_()
    F.conv2d(x, place(torch.rand(4, 3, 4, 4), Replicate()), stride=4).square().sum().backward()
    assert x.grad is not None
    return x.grad


def loss(place: Place, operator: str, rows: int) -> Tensor:
    x = place(torch.rand(rows, 3), Shard(0))
    target = place(torch.rand(rows, 3), Shard(0))
    return getattr(F, operator)(x, target)


def loss_gradient(place: Place, operator: str, rows: int) -> Tensor:
    x = place(torch.rand(rows, 3), Shard(0)).requires_grad_()
    target = place(torch.rand(rows, 3), Shard(0))
    getattr(F, operator)(x, target).backward()
    assert x.grad is not None
    return x.grad


def fill_a_pending_sum(place: Place) -> Tensor:
    total = place(torch.rand(4, 3), Shard(0)).sum(0)
    return total.fill_(1.0)


def cosine_embedding(place: Place) -> Tensor:
    x = place(torch.rand(4, 6), Shard(1))
    y = place(torch.rand(4, 6), Shard(1))
    return F.cosine_embedding_loss(x, y, place(torch.tensor([1, -1, 1, -1]), Replicate()))


def threshold_of_an_extreme(place: Place, extreme: str) -> Tensor:
    x = place(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), Shard(0))
    return F.threshold(getattr(x, extreme)(0), 2.5, 10.0)


def select_gradient(place: Place, rows: int) -> Tensor:
    x = place(torch.rand(rows, rows), Shard(0)).requires_grad_()
    x.select(-1, 0).square().sum().backward()
    assert x.grad is not None
    return x.grad


def extreme_of_an_empty_shard(place: Place, operator: str) -> Tensor:
    x = place(torch.rand(1, 3), Shard(0))
    return getattr(x, operator)()


def any_as_a_number(place: Place) -> Tensor:
    x = place(torch.ones(4, 3), Shard(0))
    return x.any(0).float()


def logsumexp_keepdim(place: Place) -> Tensor:
    x = place(torch.rand(4, 6), Shard(1))
    return torch.logsumexp(x, 0, keepdim=True)


def masked_logsumexp(place: Place) -> Tensor:
    x = place(torch.rand(4, 6), Shard(1))
    mask = place(torch.rand(4, 6) > 0.3, Shard(1))
    return torch.masked.logsumexp(x, 0, keepdim=True, mask=mask)  # pyright: ignore[reportUnknownVariableType]


def tolerance_of_pinv(place: Place) -> Tensor:
    x = place(torch.rand(2, 3, 3), Replicate())
    rtol = place(torch.tensor([1e-6, 0.9]), Shard(0))
    return torch.linalg.pinv(x, rtol=rtol)  # pyright: ignore[reportUnknownVariableType]


def overflow_in_adamw(place: Place) -> Tensor:
    weight = place(torch.ones(4), Shard(0)).requires_grad_()
    weight.grad = place(torch.ones(4), Shard(0))
    overflow = place(torch.tensor([0.0, 1.0]), Shard(0)).amax(0)  # only the second rank saw it
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    vars(optimizer).update(grad_scale=None, found_inf=overflow)  # as torch.amp.GradScaler does
    optimizer.step()
    return weight.detach()


def rule_with_a_list_of_dims(place: Place) -> Tensor:
    def mirror(x: Tensor, dims: list[int]) -> Tensor:
        return x.flip(dims)

    def rule(x: Tensor, dims: list[int]) -> list[object]:
        kept = [dim for dim in range(x.ndim) if dim not in dims]
        return [([Replicate()], [Replicate(), None]), *(([Shard(dim)], [Shard(dim), None]) for dim in kept)]

    operator = torch.library.custom_op("against::mirror", mirror, mutates_args=())
    operator.register_fake(mirror)
    register_sharding(torch.ops.against.mirror.default)(rule)
    x = place(torch.rand(4, 6), Shard(0))
    operator(x, [1])
    return operator(x, [0])


def view(place: Place) -> Tensor:
    return place(torch.rand(12, 8), Shard(1)).view(16, 6)


def linear_of_a_cut_sequence(place: Place) -> Tensor:
    x = place(torch.rand(2, 4, 6), Shard(1))
    return F.linear(x, place(torch.rand(3, 6), Replicate()))


def mean(place: Place) -> Tensor:
    return place(torch.rand(5, 3), Shard(0)).mean()


def masked_fill(place: Place) -> Tensor:
    x = place(torch.rand(4, 6), Shard(0))
    return x.masked_fill_(place(torch.rand(4, 6) > 0.5, Shard(0)), 1.0)


def select_the_cut_dim(place: Place) -> Tensor:
    return place(torch.rand(4, 6), Shard(0)).select(0, 1)


def write_into_a_view(place: Place) -> Tensor:
    x = place(torch.rand(4, 6), Shard(0))
    x[0].mul_(2.0)
    return x


def number_of_a_norm(place: Place) -> Tensor:
    return torch.tensor(place(torch.rand(4, 6), Shard(0)).norm().item())


def set_data(place: Place) -> Tensor:
    x = place(torch.rand(4, 6), Shard(0))
    x.data = x.data * 2
    return x + 0


def squeeze_in_place(place: Place) -> Tensor:
    x = place(torch.rand(1, 6), Replicate())
    return torch.tensor(x.squeeze_(0).shape)


def mapped_locally(place: Place) -> Tensor:
    def double(x: Tensor) -> Tensor:
        return x * 2

    x = place(torch.rand(5, 3), Shard(0))
    if isinstance(x, DTensor):
        double = local_map(  # pyright: ignore[reportAssignmentType, reportUnknownVariableType]
            double, [Shard(0)], ([Shard(0)],), device_mesh=x.device_mesh
        )
    return torch.tensor(double(x).shape)
