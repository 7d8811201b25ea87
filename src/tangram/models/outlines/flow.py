"""How numbers flow through one block of a captured graph: which part of it an operator is of.

The residual stream is found from the flow: what is added to something that a product made of it. Between two such sums
lies a branch. Of a branch, what leads to or comes from an operator that mixes tokens (attention, products of two
results, convolutions) is attention's, the rest is the MLP's: so halves that run beside each other are told apart.

What the operators are says `models.outlines.recognised`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tangram.models.capturing.graph import Block, Graph, Node

NORMS = frozenset({"rsqrt", "native_layer_norm", "_fused_rms_norm", "native_group_norm"})
CHOICES = frozenset({"topk", "argmax", "sort", "max"})
"""What decides where tokens go."""


def name_of(node: Node) -> str:
    """Of its operator, as `mm`."""
    return node.operator.name().removeprefix("aten::").split(".")[0]


@dataclass(frozen=True)
class Matmul:
    """A product with a weight."""

    node: int
    input: int
    """The value that meets the weight."""
    made: int
    parameters: frozenset[int]
    """Of which the weight is made."""
    inputs: int
    outputs: int
    stacked: int
    """How many matrices the weight is; 1 as usual."""
    bias: bool


@dataclass(frozen=True)
class Attended:
    """Attention, as one operator."""

    nodes: frozenset[int]
    takes: tuple[int, int, int]
    """Queries, keys and values."""
    made: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool
    """Whether it hides keys, by a mask or because it is told to."""
    window: int = 0


@dataclass
class Flow:
    """Of one block; values and nodes by their numbers in the graph."""

    graph: Graph
    block: Block
    main: int
    """What the block is given to work on."""
    hidden: int
    alive: set[int] = field(default_factory=set[int])
    """Values that depend on what the block is given."""
    made_of: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    """The parameters of a value that is made of parameters alone."""
    products: dict[int, Matmul] = field(default_factory=dict[int, Matmul])
    """By node."""
    batched: dict[int, tuple[int, int, int, int]] = field(default_factory=dict[int, tuple[int, int, int, int]])
    """By node: how many, rows, inputs, outputs."""
    attended: list[Attended] = field(default_factory=list[Attended])
    memory_bound: set[int] = field(default_factory=set[int])
    mixing: set[int] = field(default_factory=set[int])
    residual: set[int] = field(default_factory=set[int])
    """Values of the residual stream; the block's input is one."""
    bases: dict[int, int] = field(default_factory=dict[int, int])
    """Of views and copies."""
    origins: dict[int, int] = field(default_factory=dict[int, int])
    """Of casts and products with numbers, too."""

    @cached_property
    def nodes(self) -> range:
        """Of the block."""
        return range(self.block.first, self.block.stop)

    @cached_property
    def scores(self) -> Mapping[int, Attended]:
        """The attention that a node is of."""
        return {i: one for one in self.attended for i in one.nodes}

    @property
    def tokens(self) -> int:
        """Of the capture."""
        return self.numel(self.main) // self.hidden

    def numel(self, value: int) -> int:
        """Numbers of a value."""
        return math.prod(self.graph.values[value].shape)

    def base(self, value: int) -> int:
        """What a value is a view or a copy of."""
        return self.bases.get(value, value)

    def origin(self, value: int) -> int:
        """The same, through casts and products with numbers, too."""
        return self.origins.get(value, value)

    def maker(self, value: int) -> int | None:
        """The node of the block that makes a value; None for what comes from outside."""
        found = self.graph.maker.get(value)
        return found if found is not None and found in self.nodes else None

    def takes(self, node: int) -> Iterator[int]:
        """The values that a node takes and that depend on what the block is given."""
        return (v for v in dict.fromkeys(self.graph.nodes[node].inputs) if v in self.alive)

    def makes(self, node: int) -> Iterator[int]:
        """The values that a node makes."""
        return (v for v in self.graph.nodes[node].results if v is not None)

    @cached_property
    def after(self) -> Mapping[int, tuple[int, ...]]:
        """For each value the nodes of the block that take it."""
        found: dict[int, list[int]] = {}
        for i in self.nodes:
            for v in dict.fromkeys(self.graph.nodes[i].inputs):
                found.setdefault(v, []).append(i)
        return {v: tuple(nodes) for v, nodes in found.items()}

    @cached_property
    def after_base(self) -> Mapping[int, tuple[int, ...]]:
        """For each value the nodes that take it or a view or copy of it, and are no views or copies."""
        found: dict[int, dict[int, None]] = {}
        for i in sorted(self.memory_bound | self.scores.keys() | self.mixing | self.products.keys()):
            for v in self.graph.nodes[i].inputs:
                found.setdefault(self.base(v), {})[i] = None
        return {v: tuple(nodes) for v, nodes in found.items()}

    def down(self, values: Iterable[int], through: Callable[[int], bool]) -> tuple[set[int], set[int]]:
        """Values that are made of some, and the nodes on the way; `through`: which nodes are passed.

        Nodes that are not passed are among those found, what they make is not; the residual stream ends the way.
        """
        seen, met, todo = set[int](), set[int](), list(values)
        while todo:
            value = todo.pop()
            for i in self.after.get(value, ()):
                if i in met:
                    continue
                met.add(i)
                if through(i):
                    fresh = [v for v in self.makes(i) if v not in seen]
                    seen.update(fresh)
                    todo += [v for v in fresh if v not in self.residual]
        return seen, met

    def up(self, nodes: Iterable[int]) -> set[int]:
        """Nodes that lead to some, not beyond the residual stream."""
        seen, todo = set[int](), list(nodes)
        while todo:
            i = todo.pop()
            for v in self.takes(i):
                maker = self.maker(v)
                if maker is not None and maker not in seen and v not in self.residual:
                    seen.add(maker)
                    todo.append(maker)
        return seen

    @cached_property
    def attention(self) -> set[int]:
        """The nodes of branches that mix tokens, with what else their products give, as gates."""
        made = [v for i in self.mixing for v in self.makes(i)]
        _, below = self.down(made, lambda i: True)
        found = self.mixing | self.up(self.mixing) | below
        given = [one.made for i, one in self.products.items() if i in found]
        _, beside = self.down(given, lambda i: i not in self.products)
        return found | (beside - self.products.keys())

    @cached_property
    def norms(self) -> set[int]:
        """The nodes of norms over the hidden states, in modules of their own, about the residual stream."""
        own = {i: self.graph.nodes[i].module for i in self.nodes}
        busy = {own[i] for i in self.products.keys() | self.batched.keys() | self.scores.keys()}
        named = {own[i] for i in self.memory_bound if name_of(self.graph.nodes[i]) in NORMS} - busy - {self.block.path}
        found = set[int]()
        for module in named:
            nodes = {i for i in self.memory_bound if own[i] == module}
            given = {self.origin(v) for i in nodes for v in self.takes(i)}
            made = {v for i in nodes for v in self.makes(i)}
            seen, _ = self.down(made, lambda i: i not in self.products and i not in self.mixing)
            wide = all(self.numel(v) in (self.tokens * self.hidden, self.tokens) for v in made & self.alive)
            if wide and (given & self.residual or seen & self.residual):
                found |= nodes
        return found
