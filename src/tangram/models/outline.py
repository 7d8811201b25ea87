"""The outline of a decoder in numbers: per repeated block what is multiplied, streamed and kept, without torch.

A block is a table of operators of four kinds, with the sizes that the whole model has. Who divides what (mesh axes),
how long an operator takes and what a schedule keeps is the planner's. `decoder` makes the table of the usual decoders
from their dims: grouped and latent attention, windows, gated and plain MLPs, mixtures with shared experts and dense
layers. Any other block is a table of its own.

The trade-off: a table of a dozen rows a block is evaluated for a hundred thousand configurations a second, where a
captured graph has thousands of nodes; the two are compared in tests (`tangram.models.costs`).

Sizes are numbers a token unless said otherwise. Of `cut`: "tensor" is what tensor ranks divide between them, "tokens"
what they divide only under sequence parallelism, "" what each has whole. Of `routed`: rows are those of the tokens'
experts, and tensor ranks are those of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import Literal

from tangram.errors import UserError

__all__ = ["Block", "Dims", "Group", "Kept", "Numbers", "Outline", "Product", "Scores", "Stream", "decoder"]

Cut = Literal["tensor", "tokens", ""]


class Group(IntFlag):
    """What can be computed again in the backward; a choice of recomputation is a set of these."""

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


@dataclass(frozen=True)
class Product:
    """A linear map of each token, of `inputs` to `outputs` numbers."""

    name: str
    inputs: int
    outputs: int
    cut: Literal["out", "in", ""]
    """Which dim tensor ranks divide."""
    group: Group
    experts: int = 0
    """Of how many experts each has such a map; 0 where it is no expert's."""
    bias: bool = False
    frozen: bool = False
    """Whether its weights are not trained."""

    @property
    def numbers(self) -> int:
        """In all of its weights."""
        return (self.inputs * self.outputs + (self.outputs if self.bias else 0)) * max(self.experts, 1)


@dataclass(frozen=True)
class Scores:
    """Softmax attention of `heads` queries of `qk_dim` numbers over keys before them."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int = 0
    """How many keys each query sees at most; 0: all before it."""
    group: Group = Group.SCORES


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


@dataclass(frozen=True)
class Numbers:
    """How many numbers a block's weights are, by who divides them."""

    tensor: int
    """Divided by tensor ranks."""
    whole: int
    experts: int
    """Divided by expert ranks and the experts' tensor ranks."""

    @property
    def total(self) -> int:
        """All."""
        return self.tensor + self.whole + self.experts


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

    @property
    def numbers(self) -> Numbers:
        """Of its weights."""
        return _numbers(self.products, self.vectors)

    @property
    def adapted(self) -> bool:
        """Whether it has frozen products beside what is trained; vectors are frozen then, too."""
        return any(one.frozen for one in self.products)

    @property
    def trained(self) -> Numbers:
        """Of the weights that are trained."""
        return _numbers([one for one in self.products if not one.frozen], 0 if self.adapted else self.vectors)


def _numbers(products: Sequence[Product], vectors: int) -> Numbers:
    routed = sum(one.numbers for one in products if one.experts)
    cut = sum(one.numbers for one in products if one.cut and not one.experts)
    whole = sum(one.numbers for one in products if not one.cut and not one.experts)
    return Numbers(cut, whole + vectors, routed)


@dataclass(frozen=True)
class Outline:
    """A decoder: embedding, runs of equal blocks in order, norm, head."""

    name: str
    hidden: int
    vocab: int
    tied: bool
    """Whether the head's weight is the embedding's."""
    runs: tuple[tuple[Block, int], ...]
    """Blocks in order, and how many of each follow each other."""
    positions: int = 0
    """Learned ones: their number."""
    predictors: int = 0
    """Further blocks after the last that predict tokens farther ahead, each with a pass through the head."""

    @property
    def adapted(self) -> bool:
        """Whether blocks have frozen products; embedding and head are frozen then, too."""
        return any(block.adapted for block, _ in self.runs)

    @property
    def layers(self) -> int:
        """Blocks in all."""
        return sum(count for _, count in self.runs)

    @property
    def numbers(self) -> int:
        """Parameters of the model."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + (self.positions + 1) * self.hidden
        return ends + sum(block.numbers.total * count for block, count in self.runs)

    def flops(self, sequence: int) -> float:
        """Of a token's forward in sequences of so many tokens; of attention what causal masks leave."""
        found = 2.0 * self.vocab * self.hidden
        for block, count in self.runs:
            each = sum(
                2.0 * one.inputs * one.outputs * (block.per_token if one.experts else 1) for one in block.products
            )
            for one in block.scores:
                seen = min(one.window or sequence, sequence)
                keys = seen - seen * seen / (2 * sequence)  # those before: a triangle, then a band
                each += 2.0 * keys * one.heads * (one.qk_dim + one.v_dim)
            found += each * count
        return found


