"""Seconds of one pass of a micro-batch through one block, for every configuration of a grid at once.

A block's pass takes as long as its operators one after another on the device, or as the host needs to start them all,
whichever is longer:

    matmuls      by the curve of the device for their shape; the backward multiplies twice, by the other two shapes
    attention     by the curve of the fused kernel; unfused, as matmuls and sequence x sequence numbers through memory;
                  of scans the matmuls of two results, which have no weights to make gradients of
    streams       bytes by the rate of memory; fused or not as the framework has them
    tensor        two exchanges of a block's hidden states in the forward and two in the backward
    expert        tokens to their experts' ranks and back, forward and backward
    context       keys and values around, under attention; ranks that exchange heads (`ulysses`) have all tokens of
                  their group and a part of the heads while attention works (Jacobs et al. 2023)

Of exchanges that runs beside computation which the framework overlaps, together as much as there is computation.

Each is an array over the grid; `planner.cost.step_time` makes a step of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tangram.hardware.catalogue import curves
from tangram.models.outlines.outline import Batched, Block, Group, Product, Scores, Stream
from tangram.planner.cost.communication_time import exchange, no_links
from tangram.planner.cost.kept_activations import busiest, greatest
from tangram.planner.space.grid import Array, Grid
from tangram.planner.space.setting import Setting

PARTS = ("products", "attention", "streams", "launch", "tensor", "expert", "context")
"""Of a pass, what takes time one after another."""


@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch through one block, or several."""

    products: Array
    attention: Array
    streams: Array
    launch: Array
    tensor: Array
    expert: Array
    context: Array
    links: Array
    """Seconds that each link carries what of it, also beside computation; shape (links, grid)."""

    @property
    def total(self) -> Array:
        return sum((getattr(self, name) for name in PARTS), np.zeros(()))

    @property
    def room(self) -> Array:
        """Seconds in which each link carries nothing of it."""
        return self.total - self.links

    def at(self, places: Array) -> Pass:
        """Some of them, as often as they are named."""
        return Pass(**{name: getattr(self, name)[places] for name in PARTS}, links=self.links[:, places])

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(getattr(self, name) + getattr(other, name) for name in (*PARTS, "links")))

    def __mul__(self, times: Any) -> Pass:
        return Pass(*(getattr(self, name) * times for name in (*PARTS, "links")))


def none(g: Grid, setting: Setting) -> Pass:
    return Pass(**{name: np.zeros(len(g)) for name in PARTS}, links=no_links(g, setting))


KERNELS = {"product": 2.0, "scores": 2.0, "unfused scores": 8.0, "stream": 1.0, "unfused stream": 4.0, "exchange": 4.0}
"""How many kernels the host starts for an operator, with and without fusing."""
SCORE_PASSES = 4.5
"""How often unfused attention has a matrix of queries x keys through memory: product, scale, softmax, dropout."""
SUSTAINED = 0.87
"""Of the rate of matmuls measured alone what is left when a device works without pause, at the limit of its power."""
UNFUSED = 1.6
"""How much more goes through memory where each norm, activation or rotation is several kernels."""
EAGER_NORM = 9.0
"""The same of a norm written in torch's operators: brought to float32, squared, averaged, multiplied and brought back,
which moves 36 bytes a number where one kernel reads 2 and writes 2."""


