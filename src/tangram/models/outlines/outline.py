"""The outline of a decoder in numbers: per repeated block what is multiplied, streamed and kept, without torch.

A block is a table of operators of four kinds, with the sizes that the whole model has. Who divides what (mesh axes),
how long an operator takes and what a schedule keeps is the planner's. `decoder` makes the table of the usual decoders
from their dims: grouped and latent attention, windows, gated and plain MLPs, mixtures with shared experts and dense
layers. Any other block is a table of its own.

The trade-off: a table of a dozen rows a block is evaluated for a hundred thousand configurations a second, where a
captured graph has thousands of nodes; the two are compared in tests (`tangram.models.outlines.costs`).

The rows of a table are in `models.outlines.blocks`. Any other model's outline comes from its captured graph
(`models.outlines.outlined_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tangram.errors import UserError
from tangram.models.building.quantised import Kept as WeightsKept
from tangram.models.outlines.blocks import Batched, Block, Cut, Group, Kept, Numbers, Product, Scores, Stream

__all__ = [
    "Batched",
    "Block",
    "Cut",
    "Dims",
    "Group",
    "Kept",
    "Numbers",
    "Outline",
    "Product",
    "Scores",
    "Stream",
    "decoder",
    "decoder_block",
    "runs_of",
]


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
    """Further blocks after the last that predict tokens farther ahead, each with a pass through the head; no
    parameters of theirs are among `numbers`."""
    further: int = 0
    """Parameters beside blocks, embedding, positions, last norm and head, as a part of the embedding's; below 0 where a
    model lacks a norm."""
    kept: WeightsKept | None = None
    """How its configuration says that weights are kept, where that is in fewer bits."""
    trained_ends: bool = False
    """Beside adapters: whether embedding and head are trained whole (peft's modules_to_save)."""
    images: float = 0.0
    """Share of a sample's tokens that are of images (`models.outlines.images`); 0: it sees none."""
    image: int = 0
    """Tokens of one image."""
    graph: bool = False
    """Whether it was made from a captured graph, not from a configuration."""

    @property
    def description(self) -> str:
        """Its name, and where it is from if that is no configuration."""
        return f"{self.name} (from its graph)" if self.graph else self.name

    @cached_property
    def adapted(self) -> bool:
        """Whether blocks have frozen products; embedding and head are frozen then, too, but for `trained_ends`."""
        return any(block.adapted for block, _ in self.kinds)

    @property
    def frozen_ends(self) -> bool:
        """Whether embedding and head are."""
        return self.adapted and not self.trained_ends

    @cached_property
    def kinds(self) -> tuple[tuple[Block, int], ...]:
        """Each block once, and how many there are of it: for sums in which order does not matter."""
        return tuple(self.by_kind([count for _, count in self.runs]))

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """For each run, which of the kinds it is of."""
        seen: dict[Block, int] = {}
        return tuple(seen.setdefault(block, len(seen)) for block, _ in self.runs)

    def by_kind(self, counts: Sequence[Any]) -> list[tuple[Block, Any]]:
        """Each block once, with the sum of what is given for its runs, numbers or arrays."""
        found: dict[int, tuple[Block, Any]] = {}
        for at, (block, _), count in zip(self._places, self.runs, counts, strict=True):
            found[at] = (block, found[at][1] + count) if at in found else (block, count)
        return list(found.values())

    @cached_property
    def join(self) -> Block:
        """What stands before a block that predicts further tokens: hidden states and the next token's embedding, each
        through a norm, and a product of both; a norm of what the block gives, too (DeepSeek-AI 2024, 2.2)."""
        h = self.hidden
        return Block(
            "join",
            (Product("join", 2 * h, h, "out", Group.NONE),),
            (),
            (Stream("norms of the join", h, 6.0, 12.0, "tokens", Group.NORM),),
            (
                Kept("inputs of the join's norms", 2 * h, "tokens", Group.NONE),
                Kept("input of the join", 2 * h, "tokens", Group.NORM),
            ),
            3 * h,
        )

    @cached_property
    def predicting(self) -> Outline:
        """With the blocks that predict further tokens as a run after the last, each the model's last one behind a
        `join`; itself where there are none."""
        if not self.predictors:
            return self
        last, join = self.runs[-1][0], self.join
        block = replace(
            last,
            name="predictor",
            products=last.products + join.products,
            streams=last.streams + join.streams,
            kept=last.kept + join.kept,
            vectors=last.vectors + join.vectors,
        )
        return replace(self, runs=(*self.runs, (block, self.predictors)), predictors=0)

    @cached_property
    def layers(self) -> int:
        """Blocks in all."""
        return sum(count for _, count in self.runs)

    @property
    def numbers(self) -> int:
        """Parameters of the model."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + (self.positions + 1) * self.hidden
        return ends + self.further + sum(block.numbers.total * count for block, count in self.runs)

    def flops(self, sequence: int) -> float:
        """Of a token's forward in sequences of so many tokens; of attention what causal masks leave."""
        found = 2.0 * self.vocab * self.hidden
        found += sum(block.flops(sequence) * count for block, count in self.runs)
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
    all_rows: bool = False
    """Of a mixture: as a block has it."""


def decoder(dims: Dims, name: str = "decoder") -> Outline:
    """The outline of a decoder. Raises UserError where dims cannot be."""
    if min(dims.layers, dims.hidden, dims.heads, dims.vocab) < 1:
        raise UserError(
            f"{name}: a decoder needs layers, hidden, heads and vocab of at least 1, not {dims.layers}, {dims.hidden}, "
            f"{dims.heads}, {dims.vocab}"
        )
    if dims.dense_layers > dims.layers:
        raise UserError(f"{name}: {dims.dense_layers} dense layers of {dims.layers}: there are not so many")
    # One expert is a plain MLP: a router over it would choose nothing.
    mixed = dims.layers - dims.dense_layers if dims.experts > 1 else 0
    kinds = [
        decoder_block(dims, mixture=i >= dims.layers - mixed, window=i < dims.windowed) for i in range(dims.layers)
    ]
    return Outline(name, dims.hidden, dims.vocab, dims.tied, runs_of(kinds), dims.positions, dims.predictors)


def runs_of(blocks: Sequence[Block]) -> tuple[tuple[Block, int], ...]:
    """Blocks in order as runs of equal ones."""
    found: list[tuple[Block, int]] = []
    for one in blocks:
        if found and found[-1][0] == one:
            found[-1] = (one, found[-1][1] + 1)
        else:
            found.append((one, 1))
    return tuple(found)


def decoder_block(dims: Dims, *, mixture: bool = False, window: bool = False) -> Block:
    """One block of a decoder, with experts or without, and with the window or without."""
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
        Kept("norms in float32", 2 * h, "tokens", Group.NORM, 4.0, role="eager"),
        Kept("norms before their weights", 2 * h, "tokens", Group.NORM, role="eager"),
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
        all_rows=mixture and dims.all_rows,
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
            Kept("input of qkv", h, "tokens", Group.NORM | a, role="input"),
            Kept("queries, keys, values", qkv, "tensor", a | Group.ALTERNATE),
            Kept("attention", heads * v, "tensor", a, role="both"),
            Kept("attention, copied", heads * v, "tensor", a, role="eager"),
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
        Product("q up", dims.q_rank or h, heads * (d + rope), "out", a | Group.LATENT),
        Product("kv down", h, dims.kv_rank + rope, "", a),
        Product("kv up", dims.kv_rank, heads * (d + v), "out", a | Group.LATENT),
        Product("out", heads * v, h, "in", a),
    )
    low = dims.q_rank + dims.kv_rank + rope
    return Block(
        "latent attention",
        products,
        (Scores(heads, heads, d + rope, v),),
        (
            Stream("low-rank norms", low, 2.0, 4.0, "", a),
            Stream("rotary and joins", heads * (2 * (d + rope) + v), 2.0, 2.0, "tensor", a | Group.LATENT),
        ),
        (
            Kept("input of the low ranks", h, "tokens", Group.NORM | a, role="input"),
            Kept("low ranks and their norms", 2 * low, "", a),
            Kept("queries, keys, values", heads * (2 * (d + rope) + v), "tensor", a | Group.LATENT),
            Kept("attention", heads * v, "tensor", a, role="both"),
            Kept("attention, copied", heads * v, "tensor", a, role="eager"),
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
            Kept(f"{name}input of up", h, "tokens", Group.NORM | m, role="input"),
            Kept(f"{name}before the activation", up, "tensor", m | Group.ALTERNATE),
            Kept(f"{name}after the activation", ffn, "tensor", Group.ACTIVATION | m, role="input"),
            *_gates(dims, ffn, m, name),
        ),
        0,
    )


def _gates(dims: Dims, ffn: int, group: Group, name: str = "", *, routed: bool = False) -> tuple[Kept, ...]:
    """What a gated activation keeps beside its input and output where its two halves are kernels of their own."""
    gate = Kept(f"{name}gate", ffn, "tensor", Group.ACTIVATION | group, routed=routed, role="eager")
    return (gate,) if dims.gated else ()


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
        Kept("input of experts", h, "", m, routed=True, role="input"),
        Kept("before the activation", up, "tensor", m, routed=True),
        Kept("after the activation", ffn, "tensor", Group.ACTIVATION | m, routed=True, role="input"),
        Kept("output of experts", h, "", m, routed=True, role="expert output"),
        *_gates(dims, ffn, m, routed=True),
    )
    if shared is None:
        return Block("mixture", products, (), streams, kept, 0)
    return Block("mixture", products + shared.products, (), streams + shared.streams, kept + shared.kept, 0)
