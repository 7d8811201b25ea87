"""Fine-tuning with adapters on ranks, and the same by transformers and peft alone, on one process."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tangram.models.building.build import build_on_meta
from tangram.models.lora.adapter_files import merge_adapters, save_adapters
from tangram.models.lora.adapters import Adapters, add_adapters, initial_adapters
from tangram.models.lora.expert_adapters import factors_of
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import Strategy, plan_of
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, prepare, sample_ids, step_batches, tokens_of
from tangram.training.mesh.local_parts import local
from tangram.training.observe.events import StepDone
from tangram.training.parallel.model import ParallelModel
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import RankJob, begin
from tangram.training.state.build_model import build_unsharded, source_of
from tangram.training.state.checkpointer import Checkpointer, JobState, newest
from tangram.training.step import loop
from tests.training.chat import write_chat
from tests.training.data.test_chat import CHATML, TURNS, tokenizer_of

STEPS = 30
VOCABULARY = 260
Named = dict[str, npt.NDArray[np.float32]]
"""No tensors: those that a rank sends are gone with it."""


@dataclass(frozen=True)
class Traced:
    """Losses of all steps, and the gradients of the first, as far as the rank has them."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    """Of the whole gradient, before it is clipped; on the first rank."""
    gradients: Named
    kept_bytes: int = 0
    """Of parameters, buffers and the optimiser's states on the rank, at the end."""
    figures: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """What is told beside the losses, by name; on the first rank."""


def write_folder(
    folder: Path, *, tied: bool = False, family: str = "qwen3", fields: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """A chat model of random weights, conversations, and the job of six lines.

    It has a row more than there are tokens, so that two ranks have equal parts of its vocabulary: of ranks with unequal
    ones each kind is rehearsed, which takes most of the time. It is odd in `test_tuning.py` and the optimisers' tests.
    """
    fields = {"tie_word_embeddings": tied, "vocab_size": VOCABULARY, **fields}
    model = write_chat(folder / "chat-model", fields=fields, family=family)
    tokenizer_of(model)
    (model / "chat_template.jinja").write_text(CHATML)
    (folder / "rows").mkdir()
    rows = [
        {"messages": [
            *TURNS[: 1 + 2 * (n % 3 == 0)], {"role": "user", "content": f"{n} + {n}?"},
            {"role": "assistant", "content": f"that is {2 * n}" + "!" * (n % 7)},
        ]}
        for n in range(40)
    ]  # fmt: skip
    (folder / "rows" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "sft.toml").write_text(
        'version = 3\ntask = "sft"\nmodel.path = "chat-model"\ndata.sources = [{ path = "rows" }]\n'
        f"lora.rank = 4\nrun.steps = {STEPS}\n"
    )
    return folder


def planned_by(one: Strategy, job: Job, micro: int = 2, steps: int | None = None) -> Plan:
    """The plan of a job, its tokens made; plans of one job are made of one count of its model."""
    plan = plan_of(one, job, counted_for(job), micro)
    return plan if steps is None else plan.model_copy(update={"run": plan.run.model_copy(update={"steps": steps})})


def counted_for(job: Job) -> Counted:
    """What the model of a job costs, and its tokens, made once."""
    return _counted(pickle.dumps(job))


@lru_cache(maxsize=16)
def _counted(pickled: bytes) -> Counted:
    job: Job = pickle.loads(pickled)
    prepare(job.data, tokens_of(job), lambda event: None)
    return Counted(job, source_of(job, tokens_of(job)).config)


def run_in_turn(
    rank: Rank, work: tuple[Mapping[tuple[str, str], Plan], Path, Mapping[tuple[str, str], tuple[str, str]]]
) -> dict[tuple[str, str], Traced]:
    """The task of the ranks; what another goes on from (the last of `work`: whose checkpoint) is saved."""
    plans, folder, after = work
    found: dict[tuple[str, str], Traced] = {}
    for key, plan in plans.items():
        rank.emit(key)
        before = after.get(key)
        resume = None if before is None else newest(folder / "-".join(before))
        found[key] = run_plan(rank, plan, folder / "-".join(key), resume, keep=key in after.values())
    return found


def run_each(
    plans: Mapping[tuple[str, str], Plan],
    folder: Path,
    after: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType({}),
) -> dict[tuple[str, str], list[Traced]]:
    """What all ranks have measured of each plan, each number of ranks started once, one rank last: as of `run_in_turn`,
    what is gone on from comes before."""
    found: dict[tuple[str, str], list[Traced]] = {}
    for ranks in sorted({plan.ranks for plan in plans.values()}, key=lambda n: (n == 1, n)):
        work = {key: plan for key, plan in plans.items() if plan.ranks == ranks}
        done: list[dict[tuple[str, str], Traced]] = run_ranks(
            run_in_turn, (work, folder, dict(after)), world=ranks, on_event=lambda _: None, device="cpu"
        )
        found |= {key: [rank[key] for rank in done] for key in work}
    return found


def assert_as_expected(ranks: Sequence[Traced], expected: Traced, way: str, steps: int) -> None:
    """All that ranks have measured in so many steps of a plan is what one process has."""
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses[:steps], rel=1e-6 if way == "one" else 1e-5), way
    assert ranks[0].norms == pytest.approx(expected.norms[:steps], rel=1e-4), way
    gradients = {name: value for rank in ranks for name, value in rank.gradients.items()}
    assert gradients.keys() == expected.gradients.keys(), way
    for name, value in expected.gradients.items():
        furthest = float(np.abs(gradients[name] - value).max())
        assert furthest <= 1e-6 + 1e-5 * float(np.abs(value).max()), (way, name, furthest)


