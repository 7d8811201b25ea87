"""Bytes of a block that its backward needs of its forward, by kernels, precision and what is recomputed.

fused       a row of a block's table each: norms, gated activations and attention are one kernel, and keep inputs
eager       beside these, what single kernels keep: norms compute in float32 and keep that copy and what they give
            before their weights, a gated activation keeps its gate twice, attention's output is copied for its product
8, 4 bits   where a framework keeps inputs of products as products take them (Transformer Engine), these are of a byte,
            or of half a byte and a scale for every 16; what attention gives is kept in 16 bits as well
experts     their outputs are kept where they are weighted after their last product, and not where before it; what EP
            ranks exchanged, where recomputation by operator saves collectives' results
frozen      weights in few bits that torch's own operators unpack (`Base.stays`) are kept in 16 for the backward

Experts that have not as much to do: how much more than the mean the busiest rank of experts has.

With experts' loads of mean 1 and standard deviation `spread` (alike otherwise, their sum given), the load of one of n
ranks of e = E / n experts each has the standard deviation

    spread sqrt((1 - e / E) E / (E - 1) / e)

(sampling without replacement), and the busiest of n is about as far above the mean as the greatest of n normal numbers:
in the mean by Blom's order statistics (1958), and at a quantile q of steps by the normal quantile of q^(1/n).

The trade-off: loads of real routers have longer tails than normal ones, and are alike from one micro-batch to the next.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from tangram.models.outlines.outline import Block, Cut, Group, Kept
from tangram.planner.space.grid import Array, Grid
from tangram.planner.space.setting import Setting

SURE = 0.99
"""Of layers and micro-batches in which memory is to suffice."""


def busiest(experts: int, g: Grid, setting: Setting, quantile: float | None = None) -> Array:
    """Of a block's rows that go to experts, what the busiest rank has, as a multiple of the mean: 1 to the ranks.

    `quantile`: so many have no more; None: in the mean.
    """
    ranks = g.expert
    if not setting.unlike or experts < 2 or not (ranks > 1).any():
        return np.ones(len(g))
    each = np.maximum(experts / ranks, 1.0)
    deviation = setting.unlike * np.sqrt(np.maximum(1 - each / experts, 0.0) * experts / (experts - 1) / each)
    return np.where(ranks > 1, np.clip(1 + greatest(ranks, quantile) * deviation, 1.0, ranks), 1.0)


def greatest(ranks: Array, quantile: float | None = None) -> Array:
    """Of so many normal numbers the greatest: in the mean, or what it is not above at a quantile; of one 0."""
    at = (ranks - 0.375) / (ranks + 0.25) if quantile is None else quantile ** (1 / ranks)
    several, places = np.unique(np.clip(at, 0.5, None), return_inverse=True)  # one rank is 0.5: the mean
    return np.array([NormalDist().inv_cdf(float(one)) for one in several])[places]


LOW = {"fp8": 1.0, "fp4": 0.5 + 1 / 16}
"""Bytes of an input of a product as products in few bits keep it."""


def block_activations(block: Block, hidden: int, g: Grid, setting: Setting) -> tuple[Array, Array]:
    """Bytes of a block that stay for the backward of a micro-batch, and what making it again needs beyond that."""
    g, hidden = g.of_rows(block.rows), block.hidden or hidden
    full, left = np.zeros(len(g)), np.zeros(len(g))
    for (cut, routed), of_rows in _summed(block, setting).items():
        rows = _rows(cut, block, g, setting, routed=routed)
        for group, nbytes in of_rows.items():
            kept = rows * nbytes
            full, left = full + kept, left + kept * _stays(group, g, routed=routed)
    scores = np.zeros(len(g))
    if not setting.framework.fused_attention:
        # Softmax's output is kept once: its backward and the product with the values take the same tensor. Dropout
        # keeps its mask and its own output beside it.
        each = 2 * setting.flow_bytes + 1.0 if setting.framework.dropout else setting.flow_bytes
        each += 4.0 if setting.framework.kernels == "eager" else 0.0  # its output in float32, before it is rounded
        scores = each * _scores(block, g)
    if setting.framework.dropout:
        masks = 2.0 * hidden * g.tokens / np.where(g.sequence_parallel > 0, g.tensor, 1.0)
        full, left = full + masks, left + masks
    full = full + scores
    left = left + scores * ((g.recompute & int(Group.SCORES | Group.ATTENTION)) == 0)
    if (g.ulysses > 1).any():
        more = _exchanged(block, g, setting)
        full, left = full + more, left + more * ((g.recompute & int(Group.ATTENTION)) == 0)
    if setting.base.stays:
        weights = _unpacked(block, g, setting)
        full, left = full + weights, left + weights
    blocks = (g.recompute & int(Group.BLOCK)) == int(Group.BLOCK)
    inputs = setting.row_bytes * hidden * g.tokens / np.where(g.sequence_parallel > 0, g.tensor, 1.0)
    mean = np.where(blocks, g.recomputed * inputs + (1 - g.recomputed) * full, left)
    return mean + _sent(block, hidden, g, setting), np.where(
        g.recompute > 0, np.maximum(full - np.where(blocks, inputs, left), 0.0), 0.0
    )


def _scores(block: Block, g: Grid) -> Array:
    """A rank's numbers of queries by keys."""
    found = np.zeros(len(g))
    for one in block.scores:
        heads = np.maximum(one.heads / g.tensor, 1.0)
        keys = g.sequence if one.causal else np.minimum(g.sequence, one.chunk or np.inf)  # images are samples
        found = found + g.micro * heads * g.sequence / g.context * keys
    return found


