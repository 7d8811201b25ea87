"""What TP ranks divide of a block's products, from how numbers flow between them: as Megatron-LM does it by hand.

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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tangram.models.outlines.blocks import Cut
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
