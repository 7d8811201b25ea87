"""Torch's database of operators, each entry called as a user calls it, with its inputs cut over simulated ranks.

For each sample, each dim of each of its tensors is cut over two ranks in turn, the others being whole. Whatever
operators the call ends in go through the table, what must move is moved, and results and gradients are put together
and compared with those of the plain call. So this proves rules, propagation and derived backward together, through
torch's dispatcher; `prove` tries harder, one operator at a time.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tangram.errors import UserError
from tangram.hardware.host import workers
from tangram.layout import Layout, Mesh
from tangram.layout.syntax import VOID, Cut, Dim
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.proof.execute import differs
from tangram.sharding.proof.samples.samples import LARGEST
from tangram.sharding.proof.simulate import SimTensor, SimWorld, cut, together

SAMPLES = 3
"""Of an entry."""
LIMIT = 900.0
EACH = 120.0


@dataclass(frozen=True)
class ProofEntry:
    """What came of one entry of the database."""

    name: str
    kind: str
    """`right` in every case, `wrong` or `refused` in some, `random`, `untested` (nothing to cut), or `crashed`."""
    cases: int = 0
    moved: float = 0.0
    """Bytes that ranks got from others, in all cases."""
    why: str = ""


def tried(info: Any) -> ProofEntry:
    """Try one entry. Never raises: what goes wrong is in the verdict."""
    name = f"{info.name} {info.variant_test_name}".strip()
    dtype = next((d for d in (torch.float64, torch.float32) if info.supports_dtype(d, "cpu")), None)
    counts: Counter[str] = Counter()
    moved, why = 0.0, ""
    for sample in _samples(info, dtype) if dtype is not None else ():
        tensors = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]
        for i, dim in ((i, d) for i, t in enumerate(tensors[:3]) for d, n in enumerate(t.shape) if n > 1):
            kind, own, said = _case(info, sample, i, dim)
            counts[kind] += 1
            moved += own
            if kind in ("wrong", "refused") and not why:
                why = f"input {i} of {[list(t.shape) for t in tensors]} cut over dim {dim}: {said}"
    kinds = ("wrong", "refused", "right", "random")
    return ProofEntry(name, next((k for k in kinds if counts[k]), "untested"), counts.total(), moved, why)


def _samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    torch.manual_seed(0)
    try:
        found: list[Any] = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), SAMPLES))
    except Exception:  # noqa: BLE001  of libraries that are not there
        return
    for sample in found:
        leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
        if sum(t.numel() for t in leaves if isinstance(t, Tensor)) <= LARGEST:
            yield sample


def _case(info: Any, sample: Any, which: int, dim: int) -> tuple[str, float, str]:
    """One way of cutting a sample: the verdict, bytes moved, and what is wrong."""
    backward = True
    try:
        want = _seeded(info, sample, 0, backward)
    except Exception:  # noqa: BLE001  torch refuses its derivative, or it cannot run here
        backward = False
    try:
        # What gives other numbers for another seed draws them, and cannot be compared.
        want, *again = (_seeded(info, sample, seed, backward) for seed in range(4))
    except Exception:  # noqa: BLE001
        return "untested", 0.0, ""
    if any(_unlike(want, other) for other in again):
        return "random", 0.0, ""
    world = SimWorld(Mesh.parse("x=2"), builtin())
    try:
        found = _called(info, sample, (world, which, dim), backward)
    except UserError as error:
        return "refused", 0.0, str(error)
    except Exception as error:  # noqa: BLE001  whatever it is, the plain call does not raise it
        return "wrong", 0.0, f"raises {type(error).__name__}: {error}".splitlines()[0]
    wrong = _unlike(found, want)
    return ("wrong" if wrong else "right"), world.moved, wrong


def _seeded(info: Any, sample: Any, seed: int, backward: bool) -> list[Tensor | None]:
    torch.manual_seed(seed)
    return _called(info, sample, None, backward)


def _called(
    info: Any, sample: Any, where: tuple[SimWorld, int, int] | None, backward: bool = True
) -> list[Tensor | None]:
    """Results and gradients of a sample, plain or on simulated ranks."""
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves: list[Tensor] = []
    given: list[Any] = []
    for value in flat:
        if not isinstance(value, Tensor):
            given.append(value)
            continue
        leaf = value.detach().clone().requires_grad_(backward and (value.is_floating_point() or value.is_complex()))
        if where is None:
            given.append(leaf)
        else:
            world, which, dim = where
            given.append(cut(leaf, _layout(leaf, dim if len(leaves) == which else None), world))
        leaves.append(leaf)
    own, args, kwargs = tree_unflatten(given, spec)
    with DrawMode(SimWorld.seed) if where is None else nullcontext():  # as simulated ranks draw
        made = info.op(own, *args, **kwargs)
    results = [r for r in tree_leaves(made) if isinstance(r, Tensor)]
    whole = [together(r) if isinstance(r, SimTensor) else r for r in results]
    whole = [_dense(r) for r in whole]
    torch.manual_seed(1)
    pairs = [(r, torch.randn(r.shape, dtype=r.dtype)) for r in whole if r.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [r.detach() for r in whole]
    found = torch.autograd.grad([r for r, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
    some = zip(cast("Sequence[Tensor | None]", found), wanted, strict=True)
    gradients = [torch.zeros(leaf.shape, dtype=leaf.dtype) if g is None else _dense(g) for g, leaf in some]
    return [*(r.detach() for r in whole), *gradients]


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _layout(tensor: Tensor, dim: int | None) -> Layout:
    return Layout(tuple(Dim(VOID, n, cuts=(Cut("x"),) if d == dim else ()) for d, n in enumerate(tensor.shape)))


def _unlike(found: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> str:
    if len(found) != len(want):
        return f"gives {len(found)} tensors, not {len(want)}"
    for i, (one, other) in enumerate(zip(found, want, strict=True)):
        assert one is not None
        assert other is not None
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"tensor {i} is {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
        if wrong := differs(one, other):
            return f"tensor {i} {wrong}"
    return ""


def sweep(names: Sequence[str] = ()) -> list[ProofEntry]:
    """Try the whole database, or some entries of it, over two processes. Raises UserError where it cannot be run."""
    shares = workers.in_parts(f"{__name__}:job", {"names": list(names)}, LIMIT, "the database could not be run")
    found = [ProofEntry(**one) for share in shares for one in share]
    unknown = [name for name in names if not any(entry.name.partition(" ")[0] == name for entry in found)]
    if unknown:
        raise UserError(f"torch's database has no entry {unknown[0]}")
    return sorted(found, key=lambda entry: entry.name)


def job(names: list[str], part: int, parts: int) -> Any:
    """One process's share of the database."""
    from torch.testing._internal import common_methods_invocations as database

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)  # what `empty` gives is the same each time
    known: Any = database
    lists = [known.foreach_unary_op_db, known.foreach_binary_op_db, known.foreach_pointwise_op_db]
    every = [*known.op_db, *itertools.chain(*lists, known.foreach_reduce_op_db, known.foreach_other_op_db)]
    infos = [info for info in every if not names or info.name in names]
    found: list[Any] = []
    for info in infos[part::parts]:
        value = workers.forked(lambda info=info: asdict(tried(info)), EACH)
        name = f"{info.name} {info.variant_test_name}".strip()
        found.append(asdict(ProofEntry(name, "crashed", why="its process ended")) if value is None else value)
    return found
