"""The cases that both sides run: samples of an entry, each dim of each of its first tensors cut over two ranks in turn.

The plain call says what is right: results, and gradients for random cotangents. A sample that draws random numbers
(the generator moves on in one of its operators), whose values are what memory held before, or that torch cannot run or
differentiate at all, is no case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tangram.sharding.proof.execute import differs
from tangram.sharding.proof.samples.samples import LARGEST

SAMPLES = 3
"""Of an entry."""
TENSORS = 3
"""Of a sample that are cut, one at a time."""
RANKS = 2
EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Entries whose values are undefined."""


@dataclass(frozen=True)
class Plain:
    """What a sample gives in one process."""

    results: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    """Of each result; None for one without a gradient."""
    gradients: tuple[Tensor, ...]
    """Of each tensor that may have one, in order."""
    used: tuple[bool, ...]
    """Whether torch has a gradient for it, or none at all."""


@dataclass(frozen=True)
class Sample:
    """One call of an entry, plain."""

    info: Any
    flat: tuple[Any, ...]
    spec: Any
    plain: Plain

    @property
    def tensors(self) -> list[Tensor]:
        """Those that can be cut."""
        return [value for value in self.flat if isinstance(value, Tensor)]

    def cuts(self) -> Iterator[tuple[int, int]]:
        """Each (tensor, dim) that is cut: the others are whole."""
        for i, tensor in enumerate(self.tensors[:TENSORS]):
            yield from ((i, dim) for dim, n in enumerate(tensor.shape) if n > 1)

    def gathered(self, which: int) -> int:
        """Bytes that ranks receive to gather a tensor."""
        return (RANKS - 1) * self.tensors[which].nbytes

    def call(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Call it with these; the tensors of what it gives."""
        return called(self.info, self.flat, self.spec, tensors)


@dataclass(frozen=True)
class Case:
    """What came of one way of cutting one sample."""

    kind: str
    """`right`, `wrong` or `raises`."""
    forward: float = 0.0
    """Bytes that ranks received in the operators, all ranks together."""
    backward: float = 0.0
    closing: float = 0.0
    """To reduce pending results, and to bring each gradient to the layout of its tensor."""
    whole: bool = False
    """As many bytes were moved as it takes to gather what was cut, and all results are whole on each rank."""
    why: str = ""

    @property
    def nbytes(self) -> float:
        """All bytes."""
        return self.forward + self.backward + self.closing


def name_of(info: Any) -> str:
    """As the database calls an entry, with its variant."""
    return f"{info.name} {info.variant_test_name}".strip()


def differentiable(tensor: Tensor) -> bool:
    """Whether a tensor may have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


class Drawing(TorchDispatchMode):
    """Sees whether operators draw random numbers, or give memory as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        found = func(*args, **(kwargs or {}))
        self.seen = self.seen or not torch.equal(before, torch.get_rng_state())
        return found


def samples(info: Any) -> Iterator[Sample | None]:
    """The samples of an entry, in order; None for one that draws random numbers."""
    dtype = next((d for d in (torch.float64, torch.float32) if info.supports_dtype(d, "cpu")), None)
    if dtype is None or info.name in EMPTY:
        return
    torch.manual_seed(0)
    try:
        found: list[Any] = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), SAMPLES))
    except Exception:  # noqa: BLE001  of libraries that are not there
        return
    for one in found:
        flat, spec = tree_flatten((one.input, one.args, one.kwargs))
        if sum(t.numel() for t in flat if isinstance(t, Tensor)) > LARGEST:
            continue
        drawing = Drawing()
        try:
            plain = _plain(info, flat, spec, drawing)
        except Exception:  # noqa: BLE001  the sample cannot run here
            plain = None
        if plain is not None:
            yield None if drawing.seen else Sample(info, tuple(flat), spec, plain)


def _plain(info: Any, flat: Sequence[Any], spec: Any, drawing: Drawing) -> Plain:
    leaves = [leaf(value) for value in flat if isinstance(value, Tensor)]
    with drawing:  # not while gradients are taken: torch leaves out checks of them under a mode
        results = called(info, flat, spec, leaves)
    generator = torch.Generator().manual_seed(1)
    cotangents = [
        torch.randn(r.shape, dtype=r.dtype, generator=generator) if r.requires_grad else None for r in results
    ]
    gradients, used = gradients_of(results, leaves, cotangents)
    return Plain(tuple(r.detach() for r in results), tuple(cotangents), tuple(gradients), tuple(used))


def leaf(tensor: Tensor) -> Tensor:
    """A tensor of its own that wants a gradient where it may have one."""
    return tensor.detach().clone().requires_grad_(differentiable(tensor))


def called(info: Any, flat: Sequence[Any], spec: Any, tensors: Sequence[Tensor]) -> list[Any]:
    """Call an entry with other tensors in the places of a sample's."""
    given = iter(tensors)
    own, args, kwargs = tree_unflatten([next(given) if isinstance(v, Tensor) else v for v in flat], spec)
    return [r for r in tree_leaves(info.op(own, *args, **kwargs)) if isinstance(r, Tensor)]


def gradients_of(
    results: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[bool]]:
    """The gradient of each leaf that wants one, zeros where there is none; and whether there is one."""
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None]
    wanted = [t for t in leaves if t.requires_grad]
    if not pairs or not wanted:
        return [], []
    found = torch.autograd.grad([r for r, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
    some = cast("Sequence[Tensor | None]", found)
    return (
        [torch.zeros_like(t) if g is None else g for g, t in zip(some, wanted, strict=True)],
        [g is not None for g in some],
    )


def unlike(found: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """What is wrong with tensors that should be others; nothing when they are."""
    if len(found) != len(want):
        return f"gives {len(found)} tensors, not {len(want)}"
    for i, (one, other) in enumerate(zip(found, want, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"tensor {i} is {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
        if wrong := differs(one, other):
            return f"tensor {i} {wrong}"
    return ""
