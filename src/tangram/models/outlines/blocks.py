"""A block as a table of operators, in numbers: what is multiplied, streamed and kept, without torch.

Who divides what (mesh axes), how long an operator takes and what a schedule keeps is the planner's; a table has the
sizes that the whole model has.

Sizes are numbers a token unless said otherwise. Of `cut`: "tensor" is what TP ranks divide between them, "tokens"
what they divide only under sequence parallelism, "" what each has whole. Of `routed`: rows are those of the tokens'
experts, and TP ranks are those of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from typing import Literal

Cut = Literal["tensor", "tokens", ""]
Role = Literal["", "input", "both", "eager", "expert output"]
"""Of what is kept: an input of products and of nothing else; of products and of what needs it as it is computed; kept
only where kernels are not fused; what experts give before it is weighted."""


class Group(IntFlag):
    """What can be recomputed in the backward; a choice of recomputation is a set of these."""

    NONE = 0
    NORM = 1
    """Norms: their outputs are made again."""
    SCORES = 2
    """What attention makes of queries, keys and values."""
    ACTIVATION = 4
    """The function between the two halves of an MLP."""
    ATTENTION = 8
    """All of attention, projections too."""
    MLP = 16
    """All of the MLP, or of the experts and their router."""
    BLOCK = 31
    """Whole blocks: only their input is kept."""
    ALTERNATE = 32
    """Every second product: torch's selective checkpointing by operator, as torchtitan has it."""
    LATENT = 64
    """Of latent attention what is made of the vectors of a low rank: queries, keys and values."""


@dataclass(frozen=True)
class Product:
    """A linear map of each token, of `inputs` to `outputs` numbers."""

    name: str
    inputs: int
    outputs: int
    cut: Literal["out", "in", ""]
    """Which dim TP ranks divide."""
    group: Group
    experts: int = 0
    """Of how many experts each has such a map; 0 where it is no expert's."""
    bias: bool = False
    frozen: bool = False
    """Whether its weights are not trained."""
    shared: bool = False
    """Whether its weights are those of a block before it, where they are counted."""

    @property
    def numbers(self) -> int:
        """In all of its weights, as far as they are its own."""
        return (
            0
            if self.shared
            else (self.inputs * self.outputs + (self.outputs if self.bias else 0)) * max(self.experts, 1)
        )


@dataclass(frozen=True)
class Scores:
    """Softmax attention of `heads` queries of `qk_dim` numbers over keys before them, or over all."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int = 0
    """How many keys each query sees at most; 0: all before it."""
    group: Group = Group.SCORES
    chunk: int = 0
    """Of how many tokens the pieces are that see nothing of each other; 0: a sequence is one."""
    causal: bool = True
    """Whether a query sees only keys before it."""

    def keys(self, sequence: int) -> float:
        """How many a query sees on the mean, in sequences of so many tokens."""
        piece = min(self.chunk or sequence, sequence)
        seen = min(self.window or piece, piece)
        # Those before: a triangle, then a band.
        return seen - seen * seen / (2 * piece) if self.causal else float(seen)


@dataclass(frozen=True)
class Batched:
    """Products of two results, as those in a chunked scan: `times` a token, (rows x inputs) with (inputs x outputs)."""

    name: str
    rows: int
    inputs: int
    outputs: int
    times: float
    cut: Cut
    group: Group

    @property
    def flops(self) -> float:
        """Of a token's forward."""
        return 2.0 * self.rows * self.inputs * self.outputs * self.times


@dataclass(frozen=True)
class Stream:
    """An operator that memory bounds: how many numbers of `width` it reads and writes, per token."""

    name: str
    width: int
    forward: float
    backward: float
    cut: Cut
    group: Group
    routed: bool = False


@dataclass(frozen=True)
class Kept:
    """What the backward needs of the forward: numbers a token."""

    name: str
    width: float
    cut: Cut
    group: Group
    nbytes: float = 0.0
    """Of a number; 0: those of the type that is computed in."""
    routed: bool = False
    role: Role = ""


@dataclass(frozen=True)
class Numbers:
    """How many numbers a block's weights are, by who divides them."""

    tensor: int
    """Divided by TP ranks."""
    replicated: int
    experts: int
    """Divided by EP ranks and the experts' TP ranks."""

    @property
    def total(self) -> int:
        """All."""
        return self.tensor + self.replicated + self.experts


@dataclass(frozen=True)
class Block:
    """One repeated block as a table of operators."""

    name: str
    products: tuple[Product, ...]
    scores: tuple[Scores, ...]
    streams: tuple[Stream, ...]
    kept: tuple[Kept, ...]
    vectors: int
    """Numbers in norms and the like, which nobody divides."""
    experts: int = 0
    per_token: int = 1
    """Experts that a token goes to."""
    all_rows: bool = False
    """Whether transformers' own code has every expert compute all tokens, those that do not go to it times 0."""
    batched: tuple[Batched, ...] = ()
    hidden: int = 0
    """Of its own stream; 0: the model's."""
    patches: float = 0.0
    """Of a block that works on images: how many rows it has for each token of a sequence; 0: one, the token itself."""

    @property
    def rows(self) -> float:
        """For each token of a sequence."""
        return self.patches or 1.0

    @cached_property
    def halves(self) -> int:
        """Of attention and MLP, how many there are that TP ranks cut: each sums hidden states once."""
        return len({one.group for one in self.products if one.cut == "in"} & {Group.ATTENTION, Group.MLP})

    def flops(self, sequence: int) -> float:
        """Of a token's forward in sequences of so many tokens; of attention what masks leave."""
        found = sum(2.0 * one.inputs * one.outputs * (self.per_token if one.experts else 1) for one in self.products)
        keys = [(one, one.keys(max(round(sequence * self.rows), 1))) for one in self.scores]
        found += sum(2.0 * many * one.heads * (one.qk_dim + one.v_dim) for one, many in keys)
        return self.rows * (found + sum(one.flops for one in self.batched))

    @cached_property
    def numbers(self) -> Numbers:
        """Of its weights."""
        return _numbers(self.products, self.vectors)

    @property
    def adapted(self) -> bool:
        """Whether it has frozen products beside what is trained; vectors are frozen then, too."""
        return any(one.frozen for one in self.products)

    @cached_property
    def trained(self) -> Numbers:
        """Of the weights that are trained."""
        return _numbers([one for one in self.products if not one.frozen], 0 if self.adapted else self.vectors)


def _numbers(products: Sequence[Product], vectors: int) -> Numbers:
    routed = sum(one.numbers for one in products if one.experts)
    cut = sum(one.numbers for one in products if one.cut and not one.experts)
    whole = sum(one.numbers for one in products if not one.cut and not one.experts)
    return Numbers(cut, whole + vectors, routed)
