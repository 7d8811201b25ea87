"""What a block streams and keeps, with operators that hang together taken as one fused kernel.

Of each kernel only what lies at its border goes through memory, and of what the backward takes from within it, its
inputs are kept instead: that is what compiled or hand-written kernels do, and the terms of
`models.outlines.outline.decoder`.

What TP ranks divide of a block's products, from how numbers flow between them: as Megatron-LM does it by hand.

    in     a product of what the ranks hold parts of: rows of its weight are divided, and what it makes is summed
    out    any other product whose result goes to what mixes tokens, or of which the next product gives fewer numbers or
           goes back to the residual stream: its columns are divided
    ""     all others: routers (their result decides where tokens go), the first of two products that go through fewer
           numbers (a low rank), and what goes back to the residual stream at once

So the queries, keys and values are cut by columns and the output by rows; the first of latent attention's products are
whole on each rank, the second cut; of a state-space block the projection in is cut by columns, those to the small
step and state by rows, and the projection out by rows (Shoeybi et al. 2019; Waleffe et al. 2024).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from tangram.models.outlines.blocks import Cut, Group, Kept, Stream
from tangram.models.outlines.flow import CHOICES, Flow, name_of

Way = Literal["out", "in", ""]


@dataclass(frozen=True)
class Cuts:
    """Of a block."""

    products: Mapping[int, Way]
    """By node."""
    values: Mapping[int, Cut]
    """Of what depends on the block's input."""
    routers: frozenset[int]
    """Products whose results decide where tokens go."""
    last: frozenset[int]
    """Products whose results go to the residual stream or out of the block, with no product between."""
    choosing: bool
    """Whether tokens choose between matrices."""


def cuts_of(flow: Flow) -> Cuts:
    """Of a block's products and values."""
    nexts: dict[int, list[int]] = {}
    mixed = set[int]()
    before: dict[int, list[int]] = {i: [] for i in flow.products}
    routers, last = set[int](), set[int]()
    for i, one in flow.products.items():
        made, met = flow.down([one.made], lambda j: j not in flow.products)
        made.add(one.made)
        nexts[i] = [j for j in sorted(met) if j in flow.products and flow.products[j].input in made]
        for j in nexts[i]:
            before[j].append(i)
        if any(name_of(flow.graph.nodes[j]) in CHOICES for j in met):
            routers.add(i)
        if met & flow.mixing:
            mixed.add(i)
        if made & (flow.residual | set(flow.block.gives)):
            last.add(i)
    found: dict[int, Way] = {}
    for i in sorted(flow.products):
        ways = {found[j] for j in before[i]}
        if "out" in ways and i not in routers:
            found[i] = "in"
        elif i in routers:
            found[i] = ""
        else:
            width, after = flow.products[i].outputs, [j for j in nexts[i] if j not in routers]
            narrow = any(j not in last and flow.products[j].outputs > width for j in after)
            back = any(j in last or i in mixed or flow.products[j].outputs < width for j in after)
            found[i] = "out" if back and not narrow else ""
    return Cuts(found, _values(flow, found, routers, last), frozenset(routers), frozenset(last), bool(routers))


def _values(flow: Flow, products: Mapping[int, Way], routers: set[int], last: set[int]) -> dict[int, Cut]:
    found: dict[int, Cut] = dict.fromkeys(flow.alive & set(flow.block.takes), "tokens")
    for i in flow.nodes:
        made = [v for v in flow.makes(i) if v in flow.alive]
        if i in products:
            way: Cut = "tokens" if i in routers or i in last else ""
            given: set[Cut] = {"tensor" if products[i] == "out" else way}
        else:
            given = {found.get(v, "tokens") for v in flow.takes(i)}
        cut: Cut = "tensor" if "tensor" in given else "" if "" in given else "tokens"
        found.update((v, "tokens" if v in flow.residual else cut) for v in made)
    return found


GATHERS = frozenset({"index", "gather", "index_select", "embedding"})
"""Read no more than they write."""
SMALL = 1 / 8
"""Of the widest row that is kept, what rows are put together below."""
_HALF = 2
"""Bytes of a number that is computed in, in a capture."""