@dataclass(frozen=True)
class Dims:
    """What a decoder's configuration says. Zeros: as usual (kv_heads as heads, head_dim hidden / heads, no experts)."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    experts: int = 0
    per_token: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    """Of a mixture: how many blocks, the first, have a plain MLP."""
    gated: bool = True
    tied: bool = False
    bias: bool = False
    positions: int = 0
    window: int = 0
    windowed: int = 0
    """How many blocks have the window."""
    q_rank: int = 0
    """Of latent attention: to what queries are brought first; 0: at once."""
    kv_rank: int = 0
    """Of latent attention; 0: none."""
    rope_dim: int = 0
    """Of latent attention: numbers of a head's queries and keys that are rotated, beside head_dim."""
    predictors: int = 0


def decoder(dims: Dims, name: str = "decoder") -> Outline:
    """The outline of a decoder. Raises UserError where dims cannot be."""
    if min(dims.layers, dims.hidden, dims.heads, dims.vocab) < 1:
        raise UserError(
            f"{name}: a decoder needs layers, hidden, heads and vocab of at least 1, not {dims.layers}, {dims.hidden}, "
            f"{dims.heads}, {dims.vocab}"
        )
    if dims.dense_layers > dims.layers:
        raise UserError(f"{name}: {dims.dense_layers} dense layers of {dims.layers}: there are not so many")
    mixed = dims.layers - dims.dense_layers if dims.experts > 1 else 0
    kinds = [_block(dims, mixture=i >= dims.layers - mixed, window=i < dims.windowed) for i in range(dims.layers)]
    runs: list[tuple[Block, int]] = []
    for one in kinds:
        if runs and runs[-1][0] == one:
            runs[-1] = (one, runs[-1][1] + 1)
        else:
            runs.append((one, 1))
    return Outline(name, dims.hidden, dims.vocab, dims.tied, tuple(runs), dims.positions, dims.predictors)


def _block(dims: Dims, *, mixture: bool, window: bool) -> Block:
    attention = _latent(dims) if dims.kv_rank else _grouped(dims)
    if window:
        attention = replace(attention, scores=tuple(replace(one, window=dims.window) for one in attention.scores))
    mlp = _mixture(dims) if mixture else _mlp(dims, dims.ffn or dims.expert_ffn)
    h = dims.hidden
    norms = (
        Stream("norms", h, 4.0, 8.0, "tokens", Group.NORM),
        Stream("residuals", h, 6.0, 4.0, "tokens", Group.NONE),
    )
    kept = (
        Kept("input of attention's norm", h, "tokens", Group.NONE),
        Kept("input of the MLP's norm", h, "tokens", Group.ALTERNATE),
    )
    return Block(
        "mixture" if mixture else "dense",
        attention.products + mlp.products,
        attention.scores,
        norms + attention.streams + mlp.streams,
        kept + attention.kept + mlp.kept,
        2 * h * (2 if dims.bias else 1) + attention.vectors,
        dims.experts if mixture else 0,
        dims.per_token if mixture else 1,
    )


def _grouped(dims: Dims) -> Block:
    """Attention with as many keys as queries, or groups of queries that share keys."""
    h, heads = dims.hidden, dims.heads
    kv, d = dims.kv_heads or heads, dims.head_dim or dims.hidden // dims.heads
    v = dims.value_dim or d
    qkv = heads * d + kv * (d + v)
    a = Group.ATTENTION
    return Block(
        "attention",
        (Product("qkv", h, qkv, "out", a, bias=dims.bias), Product("out", heads * v, h, "in", a, bias=dims.bias)),
        (Scores(heads, kv, d, v),),
        (Stream("rotary", (heads + kv) * d, 2.0, 2.0, "tensor", a),),
        (
            Kept("input of qkv", h, "tokens", Group.NORM | a),
            Kept("queries, keys, values", qkv, "tensor", a | Group.ALTERNATE),
            Kept("attention", heads * v, "tensor", a),
            Kept("row sums", heads, "tensor", a, 4.0),
        ),
        0,
    )


