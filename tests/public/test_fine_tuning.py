"""Public reports of 2026 about fine-tuning: turns of tools, ends, cut answers, and losses that were silently 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tangram.cli import main
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, tokens_of
from tangram.training.data.chat import ChatTokens
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import RankJob, begin
from tangram.training.step import loop
from tangram.training.step.evaluate import held_out
from tests.training.data.test_chat import encoded, tokens_at
from tests.training.pairs import write_pairs
from tests.training.test_tuning import WAYS
from tests.training.tuning_tasks import planned_by, write_folder

CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = (
    "{% set begins = {'user': '<|im_start|>', 'tool': '<|im_end|>', 'assistant': '<as>'} %}"
    "{% for m in messages %}{{ begins[m.role] }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}</call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<as>{% endif %}"
)
"""As GLM-4.5's: a turn begins with a token of its role, and nothing ends it."""


def turn(name: str, value: Any, **more: Any) -> dict[str, Any]:
    """As ShareGPT has it."""
    return {"from": name, "value": value if isinstance(value, str) else json.dumps(value), **more}


def learnt(folder: Path, template: str, *turns: dict[str, Any]) -> list[str]:
    tokens = tokens_at(folder, template)
    ((ids, counts),) = encoded(tokens, {"conversations": list(turns)})
    runs = groupby(zip(ids, counts, strict=True), lambda one: one[1])
    return [tokens.spelled([i for i, _ in some]) for counted, some in runs if counted]


LOOK, BACK = ({"name": "look", "arguments": {"at": place}} for place in ("a", "b"))
ASKED, SEEN, DONE = turn("human", "What is there?"), turn("observation", "42"), turn("gpt", "It is 42.")
CALLED = '<call>look {"at": "a"}</call>'
TWICE = CALLED + '<call>look {"at": "b"}</call>'


def pair(asked: str, *answers: str) -> dict[str, Any]:
    sides = [[{"role": "assistant", "content": text}] for text in answers]
    return {"prompt": [{"role": "user", "content": asked}], "chosen": sides[0], "rejected": sides[1]}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((turn("gpt", "I look. "), turn("function_call", LOOK), SEEN), f"I look. {CALLED}"),
        ((turn("function_call", LOOK), turn("function_call", BACK), SEEN, SEEN), TWICE),
        ((turn("function_call", [LOOK, BACK]), SEEN, SEEN), TWICE),
    ],
)
def test_what_is_said_before_a_call_does_not_end_the_turn(tmp_path: Path, turns: Any, expected: str) -> None:
    """hiyouga/LlamaFactory#10530: text and a call could not stand in one turn, so models of Qwen3.5 were never shown
    what they have to write: here it was shown as two turns, of which the first one ends before the call."""
    assert learnt(tmp_path, CALLING, ASKED, *turns, DONE) == [f"{expected}<|im_end|>\n", "It is 42.<|im_end|>\n"]


