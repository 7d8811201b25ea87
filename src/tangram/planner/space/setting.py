"""What a grid of configurations has in common: the device, the framework, the type that is computed in, the nodes.

Samples that are packed of documents: what attention costs where no token sees another document's.

Lengths are taken as log-normal with a mean and a 99th percentile, cut at the length of a sample. A query sees on the
mean half of E[L^2] / E[L] keys, the length of the document of a token that is drawn. Ranks have documents of their own,
so the sums of L^2 over a step differ, and the others wait for the rank of the longest ones: as far above the mean as
the greatest of so many normal numbers (`planner.cost.kept_activations`), of a deviation that falls with the documents
of a rank's step.

Documents stay whole, so samples are not full: the share is that of packing by best fit, from the longest down.

The trade-off: packers that cut documents fill all; packing by work, which evens the sums, is not known here, and fused
kernels are taken to skip what is between documents; attention in several kernels does not, and costs what it did.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError
from tangram.models.outlines.outline import Block, Outline
from tangram.planner.space.framework_profiles import BESIDE_REFERENCE, LOSSES, Framework
from tangram.planner.space.grid import Grid
from tangram.planner.space.optimisers_and_offload import FULL, Base
from tangram.text import nearest_hint

TAIL = NormalDist().inv_cdf(0.99)
MOST = math.exp(TAIL**2 / 2)
"""By which a 99th percentile of a log-normal length is at most above the mean."""


@dataclass(frozen=True)
class Documents:
    """Lengths in tokens."""

    mean: float
    tail: float
    """The 99th percentile."""
    sequence: int
    """Of a sample, which none is longer than."""
    model: str = ""
    """Which model they are for."""

    @cached_property
    def lengths(self) -> NDArray[Any]:
        """Ten thousand quantiles."""
        spread = TAIL - math.sqrt(max(TAIL**2 - 2 * math.log(self.tail / self.mean), 0.0))
        normal = NormalDist()
        at = np.array([normal.inv_cdf((i + 0.5) / 10_000) for i in range(10_000)])
        return np.clip(self.mean * np.exp(spread * at - spread**2 / 2), 1.0, self.sequence)

    @property
    def of_a_token(self) -> int:
        """Mean length of the documents of tokens."""
        return max(round(float((self.lengths**2).mean() / self.lengths.mean())), 1)

    @property
    def deviation(self) -> float:
        """Of the squares of lengths, over their mean."""
        squares = self.lengths**2
        return float(squares.std() / squares.mean())

    @cached_property
    def full(self) -> float:
        """Share of a sample that its documents fill: packed from the longest down, each where least is left."""
        lefts: list[float] = []
        lengths: list[float] = self.lengths[::-10].tolist()
        for length in lengths:
            at = bisect_left(lefts, length)
            insort(lefts, (lefts.pop(at) if at < len(lefts) else self.sequence) - length)
        return sum(lengths) / (len(lefts) * self.sequence - lefts[-1])  # of the emptiest another's would be

    @property
    def words(self) -> str:
        """What is said of them."""
        return (
            f"samples are packed of documents of {self.lengths.mean():.0f} tokens in the mean, that of a token of "
            f"{self.of_a_token}; with fused attention nothing is spent between them; samples are {self.full:.0%} full"
        )


def documents_of(typed: str, sequence: int, model: str = "") -> Documents | None:
    """As typed: "600" (all alike), or "600,4k" with the 99th percentile; None of "". Raises UserError."""
    if not typed:
        return None
    units = {"k": 1024, "m": 1024**2}
    try:
        mean, *more = (float(one.rstrip("kKmM")) * units.get(one[-1:].lower(), 1) for one in typed.split(","))
        (tail,) = more or [mean]
    except ValueError:
        mean = tail = math.nan
    if not 1 <= mean <= tail < math.inf:
        raise UserError(f'"{typed}" are no lengths of documents: write the mean and the 99th percentile, as 600,4k')
    if tail > MOST * mean:
        raise UserError(
            f"--documents {typed}: a 99th percentile of more than {MOST:.3g} times the mean is of no log-normal length"
        )
    return Documents(mean, tail, sequence, model)


def packed(outline: Outline, documents: Documents | None) -> Outline:
    """With attention that sees nothing of other documents; of images nothing changes."""
    if documents is None:
        return outline
    piece = documents.of_a_token
    runs = tuple((_within(block, piece), count) for block, count in outline.runs)
    return replace(outline, runs=runs)


def _within(block: Block, piece: int) -> Block:
    scores = (replace(one, chunk=min(one.chunk or piece, piece)) if one.causal else one for one in block.scores)
    return replace(block, scores=tuple(scores))


@dataclass(frozen=True)
class Beside:
    """A model that a step asks beside the one that it trains, forward only: as this began (DPO, KTO), or a teacher."""

    forwards: float
    """How many forwards of the trained model its own are, of each micro-batch."""
    numbers: float
    """Its own, as a multiple of those that are trained, or of a teacher of all of the model's; DP ranks divide them
    where they divide parameters."""
    teacher: int = 0
    """A teacher's hidden size: its logits are kept for the loss, and its numbers in 16 bits; 0: as parameters are."""


Precision = Literal["bf16", "fp16", "fp8", "fp4", "fp32"]