def _scores_gradients(block: Block, g: Grid, setting: Setting) -> Array:
    """Bytes while attention in single kernels goes backward: of a softmax in float32 the gradient of each share and of
    its score, less the 16 bits of it that the product with the values is done with; of Megatron's kernels, which write
    over it, that of each share."""
    framework = setting.framework
    if framework.fused_attention:
        return np.zeros(len(g))
    return (6.0 if framework.kernels == "eager" else setting.flow_bytes) * _scores(block, g)


def _unpacked(block: Block, g: Grid, setting: Setting) -> Array:
    """Bytes of a rank's frozen weights of a block as products take them."""
    found = np.zeros(len(g))
    for one in block.products:
        ranks = 1.0 if not one.cut else g.expert_tensor if one.experts else g.tensor
        experts = np.maximum(one.experts / g.expert, 1.0)
        found = found + one.frozen * setting.flow_bytes * experts * one.inputs * one.outputs / ranks
    return found


def _exchanged(block: Block, g: Grid, setting: Setting) -> Array:
    """Bytes that are kept beside a block's rows where ranks exchange heads for tokens.

    What attention gives is kept twice, by heads for its own backward and by tokens for the product after it; of
    key-value heads that are fewer than the ranks each rank keeps a whole one.
    """
    found = np.zeros(len(g))
    over = g.tensor * g.ulysses
    for one in block.scores:
        again = one.heads * one.v_dim / g.tensor
        copied = np.maximum(1.0 - one.kv_heads / over, 0.0) * (one.qk_dim + one.v_dim) * g.ulysses
        found = found + setting.flow_bytes * g.tokens * (again + copied)
    return np.where(g.ulysses > 1, found, 0.0)


def _sent(block: Block, hidden: int, g: Grid, setting: Setting) -> Array:
    """Bytes of rows as they came to their experts' ranks and back, where they are not sent again; the experts' own
    inputs, in order of the experts, are made of them once more."""
    saved = (g.expert > 1) & ((g.recompute & int(Group.ALTERNATE)) > 0)
    if not (setting.framework.keeps_exchanged and block.experts and saved.any()):
        return np.zeros(len(g))
    return np.where(saved, 2 * setting.flow_bytes * hidden * _rows("", block, g, setting, routed=True), 0.0)


def block_backward(block: Block, hidden: int, g: Grid, setting: Setting) -> Array:
    """Bytes of gradients at the widest place of a block's backward: of what an operator was given, while that is still
    kept, and of the block's own stream; of attention's scores where these are written."""
    g, hidden = g.of_rows(block.rows), block.hidden or hidden
    most: dict[tuple[Cut, bool], float] = {}
    for one in block.kept:
        key = _cut(one, setting), one.routed
        most[key] = max(most.get(key, 0.0), one.width * _number_bytes(one, setting))
    widest = np.zeros(len(g))
    one_by_one = np.maximum(block.experts / g.expert, 1.0) if setting.framework.loops_experts else 1.0
    for (cut, routed), nbytes in most.items():
        rows = _rows(cut, block, g, setting, routed=routed) / (one_by_one if routed else 1.0)
        widest = np.maximum(widest, rows * nbytes)
    return (
        widest
        + _others_keys(block, g, setting)
        + _scores_gradients(block, g, setting)
        + setting.row_bytes * hidden * g.tokens / np.where(g.sequence_parallel > 0, g.tensor, 1.0)
    )