@dataclass(frozen=True)
class Kernel:
    """Operators that hang together and are of one group; values without views and copies."""

    nodes: frozenset[int]
    group: Group
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass
class Fused:
    """A block's kernels."""

    flow: Flow
    cuts: Cuts
    spread: int
    """How many rows of experts a token has in the capture."""
    kernels: list[Kernel] = field(default_factory=list[Kernel])
    routed: set[int] = field(default_factory=set[int])
    """Values whose rows are those of experts."""

    def width(self, value: int) -> float:
        """Bytes a row of a value."""
        rows = self.flow.tokens * (self.spread if value in self.routed else 1)
        return self.flow.numel(value) * self.flow.graph.values[value].dtype.itemsize / rows

    @cached_property
    def owner(self) -> dict[int, Kernel]:
        """The kernel of each node."""
        return {i: one for one in self.kernels for i in one.nodes}

    # ------------------------------------------------------------ streams

    def streams(self) -> tuple[Stream, ...]:
        """A row for each group, cut and kind of rows: numbers of the type that is computed in."""
        found: dict[tuple[Group, Cut, bool], list[float]] = {}
        kept = self.kept_values
        for one in self.kernels:
            routed = any(v in self.routed for v in (*one.reads, *one.writes))
            widest = max(one.writes or one.reads, key=self.flow.numel, default=None)
            if widest is None:
                continue
            cut = "tensor" if any(self.cuts.values[v] == "tensor" for v in one.writes) else self.cuts.values[widest]
            over = self.flow.tokens * (self.spread if routed else 1)
            ahead = sum(map(self._read, [one] * len(one.reads), one.reads)) + sum(map(self._bytes, one.writes))
            needed = sum(self._bytes(v) for v in one.reads if v in kept)
            back = needed + sum(self._bytes(v) for v in (*one.reads, *one.writes) if self._flows(v))
            row = found.setdefault((one.group, "" if routed and cut != "tensor" else cut, routed), [0.0, 0.0, 0.0])
            row[0] += ahead / over / _HALF
            row[1] += back / over / _HALF
            row[2] = max(row[2], self._bytes(widest) / over / _HALF)
        return tuple(
            Stream(
                _group_name(group), max(round(width), 1), ahead / max(round(width), 1), back / max(round(width), 1),
                cut, group, routed,
            )
            for (group, cut, routed), (ahead, back, width) in found.items()
        )  # fmt: skip

    def _bytes(self, value: int) -> float:
        return self.flow.numel(value) * self.flow.graph.values[value].dtype.itemsize

    def _flows(self, value: int) -> bool:
        return self.flow.graph.values[value].differentiable

    def _read(self, kernel: Kernel, base: int) -> float:
        """Of what lies there the parts that are read; of rows that are picked as many as are."""
        flow, parts, picked = self.flow, set[int](), 0.0
        for i in kernel.nodes:
            for v in flow.takes(i):
                if flow.base(v) != base:
                    continue
                if name_of(flow.graph.nodes[i]) in GATHERS:
                    picked = max(picked, sum(map(self._bytes, flow.makes(i))))
                else:
                    parts.add(v)
        return max(min(self._bytes(base), sum(map(self._bytes, parts))), picked)

    # ------------------------------------------------------------ kept

    @cached_property
    def kept_values(self) -> tuple[int, ...]:
        """What the backward needs of the block's forward, in order."""
        flow, graph = self.flow, self.flow.graph
        given, needed = set(flow.block.takes), dict[int, None]()
        for node in graph.nodes:
            if not node.backward:
                continue
            for v in node.inputs:
                base = flow.base(v)
                if base not in flow.alive or (base in given and base != flow.main):
                    continue
                at_border = base == flow.main or base in flow.block.gives
                if at_border and (node.of is None or node.of not in flow.nodes):
                    continue
                needed.update(dict.fromkeys(self._instead(base, node.of)))
        return tuple(sorted(needed))

    def _instead(self, value: int, of: int | None) -> Iterable[int]:
        """What is kept where the backward of a node takes a value."""
        flow = self.flow
        maker = flow.maker(value)
        if maker in self.scanned and of in self.scanned:
            return (v for v in self._sources(value, self.scanned) if v in flow.alive)
        kernel = None if maker is None else self.owner.get(maker)
        attended = None if maker is None else flow.scores.get(maker)
        if attended is not None and maker is not None and "attention" not in name_of(flow.graph.nodes[maker]):
            # Attention makes its scores again, of keys and values that may be an earlier block's, which keeps them.
            of_attention = (flow.base(v) for v in (*attended.takes, attended.made))
            return {v: None for v in of_attention if v in flow.alive and (v == flow.main or v not in flow.block.takes)}
        if kernel is None or (value in kernel.writes and of is not None and of not in kernel.nodes):
            return (value,)
        read = self._sources(value, kernel.nodes)
        return (v for v in kernel.reads if v in read and (v == flow.main or v not in flow.block.takes))

    @cached_property
    def scanned(self) -> frozenset[int]:
        """Nodes of scans: products of two results, and what lies between them. Kernels of scans keep what they are
        given and make all else again (mamba_ssm's `MambaChunkScanCombinedFn`, flash-linear-attention's
        `ChunkGatedDeltaRuleFunction`, which keeps a chunk's small triangle, too)."""
        flow = self.flow
        own = flow.products.keys() | flow.scores.keys()
        _, below = flow.down([v for i in flow.batched for v in flow.makes(i)], lambda i: i not in own)
        return frozenset((flow.up(flow.batched) & below | flow.batched.keys()) - own)

    @cached_property
    def of_scans(self) -> frozenset[int]:
        """What scans are given and make, which is in the type that is computed in, though their code without kernels
        widens it."""
        flow = self.flow
        return frozenset(flow.base(v) for i in self.scanned for v in (*flow.takes(i), *flow.makes(i)))

    def _sources(self, value: int, within: Collection[int]) -> set[int]:
        """Of what a kernel of these nodes reads that of which a value within it is made."""
        found, seen, todo = set[int](), set[int](), [value]
        while todo:
            here = self.flow.base(todo.pop())
            maker = self.flow.maker(here)
            if maker is None or maker not in within:
                found.add(here)
            elif maker not in seen:
                seen.add(maker)
                todo += self.flow.takes(maker)
        return found

    def kept(self) -> tuple[Kept, ...]:
        """Rows of what the backward needs; small ones are put together."""
        rows: dict[tuple[str, Cut, Group, float, bool], float] = {}
        for v in self.kept_values:
            size = self.flow.graph.values[v].dtype.itemsize
            nbytes = 0.0 if size == _HALF or v in self.of_scans else float(size)
            key = self._named(v), self._cut(v), self._group(v), nbytes, v in self.routed
            rows[key] = rows.get(key, 0.0) + self.width(v) / size
        widest = max((width * (key[3] or _HALF) for key, width in rows.items()), default=0.0)
        found: dict[tuple[str, Cut, Group, float, bool], float] = {}
        for (name, cut, group, nbytes, routed), width in rows.items():
            small = width * (nbytes or _HALF) < SMALL * widest
            key = "others" if small else name, cut, group, nbytes, routed
            found[key] = found.get(key, 0.0) + width
        return tuple(
            Kept(name, width, cut, group, nbytes, routed) for (name, cut, group, nbytes, routed), width in found.items()
        )

    def _named(self, value: int) -> str:
        if value == self.flow.main:
            return "input"
        maker = self.flow.maker(value)
        module = "" if maker is None else self.flow.graph.nodes[maker].module.removeprefix(self.flow.block.path)
        return module.removeprefix(".") or "residual"

    def _cut(self, value: int) -> Cut:
        cut = self.cuts.values[value]
        return "" if value in self.routed and cut != "tensor" else cut

    def _group(self, value: int) -> Group:
        """What choosing to recompute drops it."""
        flow = self.flow
        if value == flow.main:
            return Group.NONE
        if value in flow.residual:
            return Group.ALTERNATE
        maker = flow.maker(value)
        assert maker is not None
        if maker in flow.norms:
            takers = flow.after_base[value]
            half = Group.ATTENTION if any(i in flow.attention for i in takers) else Group.NONE
            half |= Group.MLP if any(i in flow.products and i not in flow.attention for i in takers) else Group.NONE
            return Group.NORM | (half if half in (Group.ATTENTION, Group.MLP) else Group.NONE)
        half = Group.ATTENTION if maker in flow.attention else Group.MLP
        product = flow.products.get(maker)
        if product is not None:
            whole = self.cuts.products[maker] == "out" and value not in self.routed
            return half | (Group.ALTERNATE if whole else Group.NONE)
        kernel = self.owner.get(maker)
        if kernel is None:
            return half
        scored = half is Group.ATTENTION and any(i in flow.scores for i in flow.after_base[value])
        return kernel.group | (Group.ALTERNATE if scored else Group.NONE)


