"""What is compared with one process: models, strategies and settings, by name."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.planner.plan import Plan
from tests.training.small import SMALL_MODEL, small_tables
from tests.training.strategies import COPIES, FSDP, MARKS, STRATEGIES, TWO_STAGES, Strategy, derived

STEPS = 130
"""Of every schedule; runs are compared over a part of it."""
LONG, SHORT, FEW = 100, 24, 5
SEQUENCE = 32
BATCH = 10
"""Samples of a step: four ranks get 2, 3, 2 and 3 of them."""


@dataclass(frozen=True)
class Case:
    """One training run that has to be the same on many ranks as in one process."""

    name: str
    plan: Plan
    until: int
    """The step after which it ends."""
    ranks: int = 4
    own: str = ""
    """"meta" or "values": the module of `own.py`, made so; else the plan's model."""
    shares: tuple[int, ...] = ()
    """Rows of the global batch for each data rank, where they are dealt out by hand."""
    resume_at: int = 0
    """After this step the state is saved, and loaded into a new model and optimiser."""


def tables(text: Path, **changes: Any) -> dict[str, Any]:
    """The tables of the job that every case is made of.

    The learning rate is set by how fast rounding grows, measured on two runs in one process that differ by nothing but
    the order of sums (the batch at once, or three rows at a time). At step 20 the gradient that is furthest apart is so
    by, relative,

        lr 1e-2   base 3e-6   tied 6e-6   small heads 3e-4
        lr 3e-3   base 2e-6   tied 3e-6   small heads 2e-5 (3e-6 with eps = 1e-3)

    One step's sums differ by 2e-7 at most. The rest is the weights' drift: after 20 steps they are 2e-7 apart, and that
    alone moves the gradients of the tied model by 5e-6 (those of copies over four ranks by 1.02e-5 in one norm). So it
    trains at 1e-3. For the small heads it is AdamW that blows up gradients of nearly zero; they take eps = 1e-3. Weight
    decay is high, so that a wrong one shows at once.
    """
    changes["model"] = {"change": SMALL_MODEL, **changes.get("model", {})}
    changes["data"] = {"global_batch": BATCH, "micro_batch": 5, "sequence": SEQUENCE, **changes.get("data", {})}
    optimiser = {"lr": 3e-3, "warmup_steps": 2, "weight_decay": 0.5, "clip_norm": math.inf}
    changes["optimiser"] = {**optimiser, **changes.get("optimiser", {})}
    changes["run"] = {"steps": STEPS, **changes.get("run", {})}
    return small_tables(text, **changes)


OTHER_STRATEGIES: Mapping[str, tuple[int, Strategy]] = {
    "one rank": (1, Strategy("dp=1", ("dp",), (), {"*": "_/dp ..."})),
    "fsdp over three": (3, Strategy("dp=3", ("dp",), (), {"*": "_/dp ..."})),
    "copies over three": (3, Strategy("dp=3", ("dp",), (), {"*": "..."})),
    "fsdp over two": (2, Strategy("dp=2", ("dp",), (), {"*": "_/dp ..."})),
    "tensor over two": (2, Strategy("one=1 tp=2", ("one",), ("tp",), STRATEGIES["tensor"].parameters)),
    "derived over two": (2, Strategy("one=1 tp=2", ("one",), ("tp",), derived(""), MARKS)),
    "derived inside fsdp": (4, Strategy("dp=2 tp=2", ("dp",), ("tp",), derived("dp"), MARKS)),
}
"""On other numbers of ranks; three divides nothing."""
STAGED: Mapping[str, tuple[int, Strategy]] = {
    "stages": (2, Strategy("pp=2 one=1", ("one",), (), {"*": "_/one ..."}, stages=TWO_STAGES)),
    "stages of fsdp": (4, Strategy("pp=2 dp=2", ("dp",), (), FSDP, stages=TWO_STAGES)),
    "stages inside copies": (4, Strategy("dp=2 pp=2", ("dp",), (), COPIES, stages=TWO_STAGES, schedule="GPipe")),
    "stages of fsdp and derived": (
        8,
        Strategy("pp=2 dp=2 tp=2", ("dp",), ("tp",), derived("dp"), MARKS, stages=TWO_STAGES),
    ),
}
"""Pipelines, of micro-batches of two rows; the last of them is half empty on some ranks."""
STAGED_QUICK = ("stages of fsdp",)
OTHER_QUICK = ("one rank", "fsdp over three", "tensor over two", "derived inside fsdp")

