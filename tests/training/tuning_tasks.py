"""Fine-tuning with adapters on ranks, and the same by transformers and peft alone, on one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tangram.models.building.build import build_on_meta
from tangram.models.lora.adapters import add_adapters, initial_adapters
from tangram.models.lora.expert_adapters import factors_of
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, sample_ids, step_batches, tokens_of
from tangram.training.observe.events import StepDone
from tangram.training.run.launch import Rank
from tangram.training.run.rank import RankJob, begin
from tangram.training.state.checkpointer import Checkpointer, newest
from tangram.training.step import loop
from tests.training.chat import write_chat
from tests.training.data.test_chat import CHATML, TURNS, tokenizer_of

STEPS = 30
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
    """A chat model of random weights, conversations, and the job of six lines."""
    model = write_chat(folder / "chat-model", fields={"tie_word_embeddings": tied, **fields}, family=family)
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


def run_plans(rank: Rank, work: tuple[Mapping[tuple[str, str], Plan], Path]) -> dict[tuple[str, str], Traced]:
    """The task of the ranks."""
    found: dict[tuple[str, str], Traced] = {}
    for key, plan in work[0].items():
        rank.emit(key)
        found[key] = run_plan(rank, plan, work[1] / "-".join(key))
    return found


def run_in_turn(
    rank: Rank, work: tuple[Mapping[tuple[str, str], Plan], Path, Mapping[tuple[str, str], tuple[str, str]]]
) -> dict[tuple[str, str], Traced]:
    """The same; what another goes on from (the last of `work`: whose checkpoint) is saved."""
    plans, folder, after = work
    found: dict[tuple[str, str], Traced] = {}
    for key, plan in plans.items():
        before = after.get(key)
        resume = None if before is None else newest(folder / "-".join(before))
        found[key] = run_plan(rank, plan, folder / "-".join(key), resume, keep=key in after.values())
    return found


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

    hooks = loop.Hooks(hear, lambda: False)
    checkpointer = Checkpointer(folder, plan, world)
    trained = loop.train_steps(model, begun.state, begun.corpus, checkpointer, hooks)
    if keep:
        checkpointer.save(begun.state, wait=True)
    checkpointer.close()
    kept = _kept_bytes(model.module, begun.state.optimiser)
    return Traced(trained.losses, tuple(norms), gradients, kept, figures)


def _kept_bytes(model: nn.Module, optimiser: Any) -> int:
    states = [value for of_one in optimiser.state.values() for value in of_one.values()]
    tensors = [*model.parameters(), *model.buffers(), *states]
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


def whole(tensor: Tensor) -> npt.NDArray[np.float32]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().numpy().copy()


def oracle(plan: Plan, *, alpha: float | None = None) -> Traced:
    """What transformers' model, peft's adapters and torch's AdamW do with the same samples in the same order.

    Conversations are read, rendered, masked and padded here by transformers alone. `alpha`: another than the plan's.
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
        fan_in_fan_out=plain.config.model_type == "gpt2",
    )  # fmt: skip
    if lora.start is None:
        peft: Any = get_peft_model(plain, config)
        begin_as(peft, plan)
    else:
        peft = PeftModel.from_pretrained(plain, lora.start, is_trainable=True)
    parameters = [p for p in peft.parameters() if p.requires_grad]
    o = plan.optimiser
    optimiser = torch.optim.AdamW(parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=0.0)
    rows = conversations(plan, folder)
    losses: list[float] = []
    norms: list[float] = []
    gradients: Named = {}
    order = sample_ids(open_corpus(plan.data, tokens_of(plan)), plan.data, plan.seed, 0, STEPS * plan.data.global_batch)
    peft.train()
    for step in range(plan.run.steps):
        some = [rows[window] for _, window in order[step * plan.data.global_batch :][: plan.data.global_batch]]
        loss = loss_of(peft, some)
        optimiser.zero_grad()
        loss.backward()
        if not step:
            gradients = {
                name.removeprefix("base_model.model."): whole(p.grad)
                for name, p in peft.named_parameters()
                if p.grad is not None
            }
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, o.clip_norm)))
        optimiser.step()
        losses.append(float(loss.detach()))
    return Traced(tuple(losses), tuple(norms), gradients)


def begin_as(peft: nn.Module, plan: Plan) -> None:
    """Give A and B the values that the job begins with."""
    assert plan.lora is not None
    named = {name.removeprefix("base_model.model."): p for name, p in peft.named_parameters()}
    model = build_on_meta(AutoConfig.from_pretrained(Path(str(plan.model.path))))
    add_adapters(model, **plan.lora.modules)
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
