"""A refuted rule as a script that needs nothing but torch: the whole operator beside its parts, and the difference.

It holds the numbers of the smallest case that was found wrong: the inputs, what the rule makes of them on each rank,
and which ranks' results together should be which piece of the whole. It ends with 1 while the rule is wrong, and with
the operator's own error where that refuses a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tangram.hardware.host import workers
from tangram.layout import region
from tangram.layout.intervals import elements, size
from tangram.sharding.local_ops.local_call import RankPart, layout_of, part_of, piece, run
from tangram.sharding.ops.bind import Dims
from tangram.sharding.ops.calls import OpCall, schema_of
from tangram.sharding.ops.rule_table import RuleTable
from tangram.sharding.proof.execute import EXPECTED_ERRORS, run_reference
from tangram.sharding.proof.prove import ProofTrial, table_with, trials
from tangram.sharding.proof.samples import samples

LIMIT = 60.0
"""Seconds for an operator."""
AFTER = 400
"""Trials beyond the first failure among which a smaller one is looked for."""


def smallest(table: RuleTable, calls: Sequence[OpCall]) -> ProofTrial | None:
    """Of the cases that are wrong, that of fewest ranks and elements; None where no way of cutting is.

    Parts that need each other are no case: a script runs each by itself.
    """
    best: ProofTrial | None = None
    left = AFTER
    with suppress(Exception):  # some variant cannot be tried at all: what was found before counts
        for trial in trials(table, calls):
            left -= best is not None
            alone = trial.bound.linked.isdisjoint(trial.cuts)
            if trial.failure is not None and trial.cuts and alone and (best is None or _size(trial) < _size(best)):
                best = trial
            if not left:
                break
    return best


def _size(trial: ProofTrial) -> tuple[int, int]:
    return trial.mesh.size, sum(t.numel() for t in trial.call.tensors if t is not None)


def save_all(
    folder: Path,
    names: Sequence[str],
    rules: Path | None = None,
    own: Mapping[str, Sequence[OpCall]] | None = None,
    imports: Sequence[str] = (),
) -> dict[str, Path]:
    """Scripts for operators whose rules are wrong, by their own calls or torch's samples.

    Raises UserError where a line of the file `rules` is no rule.
    """
    torch.set_num_threads(1)
    calls = own or (samples.recorded(names) if names else {})
    return save(folder, table_with(rules), {name: calls[name] for name in names}, imports)


def save(
    folder: Path, table: RuleTable, calls: Mapping[str, Sequence[OpCall]], imports: Sequence[str] = ()
) -> dict[str, Path]:
    """A script for each of some operators whose rules are wrong, in a folder; none where its process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {}
    for name, some in calls.items():

        def act(some: Sequence[OpCall] = some) -> str:
            trial = smallest(table, some)
            return "" if trial is None else script(trial, imports)

        text = workers.forked(act, LIMIT)
        if isinstance(text, str) and text:
            found[name] = folder / f"{name}.py"
            found[name].write_text(text)
    return found


def script(trial: ProofTrial, imports: Sequence[str] = ()) -> str:
    """The source of a script that shows one case. `imports`: lines that define the operator, if it is not torch's."""
    assert trial.failure is not None
    where, what = trial.failure.where, trial.failure.what
    place = int(where.rpartition(" ")[2]) if where[-1].isdigit() else 0
    gradient, bound = where.startswith("gradient"), trial.bound
    expected = run_reference(trial.call)
    cotangents = expected.cotangents if gradient else None
    parts = [part_of(bound, trial.cuts, trial.mesh, rank) for rank in range(trial.mesh.size)]
    lines = [
        f'"""{bound.rule}: wrong.\n\n{trial.failure}\n"""\n',
        *_HEAD.splitlines(),
        *imports,
        *_HELPERS.splitlines(),
    ]
    lines += ["", "", f"op = torch.ops.{trial.call.operator}"]
    lines += ["whole = " + _run(trial.call, place if gradient else None, cotangents), "parts = []"]
    if where.startswith("rank"):
        parts = [parts[place]]
    for part in parts:
        lines.append(
            f"parts.append({_of_rank(trial, part, place if gradient else None, cotangents)})  # rank {part.rank}"
        )
    if where == "the rule" or "shape" in what or "dims" in what or " on a rank" in what or where.startswith("rank"):
        lines += ["print('whole:', whole)", "print('parts:', parts)", f"raise SystemExit({f'{where} {what}'!r})", ""]
        return "\n".join(lines)
    dims = (bound.inputs[place] or ()) if gradient else bound.outputs[place]
    want = cast(Tensor, (expected.gradients if gradient else expected.results)[place])
    lines += ["wrong = False", *_groups(trial, parts, dims, want, place, gradient), "raise SystemExit(wrong)", ""]
    return "\n".join(lines)


