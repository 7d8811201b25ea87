"""Ways to train in less memory: kinds of optimisers, frozen bases in fewer bits, what is offloaded to the host.

Tables of bytes. What an optimiser keeps is said beside the master of a parameter; its update moves the gradient (read,
and once more for its norm), the master (read and written) and the parameter (written): 18 bytes a number with masters
in float32, and each state twice.

The trade-off: how well a kind trains is not known here. A plan compares what was allowed by time and memory alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np

from tangram.errors import UserError
from tangram.models.outlines.outline import Outline
from tangram.text import nearest_hint

UPDATE_BYTES = 18.0
"""Moved for each number that is updated, without states."""


@dataclass(frozen=True)
class Optimiser:
    """One kind."""

    name: str
    nbytes: float
    """Of its states of a number, beside the master."""
    source: str
    ends: float = 0.0
    """Of its states of a number of embedding and head beyond these."""
    own: tuple[float, float, float] | None = None
    """Bytes of a parameter, its gradient and its master; None: as the framework keeps them."""


OPTIMISERS = (
    Optimiser("adamw", 8.0, "two moments in float32"),
    Optimiser("adamw-bf16", 4.0, "two moments in bfloat16"),
    Optimiser("adamw-8bit", 2 + 2 * 4 / 256, "Dettmers et al. 2022: 8 bits, a float32 for each 256 of a moment"),
    Optimiser("adamw-4bit", 1 + 2 * 4 / 128, "Li, Chen, Zhu 2023, as torchao has it: a float32 for each 128"),
    Optimiser("lion", 4.0, "Chen et al. 2023: one moment in float32"),
    Optimiser("sgd-momentum", 4.0, "one moment in float32"),
    Optimiser("sgd", 0.0, "no states"),
    Optimiser("adamw-fp8", 2.0, "two moments in 8 bits, as Transformer Engine's precision-aware FusedAdam has them"),
    Optimiser("adamw-bf16-master", 4.0, "precision-aware: moments and master in 16 bits each", own=(2.0, 2.0, 2.0)),
    Optimiser("adamw-pure-bf16", 4.0, "a model in bfloat16: gradients and moments are, too", own=(2.0, 2.0, 0.0)),
    Optimiser("adamw-fp32", 8.0, "a model in float32 under autocast: gradients are, too", own=(4.0, 4.0, 0.0)),
    Optimiser("muon", 4.0, "Jordan et al. 2024: one momentum; embedding and head by AdamW", ends=4.0),
    Optimiser("adafactor", 0.0, "Shazeer, Stern 2018: factored second moments, a row and a column of each matrix"),
    Optimiser("adamw-8bit-pure-bf16", 2 + 2 * 4 / 256, "a model in bfloat16, moments in 8 bits", own=(2.0, 2.0, 0.0)),
)
"""By code: their place here."""


@dataclass(frozen=True)
class Base:
    """What frozen weights of matmuls are kept in."""

    name: str
    nbytes: float
    """Of a number."""
    unpacked: bool
    """Whether they are brought to 16 bits before each product."""
    source: str
    moved: float = 0.0
    """Bytes that single kernels move to bring a number to 16 bits; 0: what is read and written. Of bitsandbytes' nf4 by
    Lightning-AI/litgpt's tutorials/resource-tables.md: 6.2 to 7.9 ms for 1e9 numbers on an A100, at 1.3B to 13B; of
    AutoGPTQ as its kernels are written: shifted to 32 bits, narrowed, masked, less the zero point, times the scale."""
    ends: float = 0.0
    """Bytes of a frozen number of embedding and head; 0: as the framework has them."""
    stays: bool = False
    """Whether the 16 bits are kept for the backward, since autograd sees the product alone."""


GROUP = (2 + 0.5) / 128
"""Bytes of a number for the scale and the zero point of 128, as checkpoints in 4 bits are published."""
BASES = (
    Base("bf16", 2.0, unpacked=False, source="16 bits"),
    Base("int8", 1.0 + 4 / 4096, unpacked=True, source="Dettmers et al. 2022: a float32 for each row"),
    Base(
        "nf4",
        0.5 + (1 + 4 / 256) / 64,
        unpacked=True,
        source="Dettmers et al. 2023: double quantisation, 4.127 bits",
        moved=10.0,
    ),
    Base("gptq", 0.5 + GROUP, unpacked=True, source="Frantar et al. 2022, AutoGPTQ", moved=16.5, ends=2.0, stays=True),
    Base("gptq-int8", 1 + GROUP + 0.5 / 128, unpacked=True, source="the same", moved=23.0, ends=2.0, stays=True),
    Base("awq", 0.5 + GROUP, unpacked=True, source="Lin et al. 2023: one kernel unpacks, which keeps the 4 bits"),
)
FULL = BASES[0]


class Offload(IntFlag):
    """What waits in the host's memory."""

    NONE = 0
    OPTIMISER = 1
    """Masters and states, which the host updates."""
    PARAMETERS = 3
    """And parameters with their gradients, which are brought block by block."""
    ACTIVATIONS = 4
    """What the forward keeps for the backward."""


