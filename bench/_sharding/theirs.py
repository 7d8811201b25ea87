"""A case by DTensor of the torch at hand, on two processes over gloo; a mode sees every collective that really runs.

What a rank receives is counted by the bytes that it gives, padding included: all-gather (n-1) times, all-reduce
2(n-1)/n, reduce-scatter and all-to-all (n-1)/n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench._sharding.cases import RANKS, Case, Sample, differentiable, gradients_of, unlike

_K = RANKS
SHARES: Mapping[str, float] = {
    "all_gather_into_tensor": _K - 1,
    "all_reduce": 2 * (_K - 1) / _K,
    "reduce_scatter_tensor": (_K - 1) / _K,
    "all_to_all_single": (_K - 1) / _K,
    "shard_dim_alltoall": (_K - 1) / _K,
    "allreduce_": 2 * (_K - 1) / _K,
    "broadcast": 1,
    "broadcast_": 1,
    "send": 1,
}
"""By the operator of the collective; what is not here counts nothing (`wait_tensor`, `recv_`, `barrier`)."""
UNKNOWN = frozenset({
    "_allgather_base_", "_reduce_scatter_base_", "allgather_", "alltoall_", "alltoall_base_", "gather_", "reduce_",
    "scatter_",
})  # fmt: skip
"""Collectives that DTensor does not call; one that appears is an error here and no silent zero."""


class Counting(TorchDispatchMode):
    """Counts what this rank receives in the collectives that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0.0

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # first what DTensor makes of it
        if func.namespace in ("_c10d_functional", "_dtensor", "c10d"):
            name = func.name().partition("::")[2].partition(".")[0]
            if name in UNKNOWN:
                raise AssertionError(f"{name} is a collective that is not counted")
            if name in SHARES:
                given = next(one for one in tree_leaves(args) if isinstance(one, Tensor))
                self.nbytes += SHARES[name] * given.nbytes
        return func(*args, **(kwargs or {}))

    def taken(self) -> float:
        """The bytes since it was last asked."""
        nbytes, self.nbytes = self.nbytes, 0.0
        return nbytes


def tried(sample: Sample, which: int, dim: int, mesh: DeviceMesh) -> Case:
    """Run one case on this rank; the bytes are this rank's. Never raises: what goes wrong is in the verdict."""
    try:
        with Counting() as count:
            return _tried(sample, which, dim, mesh, count)
    except Exception as error:  # noqa: BLE001  whatever it is, the plain call does not raise it
        return Case("raises", why=f"{type(error).__name__}: {error}".partition("\n")[0])


def _tried(sample: Sample, which: int, dim: int, mesh: DeviceMesh, count: Counting) -> Case:
    placements = [Shard(dim) if i == which else Replicate() for i in range(len(sample.tensors))]
    leaves = [
        placed(t, p, mesh).requires_grad_(differentiable(t)) for t, p in zip(sample.tensors, placements, strict=True)
    ]
    count.taken()
    results = sample.call(leaves)
    forward = count.taken()
    whole: list[Tensor] = []
    closing = 0.0
    for result in results:
        whole.append(_whole(result))
        nbytes = count.taken()
        closing += nbytes if isinstance(result, DTensor) and result.placements[0].is_partial() else 0.0
    pairs = zip(sample.plain.cotangents, results, strict=True)
    cotangents = [None if c is None else _cotangent(c, r, mesh) for c, r in pairs]
    count.taken()
    found, used = gradients_of(results, leaves, cotangents)
    backward = count.taken()
    wanted = [p for t, p in zip(leaves, placements, strict=True) if t.requires_grad]
    own = [
        g.redistribute(placements=[p]) if some and isinstance(g, DTensor) else g
        for g, p, some in zip(found, wanted, used, strict=False)
    ]
    closing += count.taken()
    gradients = [_whole(g) for g in own]
    wrong = unlike(whole, sample.plain.results) or unlike(gradients, sample.plain.gradients)
    if wrong:
        return Case("wrong", why=wrong)
    gathered = all(one.placements[0].is_replicate() for one in results if isinstance(one, DTensor))
    return Case("right", forward, backward, closing, gathered and forward * RANKS >= sample.gathered(which))


def placed(tensor: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    """This rank's part of a tensor that it has whole: nothing is sent."""
    tensor = tensor.detach().contiguous()
    dim = next((d for d in range(tensor.ndim) if placement.is_shard(d)), None)
    own = tensor if dim is None else tensor.chunk(RANKS, dim)[mesh.get_rank()]
    return DTensor.from_local(
        own.clone(), mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _whole(result: Tensor) -> Tensor:
    """A result put together."""
    local = result.detach()
    return local.redistribute(placements=[Replicate()]).to_local() if isinstance(local, DTensor) else local


def _cotangent(cotangent: Tensor, result: Tensor, mesh: DeviceMesh) -> Tensor:
    """Cut where the result is cut, else whole."""
    if not isinstance(result, DTensor):
        return cotangent
    whole = placed(cotangent, Replicate(), mesh)
    return whole if result.placements[0].is_partial() else whole.redistribute(placements=result.placements)