def precisions_of(typed: str) -> tuple[Precision, ...]:
    """As typed, with commas between. Raises UserError for one that is none, with the nearest."""
    known: dict[str, Precision] = {one: one for one in get_args(Precision)}
    known |= {"mxfp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}
    names = tuple(dict.fromkeys(one.strip() for one in typed.lower().split(",")))
    if unknown := [name for name in names if name not in known]:
        hint = nearest_hint(unknown[0], known)
        raise UserError(f'there is no precision "{unknown[0]}"{hint}: give one of {", ".join(known)}, or several')
    return tuple(dict.fromkeys(known[name] for name in names))


@dataclass(frozen=True)
class Host:
    """What each device has of its host."""

    rate: float = 25e9
    """Bytes per second to a device, and as many from it; if nothing is known what copies reach of PCIe 4.0 x16."""
    bandwidth: float = 40e9
    """Bytes per second that its part of the host's processors moves through memory; if nothing is known a tenth of
    two processors of eight channels of DDR5."""
    memory_bytes: float = math.inf


@dataclass(frozen=True)
class Setting:
    """Of one evaluation of the models of memory and time."""

    device: Any
    """`hardware.catalogue.devices.Figures`, or None where only memory is asked for."""
    framework: Framework
    precision: Precision = "bf16"
    """What matmuls are computed in; what flows between them is in 16 bits below fp32."""
    node: int = 8
    """Devices that meet at the fast link, which may be those of several machines."""
    nic: float | None = None
    """Bytes per second that a device receives from other nodes; None: as the catalogue says."""
    islands: tuple[tuple[int, float], ...] = ()
    """Beyond the nodes' network, the smallest first: so many devices meet before a farther one, of which each receives
    so many bytes per second over that one."""
    graphs: bool = False
    """Whether kernels are started from captured graphs, so that the host starts none of them."""

    base: Base = FULL
    """What frozen weights are kept in."""
    host: Host = Host()
    unlike: float = 0.0
    """How unlike experts' loads are: their standard deviation over their mean."""
    documents: Documents | None = None
    """Of packed samples, whose outline is `document_lengths.packed`; None: a sample is one."""
    save_every: int = 0
    """Steps between two checkpoints; 0: none."""
    loss: str = ""
    """How it is made of the logits (`planner.space.framework_profiles`); "": as the framework does."""
    away_share: float = 1.0
    """Of the optimiser's states that are offloaded to the host, where they are."""
    in_backward: bool = False
    """Whether parameters are updated while the backward goes on, and their gradients freed at once."""
    beside: Beside | None = None
    rows: int = 1
    """Of a sample: of a pair of answers two."""
    filled: float = 1.0
    """Of a row's tokens those that it has in the mean of a step's, of which time is."""

    def __post_init__(self) -> None:
        if self.node < 1:
            raise ValueError(f"{self.node} devices at a fast link; at least 1, the device itself")

    def met(self, g: Grid) -> Grid:
        """With rows as long as those of a step are in the mean, of which time is."""
        return g if self.filled == 1.0 else replace(g, sequence=g.sequence * self.filled)

    def per_token(self, block: Block) -> int:
        """Experts that compute each of a block's tokens."""
        return block.experts if block.all_rows and self.framework.runs_model_code else block.per_token

    @property
    def overlap_expert(self) -> float:
        """Which share of tokens' ways to experts runs beside computation."""
        return self.framework.overlap_expert_blocks if self.in_blocks else self.framework.overlap_expert

    @property
    def in_blocks(self) -> bool:
        """Whether matmuls are in few bits with a scale for each block, as devices that compute in 4 bits have them."""
        return self.precision in ("fp8", "fp4") and self.device.runs_in("fp4") == "fp4"

    @property
    def captured(self) -> bool:
        """Whether kernels are started from captured graphs, as asked for or as the framework's recipes have it."""
        return self.graphs or (self.framework.captures_blocks and self.in_blocks)

    @property
    def other_forwards(self) -> float:
        """Forwards of a micro-batch beside those of training, and of what is recomputed."""
        return self.beside.forwards if self.beside else 0.0

    @property
    def other_logits(self) -> float:
        """How often logits are made beside those of training: by a teacher of any size once."""
        return min(self.other_forwards, 1.0 if self.beside and self.beside.teacher else math.inf)

    def logit_bytes(self, tokens: Any, *, over_ranks: bool) -> Any:
        """Of each logit of so many tokens while a loss is made; `over_ranks`: where TP ranks divide the vocabulary."""
        more = self.rows > 1 or self.beside is not None
        usual = (self.framework.loss_of_pairs if more else "") or self.framework.loss
        usual = (self.framework.loss_over_ranks if over_ranks else "") or usual
        loss = self.loss or usual
        behind = self.beside is not None and not self.beside.teacher and self.framework.reference_after
        if loss == "chunked" and self.framework.chunk_tokens:
            return LOSSES["eager"] * np.minimum(self.framework.chunk_tokens / tokens, 1.0)
        return max(LOSSES[loss], BESIDE_REFERENCE.get(loss, 0.0)) if behind else LOSSES[loss]

    @property
    def base_bytes(self) -> float:
        """Of a frozen number."""
        return max(self.base.nbytes, self.flow_bytes) if self.base is FULL else self.base.nbytes

    @property
    def frozen_end_bytes(self) -> float:
        """Of a frozen number of embedding and head, which nothing brings to fewer bits."""
        ends = self.base.ends or self.framework.frozen_end_bytes
        return self.base_bytes if self.base is FULL else max(ends, self.flow_bytes)

    @property
    def flow_bytes(self) -> float:
        """Of a number that products take."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def row_bytes(self) -> float:
        """Of a number of activations: in float32 beside frozen weights in few bits where embedding and norms are in it,
        since bitsandbytes' products give what they were given (`Linear4bit.forward`: `.to(inp_dtype)`)."""
        return self.flow_bytes if self.base is FULL else max(self.flow_bytes, self.frozen_end_bytes)