OFFLOADS: dict[str, Offload] = {
    "optimiser": Offload.OPTIMISER,
    "parameters": Offload.PARAMETERS,
    "activations": Offload.ACTIVATIONS,
}
_STATES = np.array([one.nbytes for one in OPTIMISERS])
_ENDS = np.array([one.ends for one in OPTIMISERS])
_OWN = np.array([one.own or (np.nan, np.nan, np.nan) for one in OPTIMISERS]).T


def states_of(codes: Any) -> Any:
    """Bytes of the states of a number, by the kinds' codes."""
    return _STATES[codes]


def ends_of(codes: Any) -> Any:
    """Bytes beyond them of the states of a number of embedding or head."""
    return _ENDS[codes]


def own_of(codes: Any, *framework: float) -> tuple[Any, Any, Any]:
    """Bytes of a parameter, its gradient and its master, where the kind says them; else the framework's three."""
    own = [np.where(np.isnan(_OWN[i][codes]), usual, _OWN[i][codes]) for i, usual in enumerate(framework)]
    return own[0], own[1], own[2]


def moved_of(codes: Any) -> Any:
    """Bytes that the update of a number moves."""
    return UPDATE_BYTES + 2 * _STATES[codes]


def away(bits: Any) -> tuple[Any, Any, Any]:
    """Whether masters and states, parameters with gradients, activations are offloaded to the host, by the bits of
    `Offload`."""
    weights = (bits & int(Offload.PARAMETERS)) == int(Offload.PARAMETERS)
    return (bits & int(Offload.OPTIMISER)) > 0, weights, (bits & int(Offload.ACTIVATIONS)) > 0


def base_of(name: str) -> Base:
    """By name. Raises UserError."""
    found = next((one for one in BASES if one.name == name), None)
    if found is None:
        known = [one.name for one in BASES]
        raise UserError(
            f'there is no base "{name}"{nearest_hint(name, known)}: frozen weights are kept in {", ".join(known)}'
        )
    return found


def kept_base(outline: Outline) -> Base:
    """What frozen weights are kept in as a model's configuration says: by its method, else 4 bits as nf4, more as int8;
    of a configuration that says nothing 16 bits."""
    if outline.kept is None or not outline.adapted:
        return FULL
    few, method = outline.kept.bits <= 4, outline.kept.method
    if method in ("gptq", "awq") and (few or method == "gptq"):
        return base_of(method if few else "gptq-int8")
    return base_of("nf4" if few else "int8")


def kept_words(outline: Outline, base: Base) -> tuple[str, ...]:
    """What is said of weights that a model's configuration has in fewer bits."""
    if outline.kept is None:
        return ()
    said = f"the configuration keeps weights in {outline.kept.bits} bits ({outline.kept.method})"
    if outline.adapted:
        return (f"{said}: planned with the base {base.name}",)
    return (f"{said}: planned as trained in full, in the precision asked for; with --lora they stay as they are",)


def optimisers_of(text: str) -> tuple[int, ...]:
    """Codes of kinds as typed, with commas between. Raises UserError."""
    known = {one.name: code for code, one in enumerate(OPTIMISERS)}
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        hint = nearest_hint(unknown[0], known)
        raise UserError(f'there is no optimiser "{unknown[0]}"{hint}: there are {", ".join(known)}')
    return tuple(sorted({known[name] for name in names}))


def offloads_of(text: str) -> tuple[int, ...]:
    """What may be offloaded to the host, of what is typed: nothing, each of them, and activations beside the others.

    Raises UserError.
    """
    names = [name for name, _ in _offloads(text)]
    states = {0, *(int(OFFLOADS[name]) for name in names if name != "activations")}
    flows = {0, *(int(OFFLOADS[name]) for name in names if name == "activations")}
    return tuple(sorted(a | b for a in states for b in flows))


def away_share_of(text: str) -> float:
    """Which share of the optimiser's states is offloaded where they are, as in "optimiser:0.5". Raises UserError."""
    return next((share for name, share in _offloads(text) if name == "optimiser"), 1.0)


def _offloads(text: str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for typed in filter(None, (one.strip() for one in text.split(","))):
        name, colon, part = typed.partition(":")
        if name not in OFFLOADS:
            raise UserError(
                f'"{name}" is not offloaded{nearest_hint(name, OFFLOADS)}: what may be is {", ".join(OFFLOADS)}'
            )
        share = float(part) if re.fullmatch(r"\d*\.?\d+", part) else 0.0
        if colon and (name != "optimiser" or not 0 < share <= 1):
            raise UserError(f'"{typed}" is not offloaded: of the optimiser alone there is a share, as "optimiser:0.5"')
        found.append((name, share if colon else 1.0))
    return found


def offload_words(bits: int) -> str:
    """In words; "" for nothing."""
    states = {0: "", 1: "optimiser", 3: "parameters and optimiser"}[bits & 3]
    flows = "activations" if bits & int(Offload.ACTIVATIONS) else ""
    return " and ".join(word for word in (states, flows) if word).replace(" and optimiser and", ", optimiser and")