def test_a_call_that_is_context_is_not_learnt(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#10530 has calls as rows of their own; what such a row says of the loss was lost here."""
    call = turn("function_call", LOOK, train=False)
    assert learnt(tmp_path, CALLING, ASKED, call, SEEN, DONE) == ["It is 42.<|im_end|>\n"]
    row = {"conversations": [ASKED, turn("function_call", LOOK), SEEN, DONE], "loss_mask": [0, 0, 0, 1]}
    ((_, counts),) = encoded(tokens_at(tmp_path, CALLING), row)
    assert sum(counts) == len("It is 42.") + 2
    said = turn("gpt", "I look. ")
    assert learnt(tmp_path, CALLING, ASKED, said, call, SEEN, DONE) == ["I look. <|im_end|>\n", "It is 42.<|im_end|>\n"]


def test_models_learn_to_stop_behind_a_call(tmp_path: Path) -> None:
    """PrimeIntellect-ai/renderers#66: what begins the next turn is where GLM stops, and was in no loss, so that it came
    to write dozens of calls in one turn. Behind the last turn of a row stands no next one."""
    (tmp_path / "chat-model").mkdir()
    (tmp_path / "chat-model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 257, 258]}))
    call = turn("function_call", LOOK)
    assert learnt(tmp_path, ROLES, ASKED, call) == ["\n<call>look</call><|im_end|>"]
    assert learnt(tmp_path, ROLES, ASKED, call, SEEN, DONE) == [
        "\n<call>look</call><|im_end|>", "\nIt is 42.<|im_start|>",
    ]  # fmt: skip


def test_a_short_answer_is_not_cut_with_the_long_one_beside_it(tmp_path: Path) -> None:
    """huggingface/trl#6548: SimPO cut both answers of a pair by the longer one's length: nothing was left of the
    shorter, and its mean was 0 / 0."""
    folder = write_pairs(tmp_path)
    long = [pair("why?", "y" * 90, "n" * (1 + n)) for n in range(4)]
    none = pair("?" * 80, "y" * 90, "n")
    keys = {"data.sequence": "64", "preference.loss_type": "simpo"}
    tokens = tokens_of(load(folder / "dpo.toml", keys))
    first, *others = tokens.encode([json.dumps(row).encode() for row in [none, *long]])
    assert not len(first)  # without room for an answer
    answers = [[int((side % (2 * tokens.vocabulary) < tokens.vocabulary).sum()) for side in tokens.documents(row)]
               for row in others]  # fmt: skip
    assert [rejected for _, rejected in answers] == [3, 4, 5, 6]  # "n" and more, with the end of the turn
    assert len({chosen for chosen, _ in answers} - {0}) == 1


@pytest.mark.parametrize(("key", "why"), [
    ("rows", "has no text to train on: all of it is left out: 3 conversations without an answer within 64 tokens"),
    ("eval", "data.evaluation has no text to measure the loss on: all of it is left out: 3 conversations"),
])  # fmt: skip
def test_rows_without_room_for_an_answer_have_no_loss_of_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, why: str
) -> None:
    """huggingface/trl#6668: of prompts that fill a sample no label was left, and the run had a loss of 0 to its end."""
    folder = write_folder(tmp_path)
    (folder / "eval").mkdir()
    text = (folder / "sft.toml").read_text() + 'data.evaluation = [{ path = "eval" }]\n'
    (folder / "sft.toml").write_text(text)
    for name in ("rows", "eval"):
        rows = [{"prompt": "why? " * (20 if name == key else 2) + str(n), "completion": "so"} for n in range(3)]
        (folder / name / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--set", "data.sequence=64", "--set", "data.global_batch=2", "--out", str(folder / "run"), "-n", "1"]
    assert main(["train", str(folder / "sft.toml"), *given]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def _held_out(rank: Rank, work: tuple[Mapping[tuple[str, int], Plan], Path]) -> dict[tuple[str, int], float]:
    plans, folder = work
    found: dict[tuple[str, int], float] = {}
    for key, plan in plans.items():
        corpus = open_corpus(plan.data, tokens_of(plan))
        begun = begin(rank, RankJob(plan, folder, corpus.digest, loop.StepCosts(), None))
        found[key] = held_out(begun.model, begun.corpus).loss
    return found


def test_the_loss_of_an_evaluation_knows_no_batches(tmp_path: Path) -> None:
    """huggingface/transformers#39241: it was a mean of batches' means, in which a token of a short answer counts more,
    and the fewer samples a batch has, the more."""
    folder = write_folder(tmp_path)
    (folder / "eval").mkdir()
    rows = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "y" * (1 + n**2)}]}
            for n in range(7)]  # fmt: skip
    (folder / "eval" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "sft.toml").write_text((folder / "sft.toml").read_text() + 'data.evaluation = [{ path = "eval" }]\n')
    keys = {"data.sequence": "64", "data.global_batch": "6", "data.cache": str(folder / "cache")}
    job = load(folder / "sft.toml", keys)
    plans = {(way, micro): planned_by(WAYS[way], job, micro) for way in ("one", "fsdp") for micro in (1, 3, 6)}
    found: dict[tuple[str, int], float] = {}
    for world in (1, 2):
        some = {key: plan for key, plan in plans.items() if plan.ranks == world}
        ran = run_ranks(_held_out, (some, folder / "run"), world=world, on_event=lambda _: None, device="cpu")
        found |= ran[0]
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "chat-model").eval()
    sums = np.zeros(2)
    for ids, counts in encoded(cast(ChatTokens, tokens_of(job)), *rows):
        with torch.no_grad():
            chances = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        each = [-float(chances[at - 1, n]) for at, (n, counted) in enumerate(zip(ids, counts, strict=True)) if counted]
        sums += sum(each), len(each)
    assert list(found.values()) == pytest.approx([sums[0] / sums[1]] * 6, rel=1e-6)