def _others_keys(block: Block, g: Grid, setting: Setting) -> Array:
    """Bytes of the keys and values of all tokens, and of their gradients, where ranks gather them."""
    ring = g.context / g.ulysses
    if not (setting.framework.gathers_keys and (ring > 1).any()):
        return np.zeros(len(g))
    found = np.zeros(len(g))
    for one in block.scores:
        heads = np.maximum(one.kv_heads / (g.tensor * g.ulysses), 1.0)
        found = found + heads * (one.qk_dim + one.v_dim)
    return np.where(ring > 1, 2 * setting.flow_bytes * g.micro * g.sequence * found, 0.0)


def weights_of_shapes(block: Block, g: Grid) -> Array:
    """Numbers of a rank's weights of a block, each shape once, of experts one.

    Transformer Engine adds to the kept gradient inside the product and gives autograd an empty gradient in its stead,
    one for each shape, which stays (`get_dummy_wgrad`).
    """
    shapes = {(one.inputs, one.outputs, one.cut, one.experts > 0) for one in block.products if not one.frozen}
    found = np.zeros(len(g))
    for inputs, outputs, cut, routed in sorted(shapes):
        ranks = np.ones(len(g)) if not cut else g.expert_tensor if routed else g.tensor
        found = found + inputs * outputs / ranks
    return found


def _stays(group: Group, g: Grid, *, routed: bool) -> Array:
    """Which share of a row is not recomputed: all, nothing, or half where every second product is. Experts' products
    are one operator over all of them, which is none of those that recompute by operator keeps."""
    whole = int((group | Group.ALTERNATE) if routed else group & ~Group.ALTERNATE)
    half = (g.recompute & int(group & Group.ALTERNATE)) > 0
    return np.where((g.recompute & whole) > 0, 0.0, np.where(half, 0.5, 1.0))


def _summed(block: Block, setting: Setting) -> dict[tuple[Cut, bool], dict[Group, float]]:
    """Bytes of a token in all rows that the same ranks divide, by what is recomputed together."""
    found: dict[tuple[Cut, bool], dict[Group, float]] = {}
    for one in block.kept:
        if nbytes := one.width * _number_bytes(one, setting):
            groups = found.setdefault((_cut(one, setting), one.routed), {})
            groups[one.group] = groups.get(one.group, 0.0) + nbytes
    return found


def _cut(one: Kept, setting: Setting) -> Cut:
    """What ranks divide of a row: of tokens nothing where the framework keeps what it gathered."""
    return "" if one.cut == "tokens" and one.role == "input" and setting.framework.keeps_gathered else one.cut


def _rows(cut: Cut, block: Block, g: Grid, setting: Setting, *, routed: bool) -> Array:
    """How many tokens a rank has of a micro-batch."""
    rows = g.tokens
    if routed:
        rows = rows * setting.per_token(block) * g.expert_tensor / g.tensor * busiest(block.experts, g, setting, SURE)
    if cut == "tensor":
        return rows / (g.expert_tensor if routed else g.tensor)
    return rows / np.where(g.sequence_parallel > 0, g.tensor, 1.0) if cut == "tokens" else rows


def _flow_bytes(one: Kept, setting: Setting) -> float:
    """Of each number of a row as it is computed; kernels of attention bring what they take to 16 bits themselves."""
    attention = one.cut == "tensor" and bool(one.group & Group.ATTENTION) and setting.framework.fused_attention
    return setting.flow_bytes if attention else setting.row_bytes


def _number_bytes(one: Kept, setting: Setting) -> float:
    """Of each number of a row; 0 where the framework keeps none of it."""
    framework, flow = setting.framework, one.nbytes or _flow_bytes(one, setting)
    if one.role == "eager" and one.nbytes == setting.row_bytes:  # brought to what it is in already
        return 0.0
    if (one.role == "eager" and framework.kernels != "eager") or (
        one.role == "expert output" and not framework.keeps_expert_outputs
    ):
        return 0.0
    if one.role == "expert output":
        return framework.expert_output_bytes or flow
    low = LOW.get(setting.precision) if framework.keeps_low_inputs else None
    if low is None or one.role not in ("input", "both"):
        return flow
    return low if one.role == "input" else low + flow