def _group_name(group: Group) -> str:
    if group & Group.ACTIVATION:
        return "activations"
    names = {Group.NONE: "residuals", Group.NORM: "norms", Group.ATTENTION: "within attention", Group.MLP: "within MLP"}
    return names[group]


def fused_of(flow: Flow, cuts: Cuts) -> Fused:
    """Of a block."""
    found = Fused(flow, cuts, _spread(flow, cuts))
    found.routed = _routed(flow, cuts, found.spread)
    found.kernels = _kernels(flow, cuts)
    return found


def _spread(flow: Flow, cuts: Cuts) -> int:
    rows = [
        flow.numel(one.input) // one.inputs // flow.tokens
        for one in flow.products.values()
        if one.stacked > 1 and cuts.choosing
    ]
    return max(rows, default=1)


def _routed(flow: Flow, cuts: Cuts, spread: int) -> set[int]:
    """What experts are given and make, and what is made of it for as many rows."""
    found = set[int]()
    rows = flow.tokens * spread
    for i in flow.nodes:
        one = flow.products.get(i)
        if one is not None and one.stacked > 1 and cuts.choosing:
            found |= {one.input, flow.base(one.input), one.made}
        elif one is None:
            for v in flow.makes(i):
                shape = flow.graph.values[v].shape
                if shape and flow.numel(v) // max(shape[-1], 1) == rows and any(g in found for g in flow.takes(i)):
                    found.add(v)
    return found


