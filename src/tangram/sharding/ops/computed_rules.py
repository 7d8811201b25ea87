"""Rules that depend on more of a call than a line can say: a function each, from the call to its line.

    index.Tensor, index_put     where the indices stand, and where among the dims of the result theirs come
    repeat, constant_pad_nd     which dims are repeated or padded at all
    diag_embed, diagonal_scatter, take, isin, _linalg_solve_ex      dims of one tensor that another lacks
    histc                               whether the values say the range
    linalg_lstsq                        what there is beside the solution, by the driver
    new_zeros and its like              how many dims are made
    multilabel_margin_loss_forward      whether there are rows
    _grouped_mm                         which of its two tensors are matrices, whose rows come in groups
    _flash_attention_forward, _efficient_attention_forward      whether sequences are packed into one

What a function gives is a rule as any other: bound, cut and proved in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from tangram.layout.rule import Rule
from tangram.sharding.ops.calls import OpCall, name_of

WHOLE = "_"


def _letters(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def _line(inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]], notes: str = "") -> str:
    left, right = (", ".join(" ".join(dims) for dims in side) for side in (inputs, outputs))
    return f"{left} -> {right}" + f" ; {notes}" * bool(notes)


def _repeat(call: OpCall) -> str:
    """Dims that are repeated are whole."""
    ndim, times = _first(call).ndim, call.arguments["repeats"]
    new = len(times) - ndim
    own = [f"d{d}" if n == 1 else WHOLE for d, n in enumerate(times[new:])]
    return _line([own], [[WHOLE] * new + own])


def _pad(call: OpCall) -> str:
    """Dims that are padded are read beyond a part's borders."""
    pad = call.arguments["pad"]
    ndim = _first(call).ndim
    padded = {ndim - 1 - i // 2 for i, n in enumerate(pad) if n}
    dims = _letters("d", ndim)
    read = [f"{f}'" if d in padded else f for d, f in enumerate(dims)]
    return _line([read], [dims], "pad(pad) outside(value)" if padded else "")


def _diagonal(call: OpCall, ndim: int) -> tuple[list[str], list[str]]:
    """The dims of a tensor with its diagonal's whole, and those that are left."""
    at = {d % ndim for d in (call.arguments["dim1"], call.arguments["dim2"])}
    left = iter(_letters("d", ndim))
    dims = [WHOLE if d in at else next(left) for d in range(ndim)]
    return dims, [d for d in dims if d != WHOLE]


def _diag_embed(call: OpCall) -> str:
    """The dims of the diagonal are whole."""
    full, others = _diagonal(call, _first(call).ndim + 1)
    if len(others) != _first(call).ndim - 1:  # one dim twice, which the operator refuses
        return _line([[WHOLE] * _first(call).ndim], [[WHOLE] * len(full)])
    return _line([[*others, WHOLE]], [full])


def _diagonal_scatter(call: OpCall) -> str:
    """The dims of the diagonal are whole."""
    full, others = _diagonal(call, _first(call).ndim)
    return _line([full, [*others, WHOLE]], [full])


def _of_the_first(call: OpCall) -> str:
    """Each element of the first by itself."""
    dims = _letters("d", _first(call).ndim)
    return _line([dims, [WHOLE] * _ndim(call.tensors[1])], [dims])


def _histogram(call: OpCall) -> str:
    """What parts count adds up, but of several bins where the ends are equal: the values themselves say the range."""
    bins, least, most = (call.arguments[name] for name in ("bins", "min", "max"))
    dims = [_letters("d", _first(call).ndim)]
    if bins == 1 or least != most:
        return _line(dims, [[WHOLE, *(f"sum:{d}" for d in dims[0])]])
    return _line([[WHOLE] * len(dims[0])], [[WHOLE]])


def _take(call: OpCall) -> str:
    """Each index by itself; they count through all dims of what is taken from."""
    dims = _letters("i", _ndim(call.tensors[1]))
    return _line([[WHOLE] * _first(call).ndim, dims], [dims])


def _solve(call: OpCall) -> str:
    """A batch of systems, whose right sides may be vectors."""
    a, b = call.tensors[0], call.tensors[1]
    assert a is not None
    assert b is not None
    batch = ["..."] * (a.ndim > 2 or b.ndim > 2)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    right, square = [*batch, WHOLE] if vector else [*batch, WHOLE, WHOLE], [*batch, WHOLE, WHOLE]
    return _line([square, right], [right, square, [*batch, WHOLE], batch])


def _lstsq(call: OpCall) -> str:
    """A batch of systems; whether there are residuals may depend on values, and then what they are of is whole."""
    a, b = call.tensors
    assert a is not None
    assert b is not None
    driver = call.arguments["driver"] or "gelsy"
    residual = driver != "gelsy" and a.shape[-2] > a.shape[-1]
    batch = [] if residual else ["..."] * (a.ndim > 2)
    vector = b.ndim == a.ndim - 1
    whole, right = [WHOLE] * (a.ndim - 2) * residual, [WHOLE] if residual else ["n"]
    first = [*(whole or batch), WHOLE, WHOLE]
    second = [*(whole or batch), WHOLE, *([] if vector else right)]
    rest = [WHOLE] * (b.ndim - 1) if residual else [WHOLE]
    most = ["max:n"] * (not residual and not vector)  # without a column there is no rank
    rank = [WHOLE] if driver == "gels" else [*(whole or batch), *most]
    values = [*(whole or batch), WHOLE, *most] if driver in ("gelsd", "gelss") else [WHOLE]
    return _line([first, second], [second, rest, rank, values], "same(1)")


def _fresh(call: OpCall) -> str:
    """Of the tensor nothing is read; what is made has nothing of its dims."""
    made = call.arguments["size"]
    undefined = "undefined " * ("empty" in call.name)
    return _line([_letters("d", _first(call).ndim)], [[WHOLE] * len(made)], f"{undefined}same(0) unread(0)")


def _indexed(call: OpCall) -> tuple[list[list[str]], list[str], list[str]]:
    """The dims of the indexed tensor, of each index, and of the result; those that are indexed are whole."""
    first, indices = _first(call), [*call.arguments["indices"]]
    masks = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
    given = [t for t in indices if isinstance(t, Tensor)]
    ndim = 1 if masks else max((t.ndim for t in given), default=0)
    shared = [WHOLE] if masks else _letters("i", ndim)
    own: list[str] = []
    for index in indices:  # a mask stands for as many dims as it has
        mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        own += [f"d{len(own)}"] if index is None else [WHOLE] * (index.ndim if mask else 1)
    own += [f"d{d}" for d in range(len(own), first.ndim)]
    each = [[WHOLE] * t.ndim if masks else shared[ndim - t.ndim :] for t in indices if t is not None]
    some = iter(each)
    places = [next(some) if isinstance(t, Tensor) else [WHOLE] for t in indices]
    taken = [d for d, factor in enumerate(own) if factor == WHOLE]
    together = not taken or taken == [*range(taken[0], taken[-1] + 1)]
    at = taken[0] if taken and together else 0
    result = [d for d in own if d != WHOLE]
    before = sum(1 for d in own[:at] if d != WHOLE)
    return places, own, [*result[:before], *shared, *result[before:]]


def _numbered(call: OpCall, own: Sequence[str]) -> tuple[list[str], str]:
    """The dims of the indexed tensor with names for the indexed ones, and the indices into each, as a note has them.

    Masks, which have no places to count from, leave them whole.
    """
    indices: list[Tensor | None] = [*call.arguments["indices"]]
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return [*own], ""
    pairs = [f"{1 + k} at{k}" for k, i in enumerate(indices) if i is not None]
    return [f"at{d}" if factor == WHOLE else factor for d, factor in enumerate(own)], " ".join(pairs)


def _index(call: OpCall) -> str:
    """The indices' dims come where the indexed ones were, or first where these do not stand together. A part gives what
    it holds, to be added up."""
    places, own, result = _indexed(call)
    own, pairs = _numbered(call, own)
    return _line([own, *places], [result], (f"looked({pairs}) " if pairs else "") + "linear(0)")


def _index_put(call: OpCall) -> str:
    """What is put may meet in one place, so the indices are whole; a part takes what belongs to it."""
    places, own, result = _indexed(call)
    own, pairs = _numbered(call, own)
    values = _ndim(call.tensors[-1])
    put = [d if d[0] == "d" else WHOLE for d in result]
    put = put[len(put) - values :] if values else []
    return _line([own, *([WHOLE] * len(p) for p in places), put], [own], f"spill({pairs})" if pairs else "")


def _masked_index(call: OpCall) -> str:
    """As `index.Tensor`, with a mask over the indices."""
    places, own, result = _indexed(call)
    shared = [d for d in result if d[0] == "i"]
    return _line([own, shared[len(shared) - _ndim(call.tensors[1]) :], *places], [result])


def _multilabel(call: OpCall) -> str:
    """A row, or rows that the reduction takes together."""
    rows, reduction = ["n"] * (_first(call).ndim - 1), call.arguments["reduction"]
    dims = [*rows, WHOLE]
    loss = ["sum:n"] * len(rows) if reduction else rows
    return _line([dims, dims], [loss, dims], "scale(n)" if reduction == 1 and rows else "")


def _grouped(call: OpCall) -> str:
    """Experts e with rows t of their own: cut, a part has its experts' rows, to be added up. Groups of a contracted t
    give matrices of their own, which are whole."""
    a, b, ends, bias = (None if t is None else t.ndim for t in call.tensors)
    rows, columns = ["e", "m", "k"], ["e", "k", "n"]
    if ends is None or bias is not None:
        if a == 3 and b == 3 and bias is None:
            return _line([rows, columns], [["e", "m", "n"]], "ragged(none none) each(0 1)")
        return _line([[WHOLE] * (n or 0) for n in (a, b, ends, bias)], [["..."]])
    if a == 2 and b == 2:
        return _line([["m", "t"], ["t", "n"], [WHOLE]], [[WHOLE, "m", "n"]], "ragged(t none) each(0 1)")
    if a == 2:
        return _line([["t", "k"], columns, [WHOLE]], [["t", "n"]], "ragged(t e) each(0 1)")
    return _line([rows, ["k", "t"], [WHOLE]], [["m", "t"]], "ragged(t e) each(0 1)")


def _packed(call: OpCall) -> str:
    """Rows whose heads stand behind them: groups g of heads that share keys, and heads r of a group can be cut, and the
    batch where it is not packed into one sequence."""
    query, key, *others = call.tensors
    assert query is not None
    assert key is not None
    given = call.arguments
    if given["dropout_p"] or any(given.get(name) is not None for name in ("seqused_k", "seqlen_k", "block_table")):
        return _line([["...^"]], [["...^"]], "random" if given["dropout_p"] else "")
    packed = given.get("cum_seq_q", given.get("cu_seqlens_q")) is not None
    batch = [WHOLE if packed else "b"] * (query.ndim - 3)
    lead = [*batch, WHOLE]
    more: list[list[str]] = []
    for (name, _), t in zip(call.places[2:], others, strict=True):
        own = [*batch, "(g r)", WHOLE, WHOLE] if name == "bias" else [*batch, "(g r)"] if "alibi" in name else None
        more.append([*lead, "g", WHOLE] if name == "value" else own[-_ndim(t) :] if own else [WHOLE] * _ndim(t))
    sums = ["(g r)", WHOLE] if query.ndim == 3 else [*batch, "(g r)", WHOLE]
    out = [*lead, "(g r)", WHOLE]
    return _line([out, [*lead, "g", WHOLE], *more], [out, sums, ["..."]], "same(2) filled")


def _first(call: OpCall) -> Tensor:
    tensor = call.tensors[0]
    assert tensor is not None
    return tensor


def _ndim(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.ndim


ESCAPES: Mapping[str, Callable[[OpCall], str]] = {
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    "diag_embed": _diag_embed,
    "diagonal_scatter": _diagonal_scatter,
    "histc": _histogram,
    "isin.Tensor_Tensor": _of_the_first,
    "take": _take,
    "multilabel_margin_loss_forward": _multilabel,
    "_linalg_solve_ex": _solve,
    "linalg_lstsq": _lstsq,
    "new_empty": _fresh,
    "new_empty_strided": _fresh,
    "new_full": _fresh,
    "new_ones": _fresh,
    "new_zeros": _fresh,
    "index.Tensor": _index,
    "_unsafe_index.Tensor": _index,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_unsafe_index_put": _index_put,
    "_unsafe_masked_index": _masked_index,
    "_grouped_mm": _grouped,
    "_flash_attention_forward": _packed,
    "_efficient_attention_forward": _packed,
}


def _some(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _indices(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


_INDEXED = (_some(5, 4, 6), [None, _indices(2, 3)])
EXAMPLES: Mapping[Callable[[OpCall], str], tuple[Any, ...]] = {
    _repeat: (_some(5, 4), [3, 1, 2]),
    _pad: (_some(5, 4), [1, 2]),
    _diag_embed: (_some(5, 4),),
    _diagonal_scatter: (_some(5, 4, 3), _some(3, 4)),
    _histogram: (_some(5, 4), 3, 0, 2),
    _of_the_first: (_some(5, 4), _some(3)),
    _take: (_some(5, 4), _indices(2, 3)),
    _multilabel: (_some(5, 4), _indices(5, 4), 1),
    _solve: (_some(2, 4, 4), _some(2, 4, 3)),
    _lstsq: (_some(2, 4, 4), _some(2, 4, 3)),
    _fresh: (_some(5, 4), [3, 2, 6]),
    _index: _INDEXED,
    _index_put: (*_INDEXED, _some(5, 2, 3, 6)),
    _masked_index: (_some(5, 4), _indices(3).bool(), [None, _indices(3)], 0),
    _grouped: (_some(6, 4), _some(3, 4, 8), _indices(3).int()),
    _packed: (_some(2, 5, 6, 4), _some(2, 5, 2, 4), _some(2, 5, 2, 4)),
}
"""What each function may be shown with: the arguments of a call."""


def shown(operator: OpOverload) -> tuple[str, str] | None:
    """What the function of an operator does, and what it gives for a call; None where it has none."""
    made = ESCAPES.get(name_of(operator))
    if made is None:
        return None
    call = OpCall.of(operator, EXAMPLES[made], {})
    return f"{' '.join((made.__doc__ or '').split())} {call} : {made(call)}", made.__name__


def rule_of(call: OpCall) -> Rule | None:
    """The rule of a call whose operator has a function for it."""
    made = ESCAPES.get(call.name)
    return None if made is None else Rule.parse(f"{call.name} : {made(call)}")
