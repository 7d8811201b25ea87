"""A student and its teacher, and what transformers and formulas written out make of them on one process."""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

from tangram.schema.plan import Plan
from tests.training.chat import write_chat
from tests.training.data.test_chat import CHATML, tokenizer_of
from tests.training.tuning_tasks import VOCABULARY, Traced, adapted, by_adamw, conversations, write_folder

Mistake = Literal["", "sides swapped", "no squared temperature", "mask shifted", "own teacher", "padding counted"]
PADDED = 7
"""Classes of the teacher beyond the student's, as a directory of a larger model has."""


def write_taught(folder: Path, *, padded: int = 0, tied: bool = False, family: str = "qwen3") -> Path:
    """A chat model, a wider and deeper one of the same tokenizer, conversations of unequal lengths, and a job of six
    lines. `padded`: the teacher's classes beyond the student's; `family`: the teacher's."""
    write_folder(folder, tied=tied, fields={"vocab_size": VOCABULARY - 1} if padded else {})  # of ranks' unequal parts
    vocabulary = AutoModelForCausalLM.from_pretrained(folder / "chat-model").config.vocab_size
    fields = {"vocab_size": vocabulary + padded, "hidden_size": 48, "num_hidden_layers": 3, "initializer_range": 0.2}
    fields["attention_dropout"] = 0.5  # which it computes without
    tokenizer_of(write_chat(folder / "teacher", fields=fields, seed=7, family=family))
    (folder / "teacher" / "chat_template.jinja").write_text(CHATML)
    (folder / "distill.toml").write_text(
        'version = 3\ntask = "distill"\nmodel.path = "chat-model"\ndistill.teacher = "teacher"\n'
        'data.sources = [{ path = "rows" }]\nrun.steps = 6\n'
    )
    return folder


LOSSES: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward_kl": lambda logq, logp, beta: kl_div(logq, logp, log_target=True, reduction="none").sum(-1),
    "reverse_kl": lambda logq, logp, beta: kl_div(logp, logq, log_target=True, reduction="none").sum(-1),
    "jsd": lambda logq, logp, beta: (
        beta * (logp.exp() * (logp - (beta * logp.exp() + (1 - beta) * logq.exp()).log())).sum(-1)
        + (1 - beta) * (logq.exp() * (logq - (beta * logp.exp() + (1 - beta) * logq.exp()).log())).sum(-1)
    ),
}
"""Of the log-probabilities of the student and of the teacher."""


def oracle(plan: Plan, mistake: Mistake = "") -> Traced:
    """The losses of a plan: conversations rendered, masked and padded by transformers, one big batch a step."""
    distill, folder = plan.distill, Path(str(plan.model.path))
    assert distill is not None
    model = adapted(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), plan)
    at = folder if mistake == "own teacher" else Path(str(distill.teacher))
    teacher: Any = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32).eval()
    rows = conversations(plan, folder)
    return by_adamw(plan, model, lambda windows: _loss(model, teacher, [rows[one] for one in windows], plan, mistake))


def _loss(model: Any, teacher: Any, some: list[tuple[list[int], list[int]]], plan: Plan, mistake: Mistake) -> Tensor:
    distill = plan.distill
    assert distill is not None
    length = max(len(ids) for ids, _ in some)
    inputs_BS = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in some])
    labels_BS = torch.tensor([own + [-100] * (length - len(own)) for _, own in some])
    mask_BS = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in some])
    logits_BSV = model(input_ids=inputs_BS, attention_mask=mask_BS, use_cache=False).logits
    with torch.no_grad():
        theirs_BSV = teacher(input_ids=inputs_BS, attention_mask=mask_BS, use_cache=False).logits
    counted_BS = labels_BS[:, 1:] != -100
    logits_NV, labels_N = logits_BSV[:, :-1][counted_BS], labels_BS[:, 1:][counted_BS]
    theirs_NV = theirs_BSV[:, :-1][counted_BS.roll(1, 1) if mistake == "mask shifted" else counted_BS]
    shared, temperature = logits_NV.shape[1], distill.temperature
    logp_NV = (theirs_NV / temperature).log_softmax(-1)[:, :shared]
    if mistake != "padding counted":
        logp_NV = logp_NV.log_softmax(-1)
    logq_NV = (logits_NV / temperature).log_softmax(-1)
    if mistake == "sides swapped":
        logp_NV, logq_NV = logq_NV, logp_NV
    far_N = LOSSES[distill.loss_type](logq_NV, logp_NV, distill.beta)
    times = 1 if mistake == "no squared temperature" else temperature**2
    own = torch.nn.functional.cross_entropy(logits_NV, labels_N)
    return distill.alpha * own + (1 - distill.alpha) * times * far_N.mean()