class Fenced(Checkpointer):
    """In the place of saves beside training: refuses who writes parameters between a save and the fence after it."""

    _saved: Sequence[tuple[Tensor, Tensor]] = ()

    def save(self, state: JobState, *, wait: bool = False) -> None:
        """Without `wait` nothing is written: a copy may be as late as the fence allows."""
        if wait:
            return super().save(state, wait=True)
        own = [local(one.detach()) for one in state.model.parameters()]
        self._saved = [(one, one.clone()) for one in own if one.untyped_storage().nbytes()]
        assert state.optimiser is not None
        state.optimiser.register_step_pre_hook(lambda *_: self.fence())

        def look(*_: object) -> None:
            hook.remove()
            self._look()

        hook = register_module_forward_pre_hook(look)
        return None

    def fence(self) -> None:
        self._look()
        self._saved = ()

    def _look(self) -> None:
        assert all(torch.equal(one, kept) for one, kept in self._saved), "written before the fence"


def run_plan(rank: Rank, plan: Plan, folder: Path, resume: Path | None = None, *, keep: bool = False) -> Traced:
    """`keep`: save what comes of it in the folder."""
    corpus = open_corpus(plan.data, tokens_of(plan))
    begun = begin(rank, RankJob(plan, folder, corpus.digest, loop.StepCosts(), resume))
    model, plan, world = begun.model, begun.model.plan, begun.model.world
    batches = step_batches(
        corpus, plan.data, seed=plan.seed, first_sample=0, index=world.data_index, size=world.data_size,
        micro_steps=plan.micro_steps, device=rank.device,
    )  # fmt: skip
    model.module.train()
    model.module.zero_grad()  # what was asked of the model has left some
    loop.backward(model, batches)
    model.sum_gradients()
    gradients = {name: whole(p.grad) for name, p in model.module.named_parameters() if p.grad is not None}
    model.module.zero_grad()
    norms: list[float] = []
    figures: dict[str, list[float]] = {}

    def hear(event: object) -> None:
        if isinstance(event, StepDone):
            norms.append(event.gradient_norm)
            for key, value in event.figures.items():
                figures.setdefault(key, []).append(value)

    hooks = loop.Hooks(hear, lambda: False, save_every=1)
    checkpointer = Fenced(folder, plan, world)
    trained = loop.train_steps(model, begun.state, begun.corpus, checkpointer, hooks)
    if keep:
        checkpointer.save(begun.state, wait=True)
    checkpointer.close()
    assert_tied_alike(model)
    kept = _kept_bytes(model.module, begun.state.optimiser)
    return Traced(trained.losses, tuple(norms), gradients, kept, figures)


def assert_tied_alike(model: ParallelModel) -> None:
    """What two stages of a pipeline have both is the same on both, to the bit, after any optimiser's updates."""
    if model.pipeline is None:
        return
    for some in model.pipeline.tied().values():
        for name, parameter in some.items():
            found: list[Any] = [None] * model.world.stages
            bits = local(parameter.detach()).contiguous().view(torch.uint8).numpy().tobytes()
            dist.all_gather_object(found, bits, group=model.world.devices.get_group("pipeline"))
            assert found[0] == found[-1], name


def saved_and_merged(plan: Plan, adapter: Path) -> tuple[Tensor, Tensor]:
    """Save a job's adapters with values drawn for them, have peft read and ourselves merge them: the same logits.

    Gives the tokens and their logits.
    """
    from peft import PeftModel

    model = build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
        ids, base = torch.arange(32)[None], str(plan.model.path)
        logits = model(ids).logits
        save_adapters(model, adapter, base)
        plain = AutoModelForCausalLM.from_pretrained(base).eval()
        assert (plain(ids).logits - logits).abs().max() > 0.01
        read: Any = PeftModel.from_pretrained(plain, str(adapter))
        torch.testing.assert_close(read.eval()(ids).logits, logits)
        merge_adapters(model)
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)
    return ids, logits


def _kept_bytes(model: nn.Module, optimiser: Any) -> int:
    states = [value for of_one in optimiser.state.values() for value in of_one.values()]
    tensors = [*model.parameters(), *model.buffers(), *states]
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