OWN_LAYOUTS = {
    "parameters": {
        "blocks.*.up.weight": "f/tp/dp h",
        "blocks.*.up.bias": "f/tp/dp",
        "blocks.*.down.weight": "h/dp f/tp",
        "*": "_/dp ...",
    },
    "activations": {"blocks.*.up": "b s h -> b s f/tp", "blocks.*.down": "b s f/tp -> b s h"},
}

SMALL_HEADS = {**SMALL_MODEL, "head_dim": 2, "hidden_size": 8}
"""Norms of two elements: of four ranks two hold nothing of them."""


LLAMA = "llama.json"


def write_models(folder: Path) -> None:
    """The configuration of a model with a bias in every linear layer."""
    fields = {**SMALL_MODEL, "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "max_position_embeddings": 64}
    everywhere = {"attention_bias": True, "mlp_bias": True}
    (folder / LLAMA).write_text(json.dumps({"model_type": "llama", **everywhere, **fields}))


def planned(base: Mapping[str, Any], strategy: Strategy) -> Plan:
    """The plan of a strategy on the tables of a job."""
    return Plan.model_validate({**base, **strategy.tables})


def cases(text: Path, *, slow: bool = False) -> dict[str, Case]:
    """Every case by name, on a text that `small.write_text` writes, with the models of `write_models` beside it.

    The quick ones are each model and setting under the strategies where it could go wrong; `slow`: all of them, longer.
    """
    found: dict[str, Case] = {}

    def add(name: str, strategies: Iterable[str], base: Mapping[str, Any], until: int = FEW, **more: Any) -> None:
        for strategy in strategies:
            key = f"{name}: {strategy}" if name else strategy
            ranks, lies = {**OTHER_STRATEGIES, **STAGED}.get(strategy) or (4, STRATEGIES[strategy])
            found[key] = Case(key, planned(base, lies), until=max(until, SHORT) if slow else until, ranks=ranks, **more)

    def either(*quick: str) -> Iterable[str]:
        return STRATEGIES if slow else quick

    usual = tables(text)
    for strategy in (*STRATEGIES, *(OTHER_STRATEGIES if slow else OTHER_QUICK)):
        add("", [strategy], usual, LONG if slow or strategy == "fsdp" else SHORT)

    _add_staged(text, add, slow=slow)
    tied = tables(text, model={"change": {**SMALL_MODEL, "tie_word_embeddings": True}}, optimiser={"lr": 1e-3})
    add("tied", either("fsdp"), tied)
    add("tied", ["tensor inside fsdp"], tied, SHORT)
    # The bias of the keys has a gradient of nearly zero, for attention hardly notices what is added to all keys alike.
    llama = {"preset": None, "path": str(text.parent / LLAMA), "change": {}}
    biases = tables(text, model=llama, optimiser={"eps": 1e-3})
    add("biases", either("tensor inside fsdp"), biases, SHORT)
    freeze = ["*.embed_tokens.weight", "*.layers.0.*", "*.layers.1.self_attn.q_norm.*"]
    add("frozen", either("fsdp", "fsdp inside tensor"), tables(text, model={"freeze": freeze}))
    add("clipped", either("hsdp", "tensor inside fsdp"), tables(text, optimiser={"clip_norm": 0.05}))
    add("recomputed", either("fsdp"), tables(text, run={"recompute": ["model.layers.*"]}))
    part = tables(text, run={"recompute": ["*.mlp", "*.layers.1.self_attn"]})
    add("recomputed in part", either("tensor inside fsdp"), part)
    # Over four ranks: one row, two, two and two, one at a time; so one rank has an empty micro-batch.
    one_by_one = tables(text, data={"micro_batch": 1, "global_batch": 7})
    add("one by one", either("fsdp"), one_by_one)
    add("one by one", ["tensor inside fsdp"], one_by_one, 2)
    # Held-out loss and checkpoints in between change nothing.
    between = tables(
        text,
        optimiser={"warmup_steps": 10},  # so that the rate differs much from step to step
        run={"evaluate_every": 2},
        checkpoint={"every_steps": 2, "keep": 1000},
    )
    add("resumed", either("fsdp", "tensor inside fsdp"), between, FEW, resume_at=3)
    add("resumed", ["derived inside fsdp"], between, FEW, resume_at=3)
    # Rounding is 2**16 times coarser here, and AdamW must not blow up that of gradients of nearly zero.
    low = tables(text, precision={"compute": "bfloat16"}, optimiser={"eps": 1e-3})
    add("bfloat16", either("fsdp", "tensor inside fsdp"), low)
    if slow:
        compiled = tables(text, run={"compile": True, "recompute": ["model.layers.0"]})
        add("compiled", ["derived inside fsdp"], compiled)
        add("recomputed in part", ["derived inside fsdp"], part)
        add("bfloat16", ["derived inside fsdp"], low)
        add("biases", ["derived inside fsdp"], biases)
        add("tied", ["derived inside fsdp"], tied)
    # One rank has no row at all, and therefore no counted token; another has half of the batch or more.
    for strategy, shares in HANDS.items():
        add("by hand", [strategy], usual, shares=shares)
    small = tables(text, model={"change": SMALL_HEADS}, optimiser={"eps": 1e-3})
    add("small heads", ("fsdp", "copies", "hsdp") if slow else ("fsdp",), small)
    # Masks are drawn for the samples of a micro-batch, so they are those of one process, but under tensor parallelism.
    dropout = tables(
        text,
        model={"change": {**SMALL_MODEL, "attention_dropout": 0.2}},
        data={"global_batch": 8, "micro_batch": 1},
    )
    add("dropout", ("fsdp", "copies", "hsdp") if slow else ("fsdp",), dropout)

    own = {**tables(text), "model": {}}
    for kind in ("meta", "values"):
        add(f"own module, {kind}", ("fsdp",), own, own=kind)
    mesh = {**STRATEGIES["tensor inside fsdp"].tables, "layouts": OWN_LAYOUTS}
    key = "own module, values: tensor inside fsdp"
    found[key] = Case(key, Plan.model_validate({**own, **mesh}), until=SHORT if slow else FEW, own="values")
    return found


def _add_staged(text: Path, add: Callable[..., None], *, slow: bool) -> None:
    for strategy in STAGED if slow else STAGED_QUICK:
        add("", [strategy], tables(text, data={"micro_batch": 2}), SHORT)
    clipped = tables(text, data={"micro_batch": 2}, optimiser={"clip_norm": 0.05})
    add("clipped", ["stages of fsdp"], clipped)
    if slow:
        again = tables(text, data={"micro_batch": 2}, run={"evaluate_every": 2}, checkpoint={"every_steps": 2})
        add("resumed", ["stages of fsdp", "stages of fsdp and derived"], again, FEW, resume_at=3)
        low = tables(text, data={"micro_batch": 2}, precision={"compute": "bfloat16"}, optimiser={"eps": 1e-3})
        add("bfloat16", ["stages of fsdp"], low)


HANDS = {"fsdp": (0, 5, 1, 4), "copies": (3, 0, 7, 0), "hsdp": (0, 9, 1, 0), "tensor inside fsdp": (0, 10)}