_HEAD = """\
from functools import reduce
from math import inf, nan

import torch
from torch import device
"""
_HELPERS = '''

def tensor(values, shape, dtype):
    return torch.tensor(values, dtype=dtype).reshape(shape)


def run(*args, gradient=None, cotangents=(), share=1.0, keep=None, **kwargs):
    """The results of the operator, or the gradient of one input; a part counts by its share and where it has a say."""
    args = [[*a] if isinstance(a, list) else a for a in args]
    tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor) or t is None]
    leaf = None if gradient is None else tensors[gradient].requires_grad_()
    results = op(*args, **kwargs)
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    if share != 1.0:
        results[0] = results[0] * share
    if keep is not None:
        results[0] = torch.where(keep, results[0], torch.zeros_like(results[0]))
    if leaf is None:
        return results
    pairs = [(r, c) for r, c in zip(results, cotangents) if c is not None]
    (found,) = torch.autograd.grad([r for r, _ in pairs], [leaf], [c for _, c in pairs], allow_unused=True)
    return [torch.zeros_like(leaf) if found is None else found]


def take(whole, places):
    """A piece of the whole."""
    for dim, index in places.items():
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return whole
'''


def _groups(
    trial: ProofTrial, parts: Sequence[RankPart], dims: Dims, want: Tensor, place: int, gradient: bool
) -> Iterator[str]:
    """Lines that compare the ranks of each piece of the whole with it."""
    bound, at = trial.bound, 0 if gradient else place
    here = {f: some for f, some in trial.cuts.items() if any(f in factors for factors in dims)}
    others = {f: some for f, some in trial.cuts.items() if f not in here}
    pending = {c.axis: "sum" if gradient else bound.after(f, place) for f, some in others.items() for c in some}
    op = {"max": "maximum", "min": "minimum"}.get(next(iter(pending.values()), "sum"), "add")
    layout = layout_of(dims, want.shape, bound, here)
    relative = 5e-2 if want.itemsize == 2 else 1e-4
    same = f"torch.allclose(piece, own, rtol={relative}, atol={relative / 10}, equal_nan=True)"
    if not want.is_floating_point() and not want.is_complex():
        same = "torch.equal(piece, own)"
    groups: dict[Any, list[RankPart]] = {}
    for part in parts:
        replica = tuple((axis, i) for axis, i in sorted(trial.mesh.coords(part.rank).items()) if axis not in pending)
        groups.setdefault((region(layout, trial.mesh, part.rank), replica), []).append(part)
    for some in groups.values():
        places: dict[int, list[int]] = {}
        for dim, factors in enumerate(dims):
            if any(f in some[0].indices for f in factors):
                box = region(layout_of((factors,), (want.shape[dim],), bound, trial.cuts), trial.mesh, some[0].rank)
                places[dim] = elements(box.boxes[0][0]) if box else []
        ranks = [part.rank for part in some]
        yield f"piece, own = take(whole[{at}], {places}), reduce(torch.{op}, [parts[rank][{at}] for rank in {ranks}])"
        yield f"if not {same}:"
        yield f"    print('ranks {ranks} should have', piece, 'and have', own, sep='\\n')"
        yield "    wrong = True"


class _Last(TorchDispatchMode):
    """Notes what an operator is called with."""

    def __init__(self, call: OpCall) -> None:
        super().__init__()
        self._operator, self.call = call.operator, cast("OpCall | None", None)
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is self._operator:
            self.call = OpCall.of(func, args, kwargs or {})
            self.results = [*cast("list[Any]", found)] if isinstance(found, list | tuple) else [found]
        return cast(Any, found)


def _of_rank(trial: ProofTrial, part: RankPart, gradient: int | None, cotangents: Any) -> str:
    """The source of what one rank runs."""
    bound, call = trial.bound, trial.call
    local = [
        t if t is None or d is None else piece(t, d, part, bound)
        for t, d in zip(call.tensors, bound.inputs, strict=True)
    ]
    last = _Last(call)
    try:
        with last:
            results = run(call, bound, part, local)
    except EXPECTED_ERRORS:
        return _run(call.with_tensors(local), None, None)
    if last.call is None or all(not size(held) for held in part.indices.values()):  # of nothing, it is not run
        own = local if gradient is not None else [*results]
        shown = own[gradient or 0] if gradient is not None else None
        return f"[{_text(torch.zeros_like(shown))}]" if shown is not None else f"[{', '.join(map(_text, own))}]"
    more = ""
    share = 1.0
    for name, args in bound.rule.notes if last.results else ():
        for f, held in part.indices.items() if name == "scale" else ():
            if f in args or f.rstrip("0123456789") in args:
                share *= size(held) / bound.sizes[f]
    if share != 1:
        more = f", share={share}"
    elif bound.rule.note("offset") is not None and isinstance(results[0], Tensor):
        more = f", keep={_text((results[0] != 0) | (last.results[0] == 0))}"
    pairs = zip(cotangents or (), bound.outputs, strict=False)
    own_cotangents = [c if c is None else piece(c, dims, part, bound) for c, dims in pairs]
    return _run(last.call, gradient, own_cotangents, more)


def _run(call: OpCall, gradient: int | None, cotangents: Any, more: str = "") -> str:
    schema = schema_of(call.operator).arguments
    shown = [_text(call.arguments[a.name]) for a in schema if not a.kwarg_only]
    shown += [f"{a.name}={_text(call.arguments[a.name])}" for a in schema if a.kwarg_only and not a.is_out]
    if gradient is not None:
        shown += [f"gradient={gradient}", f"cotangents=[{', '.join(map(_text, cotangents))}]"]
    return f"run({', '.join(shown)}{more})"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor({value.detach().flatten().tolist()}, {list(value.shape)}, {value.dtype})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one) for one in cast('list[Any]', value))}]"
    return repr(value)