def _latent(dims: Dims) -> Block:
    """DeepSeek's latent attention: queries, and keys with values, from vectors of a low rank."""
    h, heads, d, rope = dims.hidden, dims.heads, dims.head_dim, dims.rope_dim
    v = dims.value_dim or d
    a = Group.ATTENTION
    down = (Product("q down", h, dims.q_rank, "", a),) if dims.q_rank else ()
    products = (
        *down,
        Product("q up", dims.q_rank or h, heads * (d + rope), "out", a),
        Product("kv down", h, dims.kv_rank + rope, "", a),
        Product("kv up", dims.kv_rank, heads * (d + v), "out", a),
        Product("out", heads * v, h, "in", a),
    )
    low = dims.q_rank + dims.kv_rank + rope
    return Block(
        "latent attention",
        products,
        (Scores(heads, heads, d + rope, v),),
        (
            Stream("low-rank norms", low, 2.0, 4.0, "", a),
            Stream("rotary and joins", heads * (2 * (d + rope) + v), 2.0, 2.0, "tensor", a),
        ),
        (
            Kept("input of the low ranks", h, "tokens", Group.NORM | a),
            Kept("low ranks and their norms", 2 * low, "", a),
            Kept("queries, keys, values", heads * (2 * (d + rope) + v), "tensor", a),
            Kept("attention", heads * v, "tensor", a),
            Kept("row sums", heads, "tensor", a, 4.0),
        ),
        dims.q_rank + dims.kv_rank,
    )


def _mlp(dims: Dims, ffn: int, name: str = "") -> Block:
    """Two linear maps with a function between; gated ones have three."""
    h, up = dims.hidden, ffn * (2 if dims.gated else 1)
    m = Group.MLP
    return Block(
        "mlp",
        (
            Product(f"{name}up", h, up, "out", m, bias=dims.bias),
            Product(f"{name}down", ffn, h, "in", m, bias=dims.bias),
        ),
        (),
        (Stream(f"{name}activation", up + ffn, 1.0, 2.0, "tensor", Group.ACTIVATION | m),),
        (
            Kept(f"{name}input of up", h, "tokens", Group.NORM | m),
            Kept(f"{name}before the activation", up, "tensor", m | Group.ALTERNATE),
            Kept(f"{name}after the activation", ffn, "tensor", Group.ACTIVATION | m),
        ),
        0,
    )


def _mixture(dims: Dims) -> Block:
    """A router, experts of which each token goes to some, and what all tokens share."""
    h, ffn = dims.hidden, dims.expert_ffn or dims.ffn
    up = ffn * (2 if dims.gated else 1)
    m = Group.MLP
    shared = _mlp(dims, dims.shared_ffn, "shared ") if dims.shared_ffn else None
    products = (
        Product("router", h, dims.experts, "", m),
        Product("experts up", h, up, "out", m, dims.experts),
        Product("experts down", ffn, h, "in", m, dims.experts),
    )
    streams = (
        Stream("router", dims.experts, 6.0, 6.0, "tokens", m),
        Stream("to experts and back", h, 4.0, 4.0, "", m, routed=True),
        Stream("activation", up + ffn, 1.0, 2.0, "tensor", Group.ACTIVATION | m, routed=True),
    )
    kept = (
        Kept("input of the router", h, "tokens", Group.NORM | m),
        Kept("router", dims.experts, "tokens", m, 8.0),
        Kept("input of experts", h, "", m, routed=True),
        Kept("before the activation", up, "tensor", m, routed=True),
        Kept("after the activation", ffn, "tensor", Group.ACTIVATION | m, routed=True),
        Kept("output of experts", h, "", m, routed=True),
    )
    if shared is None:
        return Block("mixture", products, (), streams, kept, 0)
    return Block("mixture", products + shared.products, (), streams + shared.streams, kept + shared.kept, 0)
