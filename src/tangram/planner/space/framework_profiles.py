"""What of memory and time depends on the framework that runs a plan: `frameworks.toml`, one entry a framework and era.

These are facts about programs (which kernels are fused, in what type gradients are kept, what overlaps), not about
models or machines; each has its reason beside it in the table.

Ways to make a loss of a head's logits, and the bytes of each logit while that works.

eager           transformers' and torch's own: 16 bits, float32 of which the logarithms of shares are kept, and the
                gradient of both
eager-copies    the same by code that copies once more in float32: shifted by one token, less its maximum
compiled        one kernel reads the 16 bits, and float32 becomes the gradient in place
fused           one kernel for loss and gradient, which is written over the logits (FlashAttention, Apex)
chunked         head and loss of an eighth of the tokens at a time, or of as many as a framework takes, recomputed in
                the backward: the eager loss of that part (fused with the head's product, as Liger's kernels are unless
                they are asked not to be, and as Cut Cross-Entropy is, it needs no more)
parallel        Megatron's over TP ranks that divide the vocabulary: 16 bits, and float32 that becomes the gradient
parallel-fused  torch's compiled one of Megatron (`--cross-entropy-loss-fusion`), which keeps both
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from tangram.errors import UserError
from tangram.text import nearest_hint, packaged

LOSSES: Mapping[str, float] = {
    "eager": 14.0,
    "eager-copies": 16.0,
    "compiled": 6.0,
    "fused": 4.0,
    "chunked": 14.0 / 8,
    "parallel": 6.0,
    "parallel-fused": 10.0,
}
"""Bytes of each logit at the peak."""
BESIDE_REFERENCE: Mapping[str, float] = {"eager": 20.0, "eager-copies": 20.0}
"""The same of preferences where the policy is run before its reference (LLaMA-Factory, torchtune, TRL until 2025): the
policy's logits in float32 and the logarithms of shares are there while the reference makes its own, and log_softmax
copies what it is given: of two rows or more without their last token no one piece. A test counts it."""


CALLED: Mapping[str, str] = {"nll": "eager", **dict.fromkeys(("chunked_nll", "liger", "cce"), "chunked")}
"""What trainers call them."""


def loss_of(name: str) -> str:
    """The name itself, or what is called so elsewhere. Raises UserError for one that is none, with the nearest."""
    if (found := CALLED.get(name, name)) not in LOSSES:
        raise UserError(f'there is no loss "{name}"{nearest_hint(name, LOSSES)}: there are {", ".join(LOSSES)}')
    return found


@dataclass(frozen=True)
class Framework:
    """One entry of the table; what each key means is said there."""

    name: str
    names: tuple[str, ...]
    since: str
    fused_attention: bool
    attention_kernel: str
    fused_streams: bool
    kernels: str
    launch: float
    module_seconds: float
    router_seconds: float
    step_seconds: float
    document_kernels: tuple[float, float]
    rotates_at_once: tuple[str, ...]
    captures_blocks: bool
    hooks: float
    loops_experts: bool
    overlap_reduce: float
    overlap_gather: float
    broadcasts: int
    overlap_tensor: float
    overlap_expert: float
    overlap_expert_blocks: float
    gradient_bytes: float
    reduce_bytes: float
    optimiser_bytes: float
    optimiser: str
    parameter_bytes: float
    gathered_bytes: float
    frozen_end_bytes: float
    divides_gradients: bool
    keeps_low_weights: bool
    sequence_parallel: bool
    keeps_gathered: bool
    gathers_keys: bool
    fresh_gradients: bool
    keeps_low_inputs: bool
    cast_bytes: float
    keeps_expert_outputs: bool
    expert_output_bytes: float
    keeps_exchanged: bool
    runs_model_code: bool
    dropout: bool
    loss: str
    loss_over_ranks: str
    loss_of_pairs: str
    chunk_tokens: float
    reference_after: bool
    scratch_bytes: float
    step_bytes: float
    step_group: float
    workspace: float
    reserve: float
    context: float
    communicators: float
    selective: str
    schedules: tuple[str, ...]

    @property
    def compiled(self) -> Framework:
        """With blocks and loss that a compiler fuses (`torch.compile`), as far as they are not fused anyway."""
        loss = "compiled" if self.loss.startswith("eager") else self.loss
        return replace(self, fused_streams=True, kernels="fused", loss=loss)


@cache
def frameworks() -> tuple[Framework, ...]:
    """All entries, the default first."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(packaged("tangram.planner.space", "frameworks.toml"))
    usual = {"since": "", **tables["default"]}
    known = {one.name for one in fields(Framework)} - {"name"} | {"like"}
    found: list[Framework] = []
    for name, table in tables.items():
        if unknown := sorted(set(table) - known):
            raise UserError(f"frameworks.toml: {name} has no key {unknown[0]!r}")
        like = tables[table.pop("like")] if "like" in table else {}
        values: dict[str, Any] = {**usual, **like, **table, "names": tuple(table.get("names", (name,)))}
        values |= {key: tuple(values[key]) for key in ("schedules", "document_kernels", "rotates_at_once")}
        for loss in filter(None, (values["loss"], values["loss_over_ranks"], values["loss_of_pairs"])):
            loss_of(loss)
        found.append(Framework(name, **values))
    return tuple(found)


def _begins(said: str, start: str) -> bool:
    """With whole words; only nothing begins with nothing."""
    rest = said.removeprefix(start)
    return said == start or (bool(start) and rest != said and not (start[-1].isalnum() and rest[:1].isalnum()))


def framework(name: str, date: str = "") -> Framework:
    """The entry of a name as people write it, and of a date ("2023-06", the newest where it is empty).

    Raises UserError where no entry has the name; an empty name has the default.
    """
    said = name.strip().lower()
    if not date and said in {one.name for one in frameworks()}:
        return next(one for one in frameworks() if one.name == said)
    begins = [
        (len(start), one.since, one)
        for one in frameworks()
        for start in one.names
        if _begins(said, start) and not (date and one.since > date)
    ]
    if not begins:
        hint = nearest_hint(said, (start for one in frameworks() for start in one.names))
        raise UserError(
            f"there is no framework {name!r}{hint}: there are {', '.join(one.name for one in frameworks())}"
        )
    return max(begins, key=lambda one: one[:2])[2]
