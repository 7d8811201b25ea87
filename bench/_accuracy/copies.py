"""Operators that only move, choose or order values, which must keep every bit; and casts, which round once.

What is moved are all values of a 16-bit type, NaN and their bits too. The oracle is numpy, on the bits as integers (on
the values where they are compared).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench._accuracy.bounds import Truth
from bench._accuracy.operator import DTYPES, Case, Draw, Inputs, Operator

Bits = np.ndarray[Any, np.dtype[np.int16]]
A: Any = torch.ops.aten
SIDE = 256


@dataclass(frozen=True)
class Move:
    """An operator on a square of bits, and what numpy makes of it."""

    name: str
    aten: tuple[str, ...]
    call: Callable[[Tensor], Tensor]
    oracle: Callable[[Bits], Bits]


def square(dtype: torch.dtype) -> Tensor:
    """All values of a 16-bit type, in a square, not in order."""
    order = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)
    return torch.from_numpy(order.view(np.int16).reshape(SIDE, SIDE)).view(dtype)


KEPT = ("exact", "but NaN", "wrong")
"""Every bit is kept; all but the bits that tell one NaN from another; a value is lost."""


def moved(one: Move, dtype: torch.dtype, device: str = "cpu") -> str:
    """One of KEPT."""
    x = square(dtype)
    got = one.call(x.to(device)).cpu().contiguous()
    wanted = one.oracle(x.view(torch.int16).numpy())
    if tuple(got.shape) != wanted.shape:
        return "wrong"
    if np.array_equal(got.view(torch.int16).numpy(), wanted):
        return "exact"
    values = torch.from_numpy(np.ascontiguousarray(wanted)).view(dtype).double()
    zeros = torch.equal(values.signbit() & (values == 0), got.double().signbit() & (got == 0))
    return "but NaN" if zeros and np.array_equal(values.numpy(), got.double().numpy(), equal_nan=True) else "wrong"


ROWS = [3, 250, 3, 0, 255]
FIRST = (np.arange(SIDE) % 3 == 0)[:, None]


def _rows(x: Tensor) -> Tensor:
    return torch.tensor(ROWS, device=x.device)


def _mask(x: Tensor) -> Tensor:
    return torch.from_numpy(FIRST).to(x.device)


def _put(x: Bits) -> Bits:
    out = x.copy()
    out[[1, 4]] = x[[9, 8]]
    return out


def _padded(x: Bits, before: int, after: int) -> Bits:
    return np.pad(x, ((0, 0), (before, after)))


def _column(x: Tensor) -> Tensor:
    return torch.arange(SIDE, device=x.device)[:, None]


MOVES = (
    Move("view", ("view.default", "_unsafe_view.default"), lambda x: x.view(64, 1024), lambda x: x.reshape(64, 1024)),
    Move("transpose", ("t.default", "transpose.int", "permute.default"), torch.t, lambda x: x.T),
    Move("clone", ("clone.default", "copy_.default", "detach.default", "alias.default"), torch.clone, lambda x: x),
    Move("expand", ("expand.default", "repeat.default"), lambda x: x[:1].expand(5, SIDE), lambda x: x[[0] * 5]),
    Move("unsqueeze", ("unsqueeze.default", "squeeze.dim"), lambda x: x.unsqueeze(1), lambda x: x[:, None]),
    Move("slice", ("slice.Tensor", "select.int"), lambda x: x[3:200:7, 5:], lambda x: x[3:200:7, 5:]),
    Move("split", ("split.Tensor", "split_with_sizes.default"),
         lambda x: torch.split(x, [100, 156], 1)[1], lambda x: x[:, 100:]),
    Move("cat", ("cat.default",), lambda x: torch.cat([x[100:], x[:7]]), lambda x: np.concatenate([x[100:], x[:7]])),
    Move("stack", ("stack.default",), lambda x: torch.stack([x, x], 1), lambda x: np.stack([x, x], 1)),
    Move("embedding", ("embedding.default",), lambda x: F.embedding(_rows(x), x), lambda x: x[ROWS]),
    Move("index", ("index.Tensor",), lambda x: x[_rows(x)], lambda x: x[ROWS]),
    Move("index_put", ("index_put.default", "index_put_.default"),
         lambda x: x.index_put([torch.tensor([1, 4], device=x.device)], x[[9, 8]]), _put),
    Move("gather", ("gather.default",), lambda x: x.gather(1, _column(x)), lambda x: np.diagonal(x)[:, None]),
    Move("scatter", ("scatter.src", "scatter_.src", "scatter_.value"),
         lambda x: torch.zeros_like(x).scatter(1, _column(x), x[:, :1]),
         lambda x: np.where(np.eye(SIDE, dtype=bool), x[:, :1], np.int16(0))),
    Move("where", ("where.self",), lambda x: torch.where(_mask(x), x, x.flip(0)),
         lambda x: np.where(FIRST, x, x[::-1])),
    Move("masked_fill", ("masked_fill.Scalar",), lambda x: x.masked_fill(_mask(x), 0.0),
         lambda x: np.where(FIRST, np.int16(0), x)),
    Move("constant_pad_nd", ("constant_pad_nd.default",), lambda x: F.pad(x, (3, 2)), lambda x: _padded(x, 3, 2)),
    Move("flip", ("flip.default",), lambda x: x.flip(1), lambda x: x[:, ::-1]),
    Move("tril", ("tril.default",), torch.tril, np.tril),
    Move("triu", ("triu.default",), lambda x: x.triu(1), lambda x: np.triu(x, 1)),
    Move("slice_backward", ("slice_backward.default", "slice_scatter.default"),
         lambda x: A.slice_backward(x, [SIDE, SIDE + 5], 1, 3, SIDE + 3, 1), lambda x: _padded(x, 3, 2)),
    Move("select_backward", ("select_backward.default", "select_scatter.default"),
         lambda x: A.select_backward(x[:, 0], [SIDE, 3], 1, 1), lambda x: _padded(x[:, :1], 1, 1)),
)  # fmt: skip

ORDER = {"sort": ("sort.default",), "topk": ("topk.default",)}
"""Those that order values, and the overloads that they stand for."""


def ordered(name: str, dtype: torch.dtype, device: str = "cpu") -> str:
    """Whether values come in order, NaN the largest, and their places are where they were; one of KEPT."""
    x = square(dtype)
    on = x.to(device)
    found, places = (y.cpu() for y in (on.sort(-1) if name == "sort" else on.topk(40, -1)))
    values = np.sort(x.double().numpy(), -1)  # NaN last
    wanted = values if name == "sort" else values[:, ::-1][:, :40]
    got = x.double().gather(1, places).numpy()
    once = all(len(set(row)) == len(row) for row in cast("list[list[int]]", places.tolist()))
    right = once and all(np.array_equal(y, wanted, equal_nan=True) for y in (got, found.double().numpy()))
    return "exact" if right else "wrong"


def _cast_cases(dtype: torch.dtype) -> list[Case]:
    return [Case((4099,), law) for law in ("normal", "wide", "tiny", "special", "cancelling")]


def _from(source: torch.dtype, to: torch.dtype) -> Operator:
    """What is drawn lies near halves of the result's last place, on either side, as well as anywhere."""

    def draw(d: Draw) -> Inputs:
        x = d.values(*d.case.shape)  # on the result's grid
        if d.case.law == "special":
            return [x]
        offset = torch.from_numpy(d.rng.choice([0.0, 0.5, 0.5 + 2.0**-30, 0.5 - 2.0**-30], x.shape))
        return [(x * (1 + offset * 2.0**-d.of.mantissa)).to(source).double()]

    return Operator(
        f"_to_copy, from {str(source).removeprefix('torch.')}", "casts", ("_to_copy.default",), draw,
        lambda x: x.to(to), lambda x: Truth(x, x.abs(), 0), _cast_cases, (to,),
    )  # fmt: skip


CASTS = tuple(
    _from(source, to)
    for source in (torch.float64, *DTYPES)
    for to in DTYPES
    if source is not to
)  # fmt: skip
