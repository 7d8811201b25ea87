"""What is compared with one process: models, strategies and settings, by name."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tangram.schema.plan import Plan
from tangram.schema.schedules import MAKERS
from tests.training.oracle.axes import (
    BY_TOKENS,
    BY_TOKENS_QUICK,
    CAPACITY,
    CAPACITY_QUICK,
    CONTEXT,
    CONTEXT_QUICK,
    EXPERTS_STAGED,
    MIXTURES,
    OF_ROUTERS,
    OVER_AXES,
    ROUTERS,
    ROUTERS_QUICK,
    WITH_EXPERTS,
    WITH_EXPERTS_QUICK,
)
from tests.training.oracle.axes import (
    STAGED_QUICK as EXPERTS_STAGED_QUICK,
)
from tests.training.oracle.defaults import BY_DEFAULT, GPT2, GPT2_STAGED, GPT2_UNTIED, PHI, add_defaults
from tests.training.oracle.defaults import STAGED as BY_DEFAULT_STAGED
from tests.training.oracle.vocabulary import GEMMA, OVER_VOCABULARY, VOCABULARY
from tests.training.small import SMALL_MODEL, small_tables
from tests.training.strategies import (
    COPIES,
    FIVE_STAGES,
    FOUR_STAGES,
    FSDP,
    MARKS,
    STRATEGIES,
    THREE_STAGES,
    TWO_STAGES,
    Strategy,
    derived,
)

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
    """Rows of the global batch for each DP rank, where they are dealt out by hand."""
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
    "derived inside copies": (4, Strategy("dp=2 tp=2", ("dp",), ("tp",), derived(""), MARKS)),
}
"""On other numbers of ranks; three divides nothing."""
LOOPING = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ALL_IN_THE_SECOND = FOUR_STAGES[0], (*FOUR_STAGES[1], *FOUR_STAGES[2], *FOUR_STAGES[3])
STAGED: Mapping[str, tuple[int, Strategy]] = {
    "stages": (2, Strategy("pp=2 one=1", ("one",), (), {"*": "_/one ..."}, stages=TWO_STAGES)),
    "stages of fsdp": (4, Strategy("pp=2 dp=2", ("dp",), (), FSDP, stages=TWO_STAGES)),
    "stages within fsdp": (4, Strategy("dp=2 pp=2", ("dp",), (), FSDP, stages=TWO_STAGES)),
    "stages inside copies": (4, Strategy("dp=2 pp=2", ("dp",), (), COPIES, stages=TWO_STAGES, schedule="GPipe")),
    "stages of fsdp and derived": (
        8,
        Strategy("pp=2 dp=2 tp=2", ("dp",), ("tp",), derived("dp"), MARKS, stages=TWO_STAGES),
    ),
    "a later stage of equal layers, derived": (
        4,
        Strategy("pp=2 one=1 tp=2", ("one",), ("tp",), derived(""), MARKS, stages=ALL_IN_THE_SECOND),
    ),
}
"""Pipelines, of micro-batches of two rows; the last of them is half empty on some ranks."""
SCHEDULES = {"GPipe": TWO_STAGES, **dict.fromkeys(LOOPING, FOUR_STAGES)}
SCHEDULED: Mapping[str, tuple[int, Strategy]] = {
    **{
        name: (2, Strategy("pp=2 one=1", ("one",), (), {"*": "_/one ..."}, stages=stages, schedule=name))
        for name, stages in SCHEDULES.items()
    },
    "Interleaved1F1B of fsdp": (
        4,
        Strategy("pp=2 dp=2", ("dp",), (), FSDP, stages=FOUR_STAGES, schedule="Interleaved1F1B"),
    ),
    "ZBVZeroBubble of fsdp": (
        4,
        Strategy("pp=2 dp=2", ("dp",), (), FSDP, stages=FOUR_STAGES, schedule="ZBVZeroBubble"),
    ),
    "DualPipeV inside copies": (
        4,
        Strategy("dp=2 pp=2", ("dp",), (), COPIES, stages=FOUR_STAGES, schedule="DualPipeV"),
    ),
    "InterleavedZeroBubble on one rank of fsdp": (
        2,
        Strategy("pp=1 dp=2", ("dp",), (), FSDP, stages=FIVE_STAGES, schedule="InterleavedZeroBubble"),
    ),
    "InterleavedZeroBubble of derived": (
        4,
        Strategy(
            "pp=2 tp=2 one=1",
            ("one",),
            ("tp",),
            derived(""),
            MARKS,
            stages=FOUR_STAGES,
            schedule="InterleavedZeroBubble",
        ),
    ),
}
"""Every schedule, of five micro-batches or ten; of three where they pass in rounds."""
SCHEDULED_QUICK = ("ZBVZeroBubble of fsdp",)
TIED = (
    "stages of fsdp", "stages inside copies", "stages of fsdp and derived", "Interleaved1F1B of fsdp",
    "InterleavedZeroBubble of derived",
)  # fmt: skip
TIED_QUICK = ("stages of fsdp",)
"""Of which the last stage has the embeddings of the first. They clip the norm, which counts what both have once."""
STAGED_QUICK = ("stages of fsdp", "stages within fsdp", "stages inside copies")
OTHER_QUICK = ("one rank", "fsdp over three", "tensor over two", "derived inside fsdp")

_KNOWN = {
    **OTHER_STRATEGIES,
    **STAGED,
    **SCHEDULED,
    **OVER_AXES,
    **EXPERTS_STAGED,
    **OVER_VOCABULARY,
    **BY_DEFAULT,
    **BY_DEFAULT_STAGED,
    **GPT2_STAGED,
}

OWN_LAYOUTS = {
    "parameters": {
        "blocks.*.up.weight": "f/tp/dp h",
        "blocks.*.up.bias": "f/tp/dp",
        "blocks.*.down.weight": "h/dp f/tp",
        "*": "_/dp ...",
    },
}

SMALL_HEADS = {**SMALL_MODEL, "head_dim": 2, "hidden_size": 8}
"""Norms of two elements: of four ranks two hold nothing of them."""


WHOLE = {
    "whole in a step": {"reshard": "after step", "reduce_every": "step"},
    "whole until reduced": {"reshard": "after step"},
    "whole in a micro-batch": {"reshard": "after backward"},
    "reduced once": {"reduce_every": "step"},
}
"""Other ways of FSDP to gather and to reduce."""
WHOLE_QUICK = {
    "whole in a step": ("fsdp",),
    "whole until reduced": (),
    "whole in a micro-batch": (),
    "reduced once": ("hsdp", "copies"),
}

LLAMA = "llama.json"


TABLE = "mine.csv"
ROWS = "0F0,0F1,2F1,2B1,2F0,2I0,0B1,2W0,0B0\n1F0,1F1,1B1,1B0\n"
"""Three stages on two ranks; the last takes the second micro-batch first, and splits one of its two backwards."""


def write_models(folder: Path) -> None:
    """The configurations of a model with a bias in every linear layer and of mixtures of experts, and a schedule."""
    (folder / TABLE).write_text(ROWS)
    fields = {**SMALL_MODEL, "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "max_position_embeddings": 64}
    everywhere = {"attention_bias": True, "mlp_bias": True}
    (folder / LLAMA).write_text(json.dumps({"model_type": "llama", **everywhere, **fields}))
    for name, own in (("gpt2", GPT2), ("gpt2-untied", GPT2_UNTIED), ("phi", PHI)):
        (folder / f"{name}.json").write_text(json.dumps({**own}))
    for kind, own in {**MIXTURES, "gemma3_text": GEMMA}.items():
        (folder / f"{kind}.json").write_text(json.dumps({"model_type": kind, **fields, **own}))


def planned(base: Mapping[str, Any], strategy: Strategy, **instead: Any) -> Plan:
    """The plan of a strategy on the tables of a job."""
    return Plan.model_validate({**base, **strategy.tables, **instead})


def cases(text: Path, *, slow: bool = False) -> dict[str, Case]:
    """Every case by name, on a text that `small.write_text` writes, with the models of `write_models` beside it.

    The quick ones are each model and setting under the strategies where it could go wrong; `slow`: all of them, longer.
    """
    found: dict[str, Case] = {}

    def add(
        name: str,
        strategies: Iterable[str],
        base: Mapping[str, Any],
        until: int = FEW,
        instead: Mapping[str, Any] = MappingProxyType({}),
        longest: int = LONG,
        **more: Any,
    ) -> None:
        for strategy in strategies:
            key = f"{name}: {strategy}" if name else strategy
            ranks, lies = _KNOWN.get(strategy) or (4, STRATEGIES[strategy])
            plan = planned(base, lies, **instead)
            found[key] = Case(key, plan, until=min(longest, max(until, SHORT)) if slow else until, ranks=ranks, **more)

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
    add("one by one", (*either("fsdp"), "derived inside copies"), one_by_one)
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
    _add_whole(text, add, slow=slow)
    low = _add_low(text, add, slow=slow)
    if slow:
        compiled = tables(text, run={"compile": True, "recompute": ["model.layers.0"]})
        add("compiled", ["derived inside fsdp"], compiled)
        add("recomputed in part", ["derived inside fsdp"], part)
        for name, base in low.items():
            add(name, ["derived inside fsdp"], base)
        add("biases", ["derived inside fsdp"], biases)
        add("tied", ["derived inside fsdp"], tied)
    # One rank has no row at all, and therefore no counted token; another has half of the batch or more.
    for strategy, shares in HANDS.items():
        add("by hand", [strategy], usual, shares=shares)
    small = tables(text, model={"change": SMALL_HEADS}, optimiser={"eps": 1e-3})
    add("small heads", ("fsdp", "copies", "hsdp") if slow else ("fsdp",), small)
    add_defaults(text, add, tables, slow=slow)
    own = {**tables(text), "model": {}}
    for kind in ("meta", "values"):
        add(f"own module, {kind}", ("fsdp",), own, own=kind)
    mesh = {**STRATEGIES["tensor inside fsdp"].tables, "layouts": OWN_LAYOUTS}
    key = "own module, values: tensor inside fsdp"
    found[key] = Case(key, Plan.model_validate({**own, **mesh}), until=SHORT if slow else FEW, own="values")
    return found


def _add_whole(text: Path, add: Callable[..., None], *, slow: bool) -> None:
    """Micro-batches of one row; what is gathered or reduced once a step is so in the last of three."""
    for name, run in WHOLE.items():
        base = tables(text, data={"micro_batch": 1}, run={**run, "evaluate_every": 2})
        add(name, STRATEGIES if slow else WHOLE_QUICK[name], base)
        if slow:
            again = {**base, "checkpoint": {"every_steps": 2, "keep": 1000}}
            add(f"resumed, {name}", ["fsdp", "hsdp"], again, FEW, resume_at=3)


def _add_kept(text: Path, add: Callable[..., None]) -> None:
    """Blocks that are recomputed but for some of their operators."""
    keeping = tables(text, run={"recompute": ["model.layers.*"], "recompute_keep": ["matmuls", "attention"]})
    add("recomputed but products", (*STRATEGIES, "derived inside fsdp"), keeping, 2)


def _add_low(text: Path, add: Callable[..., None], *, slow: bool) -> Mapping[str, Any]:
    """Types of 16 bits; the tables of each."""
    # Rounding is 2**16 times coarser here, and AdamW must not blow up that of gradients of nearly zero.
    calm = {"eps": 1e-3}
    half = {"compute": "float16", "scale": {"initial": 8192.0}}
    low = {
        "bfloat16": tables(text, precision={"compute": "bfloat16"}, optimiser=calm),
        "bfloat16 kept": tables(text, precision={"compute": "bfloat16", "parameters": "bfloat16"}, optimiser=calm),
        "float16": tables(text, precision=half, optimiser=calm),
    }
    add("bfloat16", STRATEGIES if slow else ("fsdp", "tensor inside fsdp"), low["bfloat16"])
    for mode in ("bf16", "fp8"):
        cast = tables(text, run={"attention": mode}, optimiser=calm)
        add(f"attention in {mode}", STRATEGIES if slow else ("tensor inside fsdp",), cast, FEW)
    if slow:
        _add_kept(text, add)
        add("bfloat16 kept", STRATEGIES, low["bfloat16 kept"], resume_at=3)
        add("float16", STRATEGIES, low["float16"])
    return low


def _add_staged(text: Path, add: Callable[..., None], *, slow: bool) -> None:
    _add_axes(text, add, slow=slow)
    _add_vocabulary(text, add, slow=slow)
    for strategy in STAGED if slow else STAGED_QUICK:
        add("", [strategy], tables(text, data={"micro_batch": 2}), LONG if slow else SHORT)
    for strategy in SCHEDULED if slow else SCHEDULED_QUICK:
        add("", [strategy], tables(text, data={"micro_batch": _rows_of(strategy)}), LONG if slow else FEW)
    pipeline = {"schedule": "table", "table": str(text.parent / TABLE), "stages": THREE_STAGES}
    add("tabled", ["stages"], tables(text), instead={"pipeline": pipeline})
    clipped = tables(text, data={"micro_batch": 2}, optimiser={"clip_norm": 0.05})
    add("clipped", ["stages of fsdp"], clipped)
    for strategy in TIED if slow else TIED_QUICK:
        own = {"change": {**SMALL_MODEL, "tie_word_embeddings": True}}
        rate = {"lr": 1e-3, "clip_norm": 0.05}
        base = tables(
            text, data={"micro_batch": _rows_of(strategy)}, model=own, optimiser=rate, run={"evaluate_every": 2}
        )
        instead = {"pipeline": {**_KNOWN[strategy][1].tables["pipeline"], "tied": ["model.embed_tokens"]}}
        add("tied", [strategy], base, SHORT, instead=instead)
        if slow and strategy == "stages of fsdp and derived":
            again = {**base, "checkpoint": {"every_steps": 2, "keep": 1000}}
            add("resumed, tied", [strategy], again, FEW, instead=instead, resume_at=3)
    if slow:
        again = tables(text, data={"micro_batch": 2}, run={"evaluate_every": 2}, checkpoint={"every_steps": 2})
        add("resumed", ["stages of fsdp", "stages of fsdp and derived"], again, FEW, resume_at=3)
        add("resumed", ["ZBVZeroBubble of fsdp", "stages inside copies"], again, FEW, resume_at=3)
        for name in ("bfloat16", "float16"):
            low = tables(text, data={"micro_batch": 2}, precision={"compute": name}, optimiser={"eps": 1e-3})
            add(name, ["stages of fsdp", "ZBVZeroBubble of fsdp"], low)


def _add_axes(text: Path, add: Callable[..., None], *, slow: bool) -> None:
    """Context and expert axes; every sample of the text holds several documents."""
    for strategy in CONTEXT if slow else CONTEXT_QUICK:
        changes = {"data": {"micro_batch": 2}} if "stages" in strategy else {}
        if "heads" in strategy:
            changes["model"] = {"change": {**SMALL_MODEL, "num_key_value_heads": 4, "head_dim": 4}}
        add("", [strategy], tables(text, **changes), LONG if slow else FEW)
        changes["run"] = {"attention": "tokens"}
        if "stages" not in strategy:
            low = tables(text, **{**changes, "run": {"attention": "bf16"}}, optimiser={"eps": 1e-3})
            add("attention in bf16, balanced", [strategy], low, FEW, instead={"context": BY_TOKENS["balanced"]})
        for name in BY_TOKENS if slow else BY_TOKENS_QUICK:
            if "heads" in strategy and "ring" in name:
                continue  # no rank's keys are to go anywhere
            add(name, [strategy], tables(text, **changes), FEW, instead={"context": BY_TOKENS[name]})
    for kind in MIXTURES:
        model = {"preset": None, "path": str(text.parent / f"{kind}.json"), "change": {}}
        for strategy in WITH_EXPERTS if slow else WITH_EXPERTS_QUICK if kind == "qwen3_moe" else ():
            add(kind, [strategy], tables(text, model=model, optimiser={"eps": 1e-3}), LONG if slow else FEW)
    for name, changes in ROUTERS.items():
        model = {"preset": None, "path": str(text.parent / "qwen3_moe.json"), "change": {}}
        base = tables(text, model=model, optimiser={"eps": 1e-3}, **changes)
        strategies = ("context and fsdp",) if "ring" in name else (*WITH_EXPERTS, *OF_ROUTERS)
        context = {"context": BY_TOKENS["in a ring, balanced"]} if "ring" in name else {}
        add(name, strategies if slow else ROUTERS_QUICK.get(name, ()), base, FEW, instead=context)
    _add_capacity(text, add, slow=slow)
    _add_experts_staged(text, add, slow=slow)
    if slow:
        between: dict[str, Any] = {"run": {"evaluate_every": 2}, "checkpoint": {"every_steps": 2}}
        again = tables(text, **between)
        add("resumed", ["context and fsdp"], again, FEW, resume_at=3)
        ring = {"context": BY_TOKENS["in a ring, balanced"]}
        turning = tables(text, **{**between, "run": {"evaluate_every": 2, "attention": "tokens"}})
        add("resumed in a ring, balanced", ["context and fsdp"], turning, FEW, instead=ring, resume_at=3)
        for kind in MIXTURES:
            model = {"preset": None, "path": str(text.parent / f"{kind}.json"), "change": {}}
            mixed = tables(text, model=model, optimiser={"eps": 1e-3}, **between)
            add(f"resumed {kind}", ["experts and fsdp"], mixed, FEW, resume_at=3)
        for name, run in (("recomputed", {"recompute": ["model.layers.*"]}), ("compiled", {"compile": True})):
            base = tables(text, run={"attention": "tokens", **run})
            add(f"in a ring, {name}", ["context and fsdp"], base, FEW, instead=ring)


def _add_capacity(text: Path, add: Callable[..., None], *, slow: bool) -> None:
    """Experts that have not room for all: of one mixture every setting, of others the usual one.

    By "probs" for a few steps: the same token at the begin of two documents has the same weights in one process, and on
    ranks may be rounded otherwise than its like, so that another of them is dropped: in 7 of 20 cases by step 20.
    """
    for kind in MIXTURES:
        model = {"preset": None, "path": str(text.parent / f"{kind}.json"), "change": {}}
        of_all = kind == "qwen3_moe"
        for name, changes in CAPACITY.items() if of_all else [("capacity", CAPACITY["capacity"])] if slow else ():
            base = tables(text, model=model, optimiser={"eps": 1e-3}, **changes)
            strategies = (*WITH_EXPERTS, *OF_ROUTERS) if of_all else WITH_EXPERTS
            strategies = ("context and fsdp",) if "ring" in name else strategies
            context = {"context": BY_TOKENS["in a ring, balanced"]} if "ring" in name else {}
            key = name if of_all else f"{name}, {kind}"
            quick = CAPACITY_QUICK.get(name, ())
            longest = LONG if "position" in name else FEW
            add(key, strategies if slow else quick, base, FEW, instead=context, longest=longest)


def _add_experts_staged(text: Path, add: Callable[..., None], *, slow: bool) -> None:
    """The loss of routers and the capacity of experts in pipelines; a backward in two parts computes nothing again.

    A held-out loss in between, of which neither is a part, changes nothing.
    """
    model = {"preset": None, "path": str(text.parent / "qwen3_moe.json"), "change": {}}
    for name, changes in {**ROUTERS, **CAPACITY}.items():
        run = changes["run"]
        whole = run.get("recompute") or run.get("compile")
        every = {**EXPERTS_STAGED, **STAGED, **SCHEDULED} if run.get("attention") != "tokens" else {}
        taken = [key for key, (_, lies) in every.items() if not (whole and MAKERS[lies.schedule].splits)]
        for strategy in taken if slow else EXPERTS_STAGED_QUICK.get(name, ()):
            again, data = {**run, "evaluate_every": 2}, {"micro_batch": _rows_of(strategy)}
            base = tables(text, model=model, optimiser={"eps": 1e-3}, run=again, data=data)
            add(name, [strategy], base, FEW)


def _rows_of(strategy: str) -> int:
    """Rows of a micro-batch of a pipeline, of which some schedules take rounds of as many each."""
    return 1 if strategy in SCHEDULED and strategy != "Interleaved1F1B of fsdp" else 2


def _add_vocabulary(text: Path, add: Callable[..., None], *, slow: bool) -> None:
    """The loss from logits in parts. The rate as of other tied models: rounding takes the same way."""
    even = {"change": {**SMALL_MODEL, "vocab_size": VOCABULARY}}
    for strategy in OVER_VOCABULARY if slow else ():
        if not strategy.startswith("tied"):
            changes: dict[str, Any] = {"data": {"micro_batch": 2}} if "stages" in strategy else {}
            add("", [strategy], tables(text, model=even, optimiser={"lr": 1e-3}, **changes), LONG)
    gemma = {"preset": None, "path": str(text.parent / "gemma3_text.json"), "change": {}}
    add("gemma3", ["tied vocabulary inside fsdp"], tables(text, model=gemma, optimiser={"lr": 1e-3}), FEW)
    if slow:
        low = tables(text, model=even, precision={"compute": "bfloat16"}, optimiser={"eps": 1e-3})
        add("bfloat16", ["vocabulary inside fsdp"], low)
        again = tables(text, model=even, run={"evaluate_every": 2}, checkpoint={"every_steps": 2})
        add("resumed", ["vocabulary inside fsdp"], again, FEW, resume_at=3)


HANDS = {"fsdp": (0, 5, 1, 4), "copies": (3, 0, 7, 0), "hsdp": (0, 9, 1, 0), "tensor inside fsdp": (0, 10)}
