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
from functools import cached_property, lru_cache
from typing import Any

from tangram.layout.grammar import parse_rule
from tangram.layout.syntax import Note, Operand, Slot


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
        return _rule(text)

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


@lru_cache(1 << 12)
def _rule(text: str) -> Rule:
    return Rule(*parse_rule(text))