def whole(tensor: Tensor) -> npt.NDArray[np.float32]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().numpy().copy()


def oracle(plan: Plan, *, alpha: float | None = None, **options: Any) -> Traced:
    """What transformers' model, peft's adapters and torch's AdamW do with the same samples in the same order.

    Conversations are read, rendered, masked and padded here by transformers alone. `alpha`: another than the plan's;
    `options`: more of peft's, in its own words.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    lora, folder = plan.lora, Path(str(plan.model.path))
    assert lora is not None
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = lora.targets if isinstance(lora.targets, str) else [one for one in lora.targets if "experts" not in one]
    config = LoraConfig(
        r=lora.rank, lora_alpha=cast(int, alpha or lora.alpha), lora_dropout=lora.dropout, target_modules=targets,
        target_parameters=[one for one in lora.targets if "experts." in one] or None,
        use_rslora=lora.rslora, use_dora=lora.dora, modules_to_save=list(lora.modules_to_save) or None,
        fan_in_fan_out=plain.config.model_type == "gpt2", **options,
    )  # fmt: skip
    if lora.start is None:
        peft: Any = get_peft_model(plain, config)
        for name, parameter in peft.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not any(fnmatch(name, x) for x in plan.model.freeze))
        begin_as(peft, plan)
    else:
        peft = PeftModel.from_pretrained(plain, lora.start, is_trainable=True)
    rows = conversations(plan, folder)
    return by_adamw(plan, peft.train(), lambda windows: loss_of(peft, [rows[window] for window in windows]))


def adapted(model: Any, plan: Plan) -> Any:
    """A model with the adapters of a plan, if it has some, by peft."""
    from peft import LoraConfig, get_peft_model

    if plan.lora is None:
        return model
    config = LoraConfig(
        r=plan.lora.rank, lora_alpha=int(plan.lora.alpha), target_modules="all-linear",
        modules_to_save=[*plan.lora.modules_to_save] or None,
        trainable_token_indices=[*plan.lora.trainable_token_indices] or None,
    )  # fmt: skip
    model = get_peft_model(model, config)
    begin_as(model, plan)
    return model


def by_adamw(plan: Plan, model: nn.Module, loss_of_windows: Callable[[list[int]], Tensor]) -> Traced:
    """The steps of a plan by torch's AdamW: the samples of each in one big batch, in the plan's order."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    o, size = plan.optimiser, plan.data.global_batch
    optimiser = torch.optim.AdamW(parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=0.0)
    order = sample_ids(open_corpus(plan.data, tokens_of(plan)), plan.data, plan.seed, 0, plan.run.steps * size)
    losses: list[float] = []
    norms: list[float] = []
    gradients: Named = {}
    for step in range(plan.run.steps):
        loss = loss_of_windows([window for _, window in order[step * size :][:size]])
        optimiser.zero_grad()
        loss.backward()
        if not step:
            named = ((name.removeprefix("base_model.model."), p) for name, p in model.named_parameters())
            gradients = {name: whole(p.grad) for name, p in named if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, o.clip_norm)))
        optimiser.step()
        losses.append(float(loss.detach()))
    return Traced(tuple(losses), tuple(norms), gradients)


def begin_as(peft: nn.Module, plan: Plan) -> None:
    """Give A and B the values that the job begins with."""
    assert plan.lora is not None
    named = {name.removeprefix("base_model.model."): p for name, p in peft.named_parameters()}
    model = build_on_meta(AutoConfig.from_pretrained(Path(str(plan.model.path))))
    add_adapters(model, Adapters(**plan.lora.modules))
    factors = {factor.name: factor for factor in factors_of(model)}
    with torch.no_grad():
        for name, value in initial_adapters(model, plan.seed):
            if (factor := factors.get(name)) is None:
                named[name].copy_(value)
            else:
                named[f"{factor.stored}.default.weight"].copy_(factor.matrix(value))


def conversations(plan: Plan, folder: Path) -> list[tuple[list[int], list[int]]]:
    """The tokens of each row, and the same as labels, by transformers and the marks of the template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows: list[tuple[list[int], list[int]]] = []
    for line in (Path(plan.data.sources[0].path) / "a.jsonl").read_text().splitlines():
        found = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        ids, marks = found["input_ids"][: plan.data.sequence], found["assistant_masks"][: plan.data.sequence]
        if any(marks):
            rows.append((ids, [i if mark else -100 for i, mark in zip(ids, marks, strict=True)]))
    return rows


def loss_of(model: Any, some: list[tuple[list[int], list[int]]]) -> Tensor:
    """The loss of one big batch, padded on the right: transformers' own, the mean over its tokens."""
    length = max(len(ids) for ids, _ in some)
    inputs = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in some])
    labels = torch.tensor([own + [-100] * (length - len(own)) for _, own in some])
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in some])
    return model(input_ids=inputs, attention_mask=mask, labels=labels, use_cache=False).loss
