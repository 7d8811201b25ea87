"""Preferences to learn from, and what transformers, peft and formulas written out make of them on one process."""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tangram.schema.plan import Plan
from tests.training.tuning_tasks import Traced, adapted, by_adamw, write_folder

Mistake = Literal["", "reference follows", "swapped", "mask shifted", "prompt counted", "own answer"]
Row = tuple[list[int], list[bool]]
"""The tokens of a conversation, and which are answer."""


def write_pairs(folder: Path, kind: str = "pairs") -> Path:
    """A chat model, pairs of answers of unequal lengths as messages and as text, and a job of five lines on a kind."""
    write_folder(folder)
    said = [(f"{n} + {n}?", f"that is {2 * n}" + "!" * (n % 7), "no idea" + " at all" * (n % 3)) for n in range(40)]
    turn = lambda role, text: {"role": role, "content": text}  # noqa: E731
    messages = [
        {"prompt": [turn("system", "Be short."), turn("user", asked)],
         "chosen": [turn("assistant", good)], "rejected": [turn("assistant", bad)]}
        for asked, good, bad in said
    ]  # fmt: skip
    texts = [{"prompt": asked + " ", "chosen": good, "rejected": bad} for asked, good, bad in said]
    labels = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for n, row in enumerate(messages) for side in [("chosen", "rejected")[n % 5 % 2]]
    ]  # fmt: skip
    for name, rows in (("pairs", messages), ("texts", texts), ("labels", labels)):
        (folder / name).mkdir()
        (folder / name / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "dpo.toml").write_text(
        f'version = 3\ntask = "dpo"\nmodel.path = "chat-model"\nrun.steps = 6\ndata.sources = [{{ path = "{kind}" }}]\n'
    )
    (folder / "kto.toml").write_text(
        'version = 3\ntask = "kto"\nmodel.path = "chat-model"\nrun.steps = 6\ndata.sources = [{ path = "labels" }]\n'
    )
    return folder


LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]] = {
    "sigmoid": lambda c, r, nc, nr, beta: torch.log(1 + torch.exp(-beta * (c - r))),
    "ipo": lambda c, r, nc, nr, beta: (c / nc - r / nr - 1 / (2 * beta)) ** 2,
    "orpo": lambda c, r, nc, nr, beta: (
        beta * torch.log(1 + 1 / ((c / nc).exp() / (1 - (c / nc).exp()) / ((r / nr).exp() / (1 - (r / nr).exp()))))
    ),
}


def oracle(plan: Plan, mistake: Mistake = "") -> Traced:
    """The losses of a plan of pairs of messages, by the template's own renderings, padded on the right."""
    preference, folder = plan.preference, Path(str(plan.model.path))
    assert preference is not None
    model = adapted(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), plan)
    frozen: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pairs = _pairs(plan, folder, mistake)

    def loss_of_windows(windows: list[int]) -> Tensor:
        some = [row for window in windows for row in pairs[window]]
        logps_B, counts_B, tokens = _log_probs(model, some)
        if preference.loss_type != "orpo":
            with torch.no_grad():
                before_B = _log_probs(model if mistake == "reference follows" else frozen, some)[0]
            logps_B = logps_B - before_B
        at = (1, 0) if mistake == "swapped" else (0, 1)
        if plan.task == "kto":
            beside = [_answered(row, some[n - 1], mistake) for n, row in enumerate(some)]
            with torch.no_grad():
                kl = (_log_probs(model, beside)[0] - _log_probs(frozen, beside)[0]).mean().clamp(min=0)
            sign_B = torch.tensor([1.0 if _is_good(window) else -1.0 for window in windows])
            loss = (1 - torch.sigmoid(preference.beta * sign_B * (logps_B - kl))).mean()
        else:
            (c, r), (nc, nr) = ([x[side::2] for side in at] for x in (logps_B, counts_B))
            loss = LOSSES[preference.loss_type](c, r, nc, nr, preference.beta).mean()
        if preference.loss_type == "orpo":
            loss = loss - torch.cat(tokens[::2]).mean()
        return loss

    return by_adamw(plan, model, loss_of_windows)


def _pairs(plan: Plan, folder: Path, mistake: Mistake) -> list[list[Row]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found: list[list[Row]] = []
    for line in (Path(plan.data.sources[0].path) / "a.jsonl").read_text().splitlines():
        row = json.loads(line)
        begin = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        at = 1 if mistake == "prompt counted" else len(begin) + (mistake == "mask shifted")
        sides = ("completion",) if plan.task == "kto" else ("chosen", "rejected")
        both = [
            tokenizer.apply_chat_template(row["prompt"] + row[side], return_dict=True)["input_ids"][
                : plan.data.sequence
            ]
            for side in sides
        ]
        assert all(ids[: len(begin)] == begin for ids in both)
        found.append([(ids, [n >= at for n in range(len(ids))]) for ids in both])
    return found


def _is_good(window: int) -> bool:
    """As `write_pairs` has it."""
    return window % 5 % 2 == 0


def _answered(row: Row, other: Row, mistake: Mistake) -> Row:
    """What a conversation answers, with the answer of another."""
    if mistake == "own answer":
        return row
    (ids, marks), (others, others_marks) = row, other
    prompt, answer = ids[: marks.index(True)], others[others_marks.index(True) :]
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def _log_probs(model: Any, some: list[Row]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Of each row the sum over the answer and its tokens, and the log-probability of every token but the first."""
    length = max(len(ids) for ids, _ in some)
    inputs = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in some])
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in some])
    logits = model(input_ids=inputs, attention_mask=mask, use_cache=False).logits.double()
    each = logits.log_softmax(-1)[:, :-1].gather(2, inputs[:, 1:, None]).squeeze(2)
    answers = torch.tensor([(own + [False] * (length - len(own)))[1:] for _, own in some])
    return (
        (each * answers).sum(1),
        answers.sum(1),
        [own[: len(ids) - 1] for own, (ids, _) in zip(each, some, strict=True)],
    )
