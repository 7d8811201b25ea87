"""Op rules as values: which factors an operator's tensors are made of, and what becomes of each when it is cut.

    mm : m k, k n -> m n                         k is contracted: cut, it leaves a pending sum
    amax : ... {dim} ... -> ... {dim:keepdim} ... max:{dim}
    softmax : ... {dim}^ ... -> ... {dim}^ ...   what bears ^ must be whole
    avg_pool2d : ... h' w' -> ... h w            what bears ' is read by windows, beyond the borders of a part

A factor's name is the rule's own; `{dim}` are the dims that the operator's argument `dim` names, however it spells
them, and `{#shape}` as many last dims as that argument has entries. `...` are all other dims. What has no name (`_`, a
number) is whole, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tangram.layout.syntax import REST, Dim


@dataclass(frozen=True)
class Slot:
    """`{dim}`, `{dim:keepdim}`, `{#normalized_shape}`: dims that an argument names."""

    argument: str
    keep: str = ""
    """The argument that says whether the dims stay, with one element each (`kept`: they do); none: they stay whole."""
    trailing: int = 0
    """Where the argument says how many last dims by its number of entries: how many entries a dim has."""

    def __str__(self) -> str:
        return "{" + "#" * self.trailing + self.argument + (f":{self.keep}" if self.keep else "") + "}"


@dataclass(frozen=True)
class Piece:
    """A dim of an operand, `...`, or a slot."""

    what: Dim | Slot
    whole: bool = False
    beyond: bool = False
    """Of an input: a part of the result reads more of it than the same part, by windows."""

    def __str__(self) -> str:
        return str(self.what) + "^" * self.whole + "'" * self.beyond

    @cached_property
    def rest(self) -> bool:
        """Whether it stands for all other dims."""
        return isinstance(self.what, Dim) and self.what.name == REST


@dataclass(frozen=True)
class Operand:
    """One tensor of an operator."""

    pieces: tuple[Piece, ...]
    pending: tuple[tuple[str, str], ...] = ()

    @property
    def is_fixed(self) -> bool:
        """Whether it writes every dim, and none stands for several."""
        return not any(isinstance(piece.what, Slot) or piece.rest for piece in self.pieces)

    """Of an output: what is pending, `sum`, when this factor is cut; a slot is written as in the text."""

    def __str__(self) -> str:
        return " ".join([*map(str, self.pieces), *(f"{op}:{factor}" for op, factor in self.pending)])

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Its slots."""
        return tuple(piece.what for piece in self.pieces if isinstance(piece.what, Slot))

    @cached_property
    def fixed(self) -> int:
        """How many of its pieces are not `...`."""
        return len([piece for piece in self.pieces if not piece.rest])


Note = tuple[str, tuple[str, ...]]
"""`once(0)`, `linear`: what is true of an operator beside its factors, and of which arguments or factors."""


@dataclass(frozen=True)
class Rule:
    """One line of the table."""

    operators: tuple[str, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    notes: tuple[Note, ...] = ()

    @staticmethod
    def parse(text: str) -> Rule:
        """The rule that `text` writes. Raises NotationError, pointing at the character."""
        from tangram.layout.grammar import parse_rule

        return parse_rule(text)

    def __str__(self) -> str:
        left, right = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        notes = " ".join(name + (f"({' '.join(args)})" if args else "") for name, args in self.notes)
        return f"{' '.join(self.operators)} : {left} -> {right}" + (f" ; {notes}" if notes else "")

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Every slot, inputs first."""
        return tuple(slot for operand in (*self.inputs, *self.outputs) for slot in operand.slots)

    @cached_property
    def reads_beyond(self) -> bool:
        """Whether a dim of an input is read by windows."""
        return any(piece.beyond for operand in self.inputs for piece in operand.pieces)

    def note(self, name: str) -> tuple[str, ...] | None:
        """What a note says; None where there is none."""
        return next((args for own, args in self.notes if own == name), None)

    def holds_for(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments is meant: `if(reduction 1)`, `unless(transposed)`."""
        for name, args in self.notes:
            if name in ("if", "unless"):
                value = arguments.get(args[0])
                wanted = value == int(args[1]) if len(args) > 1 else bool(value)
                if wanted != (name == "if"):
                    return False
        return True
