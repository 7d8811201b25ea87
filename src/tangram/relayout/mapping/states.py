"""Optimiser states, and whatever else goes with a parameter, follow it by a declared spec, never by guessing.

A spec (`state_specs`) says how a state is made of its parameter's elements. From that and the parameter's statement
follows the state's own statement (`state_rules`), and from the parameter's layout the state's; or that there is none:
the column state of a fused tensor is not a function of its parts' column states, and is refused with that reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from tangram.layout import Layout, Mesh
from tangram.layout import Mapping as MappingText
from tangram.layout.syntax import REST, VOID, Dim
from tangram.relayout.mapping.bind import Specs, bind
from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import NameTable
from tangram.relayout.mapping.state_rules import (
    ADAFACTOR,
    ADAFACTOR_HF,
    ADAM_4BIT,
    ADAM_8BIT,
    ADAMW,
    COLUMN,
    MUON,
    ROW,
    ROWWISE_8BIT,
    SAME,
    SHARED,
    States,
    StateSpec,
    StateStatements,
    derived,
    flattened,
)

__all__ = [
    "ADAFACTOR",
    "ADAFACTOR_HF",
    "ADAMW",
    "ADAM_4BIT",
    "ADAM_8BIT",
    "COLUMN",
    "MUON",
    "ROW",
    "ROWWISE_8BIT",
    "SAME",
    "SHARED",
    "StateSpec",
    "States",
    "state_layout",
    "with_states",
]


def with_states(
    mapping: str | MappingText, specs: Specs, states: States, *, name: str = "{param}.{state}", **sizes: int
) -> MappingText:
    """The mapping with statements for the parameters' states added, ready for `bind`.

    `specs` has the source's parameters and states; a state belongs to a parameter when its name is `name` with both
    filled in. `sizes` as in `bind`. Parameters without a state of some kind stay without. Raises RelayoutError for a
    state that does not follow from the mapping, with the reason.
    """
    if name.count("{param}") != 1 or name.count("{state}") != 1:
        raise RelayoutError(f"the name of a state has {{param}} and {{state}} once, not {name!r}")
    ends = [_state_name(name, "\n", s).split("\n") for s in states]
    params = {p: spec for p, spec in specs.items() if not any(_is_state(p, specs, *end) for end in ends)}
    bound = bind(mapping, params, partial=True, sizes=sizes)
    table = NameTable.of(specs)
    out = list(bound.mapping.statements)
    for statement, known in zip(bound.mapping.statements, bound.sizes, strict=True):
        if statement.source:
            out += derived(StateStatements(statement, known, states, name, table))
    return MappingText(tuple(out))


def _is_state(name: str, specs: Specs, before: str, after: str) -> bool:
    """Whether a name is that of a state of a parameter that is there."""
    fits = len(name) > len(before) + len(after) and name.startswith(before) and name.endswith(after)
    return fits and name[len(before) : len(name) - len(after)] in specs


def _state_name(template: str, param: str, state: str) -> str:
    return template.replace("{param}", param).replace("{state}", state)


# ---------------------------------------------------------------- layouts of states


def state_layout(base: Layout, mesh: Mesh, spec: StateSpec) -> Layout:
    """The layout of a state whose parameter lies as `base` (bound): each rank gets the values of what it holds.

    Raises RelayoutError where a cut goes through a block, or through a bracket whose factors a block takes apart.
    """
    dims = base.dims
    if spec.kind == "same":
        return base
    if base.flat:
        raise RelayoutError(f"{base}: a flat cut leaves nothing that a {spec.kind} state could follow")
    if spec.kind == "shared":
        return Layout((Dim(REST),), at=base.at)
    if spec.kind == "reduced":
        at = {d + len(dims) if d < 0 else d for d in spec.dims}
        outside = [d for d in spec.dims if not -len(dims) <= d < len(dims)]
        if outside:
            raise RelayoutError(f"{base}: it has no dim {outside[0]} to reduce")
        kept = [Dim("", 1) if i in at else d for i, d in enumerate(dims) if spec.keepdim or i not in at]
        return Layout(tuple(kept), at=base.at)
    return Layout(flattened(_outside_blocks(base, dims, mesh, spec.block)), at=base.at)


def _outside_blocks(base: Layout, dims: Sequence[Dim], mesh: Mesh, block: int) -> tuple[Dim, ...]:
    """`_split_block` on cut dims: a cut must fall between blocks."""
    rest = list(dims)
    while rest and block > 1:
        last = rest.pop()
        if last.terms and not last.cuts and len(last.terms) == 1:
            rest += last.terms[0]
        elif not last.axes and last.n and block % last.n == 0:
            block //= last.n
        elif last.n and last.n % block == 0 and not last.terms and _aligned(last, mesh, block):
            rest.append(Dim(VOID, last.n // block, cuts=last.cuts))
            break
        else:
            raise RelayoutError(f"{base}: the cut of {last} goes through blocks of the state")
    return tuple(rest)


def _aligned(dim: Dim, mesh: Mesh, block: int) -> bool:
    """Whether every cut of a factor falls between blocks."""
    sizes = {dim.n}  # of the parts so far: they are not all alike where a cut does not divide
    for cut in dim.cuts:
        k = mesh.axis(cut.axis)[0]
        chunks = {n: -(-n // k) for n in sizes if n}
        if k > 1 and (cut.map or any(c % block for c in chunks.values())):
            return False
        sizes = {size for n, c in chunks.items() for size in (c, n % c)}
    return True