@dataclass(frozen=True)
class Ways:
    """A block with its grid and setting: what each of its passes takes."""

    block: Block
    hidden: int
    g: Grid
    setting: Setting

    def forward(self, groups: Array | None = None) -> Pass:
        """All operators once; or only those of the groups that each configuration recomputes."""
        block = self.block

        def share(group: Group) -> Any:
            return 1.0 if groups is None else _chosen(groups, group)

        every = 0.0 if groups is None else _chosen(groups, Group.ALTERNATE)  # of experts' products each
        run = [(one, np.maximum(share(one.group), every if one.experts else 0.5 * every)) for one in block.products]
        products = sum((times * self.product(one, "forward") for one, times in run), self.nothing)
        casts = sum((times * self.casts(one, "forward") for one, times in run), self.nothing)
        attention = sum((share(one.group) * self.scores(one, backward=False) for one in block.scores), self.nothing)
        scans = sum((share(one.group) * self.scan(one) for one in block.batched), self.nothing)
        routed = [(one, np.maximum(share(one.group), every if one.routed else 0.0)) for one in block.streams]
        streams = sum((times * self.stream(one, one.forward) for one, times in routed), self.nothing) + casts
        started = sum((share(group) * took for group, took in self.started(1.0)), self.nothing)
        tensor, expert = self.exchanges()
        a, m = share(Group.ATTENTION), share(Group.MLP)
        around, under = self.around(attention)
        context = a * (around + self.dealt())
        return self.waiting(
            started, products, attention + scans, streams, tensor * (a + m) / 2, expert * m, context, a * under
        )

    def repeated(self, forward: Pass) -> Pass:
        """What is recomputed in the backward of each configuration, by its groups."""
        if not self.g.recompute.any():
            return forward * 0.0
        return self.forward(self.g.recompute)

    def backward(self) -> Pass:
        """All operators backward."""
        block = self.block
        products = sum((self.product(one, "backward") for one in block.products), self.nothing)
        casts = sum((self.casts(one, "backward") for one in block.products), self.nothing)
        attention = sum((self.scores(one, backward=True) for one in block.scores), self.nothing)
        scans = sum((2 * self.scan(one) for one in block.batched), self.nothing)
        streams = sum((self.stream(one, one.backward) for one in block.streams), self.nothing) + casts
        started = sum((took for _, took in self.started(2.0)), self.nothing)
        tensor, expert = self.exchanges()
        around, under = self.around(attention / 2)
        context = 2 * around + self.dealt()
        return self.waiting(started, products, attention + scans, streams, tensor, expert, context, 2 * under)

    @cached_property
    def busy(self) -> Array:
        """Of what goes to experts the part of the busiest rank, for which the others wait."""
        return busiest(self.block.experts, self.g, self.setting)

    @cached_property
    def longest(self) -> Any:
        """Of attention to packed documents what the rank of the longest ones has, as a multiple of the mean."""
        if (documents := self.setting.documents) is None:
            return 1.0
        several = self.g.batch * documents.sequence / (self.g.data * documents.mean)
        return 1 + greatest(self.g.data) * documents.deviation / np.sqrt(np.maximum(several, 1.0))

    @property
    def nothing(self) -> Array:
        return np.zeros(len(self.g))

    def waiting(
        self,
        started: Array,
        products: Array,
        attention: Array,
        streams: Array,
        tensor: Array,
        expert: Array,
        context: Array,
        under: Array,
    ) -> Pass:
        """A pass, with the time that the host needs beyond the device's, `started` seconds in all; exchanges as their
        links carry them, `under`: seconds of that of context that attention covers."""
        framework = self.setting.framework
        links = tensor + expert + context
        took = [one.max(axis=0) for one in (tensor, expert, context)]
        covered = [took[0] * framework.overlap_tensor, took[1] * self.setting.overlap_expert, under]
        compute = products + attention + streams
        # At most as much as there is computation, of each its share.
        share = np.minimum(compute / np.maximum(covered[0] + covered[1] + covered[2], 1e-30), 1.0)
        alone = [sent - share * part for sent, part in zip(took, covered, strict=True)]
        busy = compute + alone[0] + alone[1] + alone[2]
        return Pass(products, attention, streams, np.maximum(started - busy, 0.0), alone[0], alone[1], alone[2], links)

    # ------------------------------------------------------------ operators

    def rows(self, one: Product) -> tuple[Array, Array]:
        """Of a product: rows of one of the matrices that a rank has, and how many there are."""
        g = self.g
        if not one.experts:
            whole = 1.0 if one.cut else np.where(g.sequence_parallel > 0, g.tensor, 1.0)
            return g.tokens / whole, np.ones(len(g))
        local = np.maximum(one.experts / g.expert, 1.0)
        routed = g.tokens * self.setting.per_token(self.block) * g.expert_tensor / g.tensor
        return np.maximum(routed / local * self.busy, 1.0), local

    def sizes(self, one: Product) -> tuple[Array, Array]:
        """Inputs and outputs of what a rank has of a product."""
        ranks = self.g.expert_tensor if one.experts else self.g.tensor
        inputs, outputs = np.full(len(self.g), float(one.inputs)), np.full(len(self.g), float(one.outputs))
        return (inputs / ranks if one.cut == "in" else inputs), (outputs / ranks if one.cut == "out" else outputs)

    def product(self, one: Product, way: str) -> Array:
        """Seconds of one map: its product, or the two of its backward."""
        device, kind = self.setting.device, self.kind(one)
        (m, count), (k, n) = self.rows(one), self.sizes(one)
        if way == "forward":
            return curves.product_seconds(device, kind, m, n, k, count) / SUSTAINED
        inputs = curves.product_seconds(device, kind, m, k, n, count)
        if one.frozen:
            return inputs / SUSTAINED
        return (inputs + curves.product_seconds(device, kind, k, n, m, count)) / SUSTAINED

    def kind(self, one: Product) -> str:
        """What a product is computed in: routers stay in 16 bits, and so do adapters, which are too thin to gain."""
        low, router = self.setting.precision in ("fp8", "fp4"), not one.cut and not one.experts
        adapter = self.block.adapted and not one.frozen
        return "bf16" if low and (router or adapter) else self.setting.precision

    def casts(self, one: Product, way: str) -> Array:
        """To bring what enters a product to 8 bits, and frozen weights that are kept in fewer to 16."""
        return self.lowered(one, way) + self.unpacked(one)

    def unpacked(self, one: Product) -> Array:
        """Frozen weights, read in what they are kept in and written in 16 bits."""
        base = self.setting.base
        if not (one.frozen and base.unpacked):
            return self.nothing
        (k, n), count = self.sizes(one), np.maximum(one.experts / self.g.expert, 1.0)
        fused = self.setting.framework.fused_streams or not base.moved
        return curves.moved_seconds(self.setting.device, (base.nbytes + 2.0 if fused else base.moved) * count * k * n)

    def lowered(self, one: Product, way: str) -> Array:
        """What enters a product, to 8 bits."""
        if self.setting.precision not in ("fp8", "fp4") or self.kind(one) == "bf16":
            return self.nothing
        (m, count), (k, n) = self.rows(one), self.sizes(one)
        if way == "backward":
            return curves.moved_seconds(self.setting.device, self.setting.framework.cast_bytes * count * m * n)
        # The norm or activation before a product writes 8 bits in both orders itself, in the place of 16.
        moved = one.experts > 0 if one.cut == "out" else bool(one.group & Group.ATTENTION)
        inputs = 0.0 if self.setting.framework.keeps_low_inputs and not moved else m * k
        numbers = count * (inputs + n * k / self.g.micros)
        return curves.moved_seconds(self.setting.device, self.setting.framework.cast_bytes * numbers)

    def scores(self, one: Scores, *, backward: bool) -> Array:
        """Of attention on this rank's heads and queries."""
        g, setting = self.g, self.setting
        over = g.tensor * g.ulysses
        heads, kv_heads = np.maximum(one.heads / over, 1.0), np.maximum(one.kv_heads / over, 1.0)
        queries, keys = g.sequence * g.ulysses / g.context, g.sequence
        width = (one.qk_dim + one.v_dim) / 2
        kind = "fp32" if setting.precision == "fp32" else "bf16"
        if setting.framework.fused_attention:
            pieces = keys / np.minimum(keys, float(one.chunk or np.inf))  # that see nothing of each other
            seen = np.minimum(keys / pieces, float(one.window or np.inf))
            of = curves.AttentionSizes(g.micro * pieces, queries / pieces, seen, heads, kv_heads, width,
                                       causal=one.causal & (seen >= keys / pieces))  # fmt: skip
            took = curves.attention_seconds(
                setting.device, kind, of, backward=backward, kernel=setting.framework.attention_kernel
            )
            return took * self.longest if one.causal else took
        times = 2.0 if backward else 1.0
        seen = keys if one.causal else np.minimum(keys, one.chunk or np.inf)  # images are samples of their own
        flops = curves.product_seconds(setting.device, kind, queries, seen, width, 2 * times * g.micro * heads)
        numbers = g.micro * heads * queries * seen
        return flops + curves.moved_seconds(setting.device, times * SCORE_PASSES * setting.flow_bytes * numbers)

    def scan(self, one: Batched) -> Array:
        """Products of two results, forward; the backward has two for each."""
        g, setting = self.g, self.setting
        kind = "fp32" if setting.precision == "fp32" else "bf16"
        count = g.tokens * one.times / (g.tensor if one.cut == "tensor" else 1.0)
        return curves.product_seconds(setting.device, kind, one.rows, one.outputs, one.inputs, count)

    def stream(self, one: Stream, passes: float) -> Array:
        """Of an operator that memory bounds."""
        g, setting = self.g, self.setting
        each = setting.per_token(self.block) * g.expert_tensor / g.tensor * self.busy if one.routed else 1.0
        rows = g.tokens * each
        ranks = g.expert_tensor if one.routed else g.tensor
        if one.cut == "tensor":
            rows = rows / ranks
        elif one.cut == "tokens":
            rows = rows / np.where(g.sequence_parallel > 0, g.tensor, 1.0)
        times = 1.0 if setting.framework.fused_streams else UNFUSED
        if not setting.framework.fused_streams and setting.framework.kernels == "eager" and one.group == Group.NORM:
            times = EAGER_NORM
        return curves.moved_seconds(setting.device, rows * one.width * passes * times * setting.row_bytes)

    def started(self, passes: float) -> list[tuple[Group, Array]]:
        """Seconds of the host in a pass, by groups: to start kernels, `passes` times those of a forward, to walk
        through modules and to route, and once for each module's hooks, those of norms as well."""
        framework, times = self.setting.framework, 0.0 if self.setting.captured else passes
        hooks = framework.hooks * (self.g.zero >= 3)
        found = [(group, framework.launch * times * count) for group, count in self.kernels()]
        for one in self.block.products:
            plain = 0.5 if self.block.adapted and not one.frozen else 1.0  # adapters are torch's own linear layers
            found.append((one.group, (plain * framework.module_seconds * times + hooks) * self.alone(one.experts)))
        found += [(Group.NORM, hooks)] * round(self.block.halves)
        if self.block.experts:
            found.append((Group.MLP, self.nothing + framework.router_seconds * times))
        return [*found, (Group.ATTENTION, framework.launch * self.rotated(backward=passes > 1))]

    def rotated(self, *, backward: bool) -> Array:
        """Kernels that the host starts for the documents of a micro-batch, which are rotated one after the other."""
        documents, framework = self.setting.documents, self.setting.framework
        if documents is None or not any(one.causal for one in self.block.scores):
            return self.nothing
        if any(name in documents.model.lower() for name in framework.rotates_at_once):
            return self.nothing
        several = self.g.micro * self.g.sequence / float(documents.lengths.mean())
        return several * framework.document_kernels[backward]

    def alone(self, experts: int) -> Any:
        """How often an operator of so many experts is started: once, or by each of a rank's for itself."""
        return np.maximum(experts / self.g.expert, 1.0) if experts and self.setting.framework.loops_experts else 1.0

    def kernels(self) -> list[tuple[Group, Any]]:
        """How many the host starts in a forward, by the group they are of."""
        fused, alone = self.setting.framework.fused_streams, self.setting.framework.fused_attention
        scores, streams = "scores" if alone else "unfused scores", "stream" if fused else "unfused stream"
        found: list[tuple[Group, Any]] = [
            (one.group, KERNELS["product"] * self.alone(one.experts)) for one in self.block.products
        ]
        found += [(one.group, KERNELS[scores]) for one in self.block.scores]
        found += [(one.group, KERNELS["product"]) for one in self.block.batched]
        routed = self.alone(self.block.experts)
        found += [(one.group, KERNELS[streams] * (routed if one.routed else 1.0)) for one in self.block.streams]
        over = np.where(self.g.tensor > 1, KERNELS["exchange"], 0.0)
        dealt = np.where(self.g.ulysses > 1, KERNELS["exchange"], 0.0)
        return [*found, (Group.ATTENTION, over + dealt), (Group.MLP, over)]

    # ------------------------------------------------------------ exchanges

    def exchanges(self) -> tuple[Array, Array]:
        """Of a pass: hidden states over TP ranks, by as many halves of the block as are cut, and tokens over expert
        ranks; seconds by link."""
        g, setting = self.g, self.setting
        hidden = g.tokens * self.hidden * setting.flow_bytes
        over = 2 * exchange(setting, "all-reduce", hidden, g.tensor, np.ones(len(g)))
        if not self.block.experts:
            return over * self.block.halves / 2, no_links(g, setting)
        sent = hidden * setting.per_token(self.block) * g.expert_tensor / g.tensor * self.busy
        to = exchange(setting, "all-to-all", sent, g.expert, g.expert_tensor, g)
        alone = (self.block.halves - 1) / 2
        return over * alone + over / 2 * (g.expert_tensor > 1), 2 * to

    def around(self, attention: Array) -> tuple[Array, Array]:
        """Keys and values over the CP ranks that have the same heads, by link, and how much of that attention covers:
        at most half of itself, and all but the first of ten parts."""
        g, setting = self.g, self.setting
        ring = g.context / g.ulysses
        if not (ring > 1).any() or not self.block.scores:
            return no_links(g, setting), self.nothing
        numbers = sum((self.keys(one) for one in self.block.scores), self.nothing)
        nbytes = setting.flow_bytes * g.micro * g.sequence * numbers
        all_keys = exchange(setting, "all-gather", nbytes, ring, g.tensor * g.ulysses)
        return all_keys, np.minimum(0.5 * attention, 0.9 * all_keys.max(axis=0))

    def keys(self, one: Scores) -> Array:
        """Numbers of a token's keys and values on a rank; where ranks are more than heads each has one, copied."""
        over = self.g.tensor * self.g.ulysses
        copied = np.where(self.g.ulysses > 1, np.maximum(one.kv_heads / over, 1.0), one.kv_heads / over)
        return copied * (one.qk_dim + one.v_dim)

    def dealt(self) -> Array:
        """Queries, keys and values to the ranks of their heads, what attention makes of them back to those of their
        tokens, by link; nothing covers it. The backward sends the gradients of as much."""
        g, setting = self.g, self.setting
        found = no_links(g, setting)
        if not (g.ulysses > 1).any() or not self.block.scores:
            return found
        each = setting.flow_bytes * g.tokens
        for one in self.block.scores:
            to = one.heads * one.qk_dim / g.tensor + self.keys(one) * g.ulysses
            back = one.heads * one.v_dim / g.tensor
            found = found + sum(exchange(setting, "all-to-all", each * way, g.ulysses, g.tensor) for way in (to, back))
        return found


def _chosen(groups: Array, group: Group) -> Array:
    """1 where a configuration computes a group again. Whole layers are all of theirs."""
    whole = (groups & int(Group.BLOCK)) == int(Group.BLOCK)
    return np.where(whole | ((groups & int(group)) > 0), 1.0, 0.0)
