"""Plans over axes that do not divide heads, inner sizes or the vocabulary: what ranks train, save and go on from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tangram.schema.plan import Plan
from tangram.training.mesh import local_parts
from tangram.training.run.launch import Rank
from tests.training.oracle.cases import Case, tables
from tests.training.oracle.ranks import Leg, run_leg, swapped
from tests.training.oracle.trace import Trace

STEPS = 5
CUT = 2
"""A run is saved after so many steps, and goes on at other layouts."""
_COMMON: Mapping[str, Any] = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}
LLAMA: Mapping[str, Any] = {
    "model_type": "llama", **_COMMON, "hidden_size": 24, "intermediate_size": 45, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 64,
    "attention_bias": True,
}  # fmt: skip
"""Three heads of keys and values, an odd inner size, an odd vocabulary."""
GPT2: Mapping[str, Any] = {
    "model_type": "gpt2", **_COMMON, "n_positions": 64, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_inner": 45,
}  # fmt: skip
"""With its dropout of 0.1, its head tied to its embedding and queries, keys and values in one product."""
MODELS: Mapping[str, Mapping[str, Any]] = {"llama": LLAMA, "gpt2": GPT2}


def llama(data: str = "") -> dict[str, str]:
    """Layouts of the parameters, cut further over a data axis or not."""
    dp = f"/{data}" if data else ""
    return {
        "*.q_proj.weight": f"(groups/tp 16){dp} h",
        "*.q_proj.bias": f"(groups/tp 16){dp}",
        "*.[kv]_proj.weight": f"(heads/tp 8){dp} h",
        "*.[kv]_proj.bias": f"(heads/tp 8){dp}",
        "*.o_proj.weight": f"h{dp} (groups/tp 16)",
        "*.gate_proj.weight": f"f/tp{dp} h",
        "*.up_proj.weight": f"f/tp{dp} h",
        "*.down_proj.weight": f"h{dp} f/tp",
        "model.embed_tokens.weight": f"v/tp{dp} h",
        "lm_head.weight": f"v/tp{dp} h",
        "*": f"_{dp} ...",
    }


GPT2_LAYOUTS = {
    "transformer.wte.weight": "v/tp h",
    "*.c_attn.weight": "h (3 heads/tp 8)",
    "*.c_attn.bias": "(3 heads/tp 8)",
    "*.attn.c_proj.weight": "(heads/tp 8) h",
    "*.c_fc.weight": "h f/tp",
    "*.c_fc.bias": "f/tp",
    "*.mlp.c_proj.weight": "f/tp h",
    "*": "...",
}


@dataclass(frozen=True)
class Work:
    """What one start of ranks does."""

    cases: Mapping[str, Case]
    legs: tuple[Case, ...]
    """One run that goes through these, from each one's checkpoint to the next."""
    wrong: Mapping[str, tuple[str, Case]]
    """Mistakes, and what is run with them."""
    folder: Path


@dataclass(frozen=True)
class Done:
    """What came of it on one rank."""

    traces: Mapping[str, Trace]
    legs: tuple[Trace, ...]
    wrong: Mapping[str, Trace]


def run_all(rank: Rank, work: Work) -> Done:
    """The task of the ranks."""
    traces = {name: _run(rank, case, work.folder / name) for name, case in work.cases.items()}
    legs: list[Trace] = []
    start: Path | None = None
    for place, case in enumerate(work.legs):
        folder = work.folder / f"leg-{place}"
        last = CUT * (place + 1)
        saves = last if place else last - 1  # and goes on at its own layout first
        legs.append(run_leg(rank, Leg(replace(case, until=last), start, saves, last), folder))
        start = folder / f"step-{last:08}"
    wrong: dict[str, Trace] = {}
    for name, (mistake, case) in work.wrong.items():
        with MISTAKES[mistake]():
            wrong[name] = _run(rank, case, work.folder / name)
    return Done(traces, tuple(legs), wrong)


def _run(rank: Rank, case: Case, folder: Path) -> Trace:
    until = case.until
    return run_leg(rank, Leg(case, None, case.resume_at or until, until), folder)


# ------------------------------------------------------------ mistakes


@contextlib.contextmanager
def a_row_off() -> Iterator[None]:
    """The values that the last rank has of a part begin a row too early."""
    right = local_parts.PlainPart.of

    def shifted(self: local_parts.PlainPart, full: Any) -> Any:
        last = any(at == self.mesh.axes[axis][0] - 1 for axis, at in self.coords.items())
        return right(self, full.roll(1, next(iter(self.states.values())).dim) if last else full)

    with swapped(local_parts.PlainPart, "of", shifted):
        yield


@contextlib.contextmanager
def counted_once() -> Iterator[None]:
    """The norm takes a plain part for all of the gradient."""
    with swapped(local_parts.PlainPart, "count", 1):
        yield


MISTAKES = {"a row off": a_row_off, "counted once": counted_once}


# ------------------------------------------------------------ cases


def write_models(folder: Path) -> None:
    """Their configurations."""
    for name, fields in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(dict(fields)))


def case(text: Path, kind: str, mesh: str, parameters: Mapping[str, str], **changes: Any) -> Case:
    """A model on a mesh of the axes dp and tp."""
    model = {"preset": None, "path": str(text.parent / f"{kind}.json"), "change": {}}
    data = {"global_batch": 7, "micro_batch": 2}
    base = tables(text, model=model, data=data, optimiser={"eps": 1e-3, **changes.pop("optimiser", {})}, **changes)
    axes = {"data": ["dp"] if "dp" in mesh else [], "tensor": ["tp"] if "tp" in mesh else []}
    plan = Plan.model_validate({**base, "mesh": mesh, "axes": axes, "layouts": {"parameters": dict(parameters)}})
    return Case(f"{kind} over {mesh}", plan, until=STEPS, ranks=plan.ranks)
