"""What a few ranks do with the rules in the place of DTensor's: the same lines with plain tensors and with DTensors."""

from __future__ import annotations

import itertools
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tangram.sharding.dtensor.rules import register
from tangram.sharding.ops.rule_table import RuleTable, parse_lines

Op = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def heads(*sizes: int) -> tuple[tuple[int, ...], ...]:
    return (sizes,) * 3


def in_place(x: Tensor, y: Tensor) -> Tensor:
    return (x * 1).add_(y, alpha=2).mul_(3).clamp_(min=-1).masked_fill_(y > 0.5, 7)


def into(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cumsum(x, -1, out=torch.zeros_like(x))


FORWARD: dict[str, Op] = {
    "mm": (torch.mm, ((4, 8), (8, 12))),
    "mm uneven": (torch.mm, ((5, 7), (7, 3))),
    "bmm": (torch.bmm, ((4, 3, 5), (4, 5, 2))),
    "addmm": (torch.addmm, ((12,), (4, 8), (8, 12))),
    "addmm uneven": (torch.addmm, ((5, 3), (5, 7), (7, 3))),
    "linear": (F.linear, ((4, 4, 6), (3, 6), (3,))),
    "softmax": (lambda x: x.softmax(-1), ((5, 6),)),
    "log_softmax": (lambda x: x.log_softmax(0), ((5, 6),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), ((5, 6), (6,), (6,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), ((5, 6), (6,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((5, 4, 3), (4,), (4,))),
    "attention": (F.scaled_dot_product_attention, heads(2, 4, 6, 8)),
    "attention causal": (lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), heads(5, 3, 6, 8)),
    "attention masked": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), (*heads(4, 4, 6, 8), (6, 6))),
    "conv1d": (lambda *x: F.conv1d(*x, padding=1), ((4, 4, 6), (8, 4, 3), (8,))),
    "conv1d uneven": (lambda *x: F.conv1d(*x, stride=2), ((3, 5, 7), (6, 5, 3), (6,))),
    "conv2d groups": (lambda *x: F.conv2d(*x, groups=4), ((4, 8, 5, 5), (4, 2, 3, 3))),
    "conv_transpose1d": (lambda *x: F.conv_transpose1d(*x, stride=2), ((4, 4, 6), (4, 3, 3))),
    "cumsum": (lambda x: x.cumsum(-1), ((5, 6),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), ((5, 6),)),
    "mse": (F.mse_loss, ((5, 3), (5, 3))),
    "mse sum": (lambda *x: F.mse_loss(*x, reduction="sum"), ((5, 3), (5, 3))),
    "mse none": (lambda *x: F.mse_loss(*x, reduction="none"), ((5, 3), (5, 3))),
    "smooth_l1": (F.smooth_l1_loss, ((4, 3), (4, 3))),
    "huber": (F.huber_loss, ((5, 3), (5, 3))),
    "soft_margin": (lambda x, y: F.soft_margin_loss(x, y.detach()), ((5, 3), (5, 3))),
    "bce with logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), ((5, 3), (5, 3))),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), ((5, 3), (5, 3))),
    "cat": (lambda x, y: torch.cat([x, y], 0), ((4, 6), (3, 6))),
    "stack": (lambda x, y: torch.stack([x, y], -1), ((5, 6), (5, 6))),
    "view": (lambda x: x.view(4, 2, 6), ((8, 6),)),
    "select": (lambda x: x.select(-1, 1), ((5, 6),)),
    "unbind": (lambda x: torch.stack(x.unbind(0)), ((4, 6),)),
    "split": (lambda x: sum(y.sum(0) for y in x.split([2, 3])), ((5, 6),)),
    "sum": (lambda x: x.sum(0), ((5, 6),)),
    "sum all": (lambda x: x.sum(), ((5, 6),)),
    "mean": (lambda x: x.mean(-1, keepdim=True), ((5, 6),)),
    "sum of sums": (lambda x, y: (x.sum(0) + y.sum(0)) * 2 - x.sum(0) / 3, ((5, 6), (5, 6))),
    "amax": (lambda x: x.amax(0), ((3, 6),)),
    "max": (lambda x: x.max(), ((1, 6),)),
    "std": (lambda x: x.std(-1), ((5, 6),)),
    "var": (lambda x: x.var(0), ((5, 6),)),
    "tril": (torch.tril, ((5, 4, 4),)),
    "triu": (lambda x: x.triu(1), ((5, 4, 4),)),
    "pad": (lambda x: F.pad(x, (1, 2)), ((5, 6),)),
    "logsumexp": (lambda x: x.logsumexp(0, keepdim=True), ((5, 6),)),
    "sort": (lambda x: x.sort(-1)[0], ((5, 6),)),
    "where": (lambda x, y: torch.where(x > 0, x, y), ((5, 6), (6,))),
    "in place": (in_place, ((5, 6), (5, 6))),
    "linear of a vector": (F.linear, ((8,), (3, 8))),
    "diagonal": (lambda x: x.diagonal(0, -2, -1), ((5, 4, 4),)),
    "qr": (lambda x: torch.linalg.qr(x)[1], ((2, 4, 4),)),
    "chain": (lambda x, w, v: F.gelu(x @ w) @ v, ((5, 8), (8, 12), (12, 8))),
}  # fmt: skip
"""With random numbers of these shapes; forward and backward."""

ROWS = (torch.arange(7) * 3) % 5
OTHERS: dict[str, Op] = {
    "embedding": (lambda w, i: F.embedding(i, w), ((5, 6), (7,))),
    "embedding padded": (lambda w, i: F.embedding(i, w, padding_idx=3), ((8, 4), (7,))),
    "index_select": (lambda w, i: w.index_select(0, i), ((5, 6), (7,))),
}
"""The last tensor holds row numbers."""

WITHOUT_GRADIENT: dict[str, Op] = {
    "cumprod": (lambda x: x.cumprod(-1), ((5, 6),)),
    "scalars": (lambda x: (x + 1, x * True, x.pow(2), x.clamp(0, 1), 1 / x), ((5, 6),)),
    "argmax": (lambda x: x.argmax(-1), ((5, 6),)),
    "argmax all": (lambda x: x.argmax(), ((5, 6),)),
    "any": (lambda x: (x > 1).any(0).float(), ((5, 6),)),
    "all": (lambda x: (x > -1).all().float(), ((5, 6),)),
    "fill": (lambda x: x.sum(0).fill_(2.0), ((5, 6),)),
    "fill a max": (lambda x: x.amax(0).fill_(2.0), ((5, 6),)),
    "threshold": (lambda x: F.threshold(x.amax(0), 0.5, 10.0), ((5, 6),)),
    "out": (into, ((5, 6),)),
    "one_hot": (lambda x: F.one_hot((x > 0).long(), 3), ((5, 6),)),
    "same dims": (lambda x: (x.sum([0]), x.sum([1]), x.cumsum(0), x.cumsum(1), x.cumsum(-1)), ((4, 4),)),
    "count_nonzero": (lambda x: (x > 0).count_nonzero(0), ((5, 6),)),
    "topk": (lambda x: x.topk(2)[1], ((5, 6),)),
}


def placements(whole: Sequence[Tensor], mesh: DeviceMesh) -> Iterator[tuple[tuple[Placement, ...], ...]]:
    """Every way to place each tensor, where these are few; else each in turn, the others whole, and all alike."""
    kinds = [[Replicate(), *(Shard(d) for d in range(t.ndim))] for t in whole]
    each = [[tuple(some) for some in itertools.product(own, repeat=mesh.ndim)] for own in kinds]
    if torch.Size([len(some) for some in each]).numel() <= 12:
        yield from itertools.product(*each)
        return
    start = tuple(some[0] for some in each)
    for i, some in enumerate(each):
        for one in some if mesh.ndim == 1 else some[1::3]:
            yield (*start[:i], one, *start[i + 1 :])
    for place in each[0]:
        yield tuple(place if place in some else some[-1] for some in each)


def outcome(op: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Results, and gradients where there are any, as plain tensors."""
    found = op(*tensors)
    results = list(found) if isinstance(found, tuple | list) else [found]
    made = [r.full_tensor() if isinstance(r, DTensor) else r for r in results]
    if results[0].requires_grad:
        results[0].square().sum().backward()
        made += [t.grad.full_tensor() if isinstance(t.grad, DTensor) else t.grad for t in tensors if t.grad is not None]
    return [t.detach() for t in made]


def wrong(name: str, op: Op, mesh: DeviceMesh, kind: str) -> Iterator[str]:
    """The ways of placing an operator's tensors that give something else, or raise."""
    run, shapes = op
    torch.manual_seed(0)
    whole = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    if kind == "rows":
        whole[-1] = ROWS.clone()
    grown = [t.requires_grad_(kind != "plain" and t.is_floating_point()) for t in whole]
    want = outcome(run, grown)
    for places in placements(whole, mesh):
        given = [
            distribute_tensor(t.detach(), mesh, place).requires_grad_(t.requires_grad)
            for t, place in zip(whole, places, strict=True)
        ]
        try:
            got = outcome(run, given)
        except Exception as error:  # noqa: BLE001 (whatever is raised is what is told)
            where = traceback.extract_tb(error.__traceback__)[-1]
            yield f"{name} {places} on {mesh.shape}: {type(error).__name__}: {str(error)[:300]} ({where.name})"
            continue
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype or not torch.allclose(a, b, equal_nan=True):
                yield f"{name} {places} on {mesh.shape}: value {i} differs: {a.dtype} {a.shape} {b.dtype} {b.shape}"


def all_wrong(mesh: DeviceMesh, names: Sequence[str]) -> list[str]:
    kinds = (("random", FORWARD), ("rows", OTHERS), ("plain", WITHOUT_GRADIENT))
    rows = [(name, op, kind) for kind, table in kinds for name, op in table.items() if not names or name in names]
    return [line for name, op, kind in rows for line in wrong(name, op, mesh, kind)]


def work(rank: int, folder: str, shape: list[int], names: list[str]) -> dict[str, Any]:
    """One rank of a mesh: operators, and what is there before, while and after the rules are registered."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks = math.prod(shape)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", tuple(shape))
    found: dict[str, Any] = {"before": scan_is_right(mesh)}
    with register():
        found["with"] = scan_is_right(mesh)
        found["wrong"] = all_wrong(mesh, names)
        found["moved"] = moved(mesh) if mesh.ndim == 1 else {}
        found["written"] = written(mesh)
        found["half"] = half()
        found["own"] = own_operator_is_right(mesh)
    found["after"] = scan_is_right(mesh)
    dist.barrier()
    dist.destroy_process_group()
    return found


def scan_is_right(mesh: DeviceMesh) -> bool:
    x = torch.rand(2, 8, generator=torch.Generator().manual_seed(1))
    return torch.allclose(distribute_tensor(x, mesh, [Shard(1)] * mesh.ndim).cumsum(-1).full_tensor(), x.cumsum(-1))


def half() -> list[list[int]]:
    """The local shapes of results on a mesh that not all ranks are of."""
    x = distribute_tensor(torch.rand(4, 6), DeviceMesh("cpu", [0]), [Shard(0)])
    results = [x.cumsum(-1), x.amax(0), x + x, x.clone().add_(1)]
    return [list(result.to_local().shape) for result in results]


def written(mesh: DeviceMesh) -> list[str]:
    """What becomes of writing to views of rows that are cut, and of columns."""
    ways: list[Callable[[Tensor], Any]] = [
        lambda x: x[0].fill_(7),
        lambda x: x[1:3].uniform_(),
        lambda x: x.__setitem__(0, 7.0),
        lambda x: x[:, 0].fill_(7),
        lambda x: x[:, 1:3].zero_(),
        lambda x: x.__setitem__((slice(None), 0), 7.0),
        lambda x: x.t()[0].neg_(),
    ]
    found: list[str] = []
    for way in ways:
        whole = torch.arange(24.0).reshape(4, 6)
        x = distribute_tensor(whole.clone(), mesh, [Shard(0)] * mesh.ndim)
        try:
            way(x)
        except RuntimeError as error:
            found.append("refused" if "would write to a copy" in str(error) else str(error))
            continue
        way(whole)
        found.append("right" if torch.equal(x.full_tensor(), whole) else "wrong")
    return found


def own_operator_is_right(mesh: DeviceMesh) -> bool:
    """An operator of somebody's, with a rule in a table of theirs, asked for two lists of dims."""

    def mirror(x: Tensor, dims: list[int]) -> Tensor:
        return x.flip(dims)

    operator = torch.library.custom_op("exporting::mirror", mirror, mutates_args=())
    operator.register_fake(mirror)
    overload = torch.ops.exporting.mirror.default
    table = RuleTable().with_lines(parse_lines("exporting.mirror : ... {dims}^ ... -> ... {dims}^ ..."))
    whole = torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
    x = distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim)
    with register(table, [overload]) as registered:
        alike = [torch.equal(operator(x, dims).full_tensor(), whole.flip(dims)) for dims in ([1], [0], [-1], [0, 1])]
        stays = operator(x, [1]).placements[0] == Shard(0)
    return all(alike) and stays and registered.names == ("exporting.mirror",)


def moved(mesh: DeviceMesh) -> dict[str, str]:
    """How results of calls are placed: what can stay cut does."""

    def cut(*shape: int, dim: int = 0) -> DTensor:
        return distribute_tensor(torch.randn(shape), mesh, [Shard(dim)])

    found = {
        "tril": cut(4, 5, 5).tril(),
        "std": cut(4, 6).std(-1),
        "pad": F.pad(cut(4, 6), (1, 1)),
        "attention": F.scaled_dot_product_attention(*(cut(2, 4, 6, 8, dim=1) for _ in range(3))),
        "conv1d": F.conv1d(cut(4, 3, 6), distribute_tensor(torch.randn(2, 3, 3), mesh, [Replicate()])),
        "mm": cut(4, 8, dim=1) @ cut(8, 4),
        "sum": cut(4, 8).sum(0) + cut(4, 8).sum(0),
        "amax": cut(4, 8).amax(0),
        "rms_norm": F.rms_norm(cut(4, 8), (8,)),
        "cumsum": cut(4, 8).cumsum(-1),
    }
    return {name: str(tensor.placements[0]) for name, tensor in found.items()}