def _kernels(flow: Flow, cuts: Cuts) -> list[Kernel]:
    groups = {i: _group_of(flow, i) for i in flow.memory_bound}
    parent = {i: i for i in groups}

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    makers = {v: i for i in groups for v in flow.makes(i)}
    for i in sorted(groups):
        for v in flow.takes(i):
            maker = makers.get(flow.base(v))
            if maker is not None and groups[maker] == groups[i]:
                parent[root(i)] = root(maker)
    together: dict[int, set[int]] = {}
    for i in groups:
        together.setdefault(root(i), set()).add(i)
    return [_kernel(flow, cuts, nodes, groups[i]) for i, nodes in sorted(together.items())]


def _group_of(flow: Flow, i: int) -> Group:
    if i in flow.norms:
        return Group.NORM
    if any(v in flow.residual or flow.origin(v) in flow.residual for v in flow.makes(i)):
        return Group.NONE
    return Group.ATTENTION if i in flow.attention else Group.MLP


def _kernel(flow: Flow, cuts: Cuts, nodes: set[int], group: Group) -> Kernel:
    made = {v for i in nodes for v in flow.makes(i)}
    reads = dict.fromkeys(flow.base(v) for i in sorted(nodes) for v in flow.takes(i))
    gives = {flow.base(v) for v in flow.block.gives}
    writes = [v for v in sorted(made) if v in gives or set(flow.after_base.get(v, ())) - nodes]
    meets = {flow.base(one.input) for i, one in flow.products.items() if cuts.products[i] == "in"}
    if group is Group.MLP and meets & set(writes):
        group = Group.ACTIVATION | Group.MLP
    return Kernel(frozenset(nodes), group, tuple(v for v in reads if v not in made), tuple(writes))
