"""Chats and labelled answers that were trained on wrongly elsewhere.

huggingface/trl#4922          of Phi-3.5's template only the last answer of a chat was learnt
axolotl-ai-cloud/axolotl#1703 a message of weight 0 is not to be learnt
THUDM/slime#1742              a template that wants a question before each answer, and drops earlier thoughts
allenai/open-instruct#1804    of a template that drops thoughts before a question, what was learnt began amid a turn
MakazhanAlpamys/Soup#540      a template that refuses a chat without a question was given the system prompt alone
huggingface/trl#1911          of an odd batch one answer stood beside its own prompt (hiyouga/LlamaFactory#7509)
huggingface/datasets#8241     in a table a call of a tool has the arguments of others, as null
microsoft/graphrag#2423       lines that are blank, or end within a text as Unicode has it, lost a file of rows
verl-project/verl#5316        messages that are marked otherwise as none to be learnt
hiyouga/LlamaFactory#9630     a list beside the messages of a row says which answers are in the loss
vllm-project/vllm#30648       an empty list of calls, with which templates leave out what an answer says
huggingface/trl#1380          a batch of good answers alone, or of bad ones, made no number of the loss
"""

# ruff: noqa: N806  a tensor carries its dims in its name

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.schema.files import load
from tangram.schema.job import SourcePlan
from tangram.schema.tuning import PreferencePlan
from tangram.training.data import IGNORE, Batch, open_corpus, prepare, step_batches, tokens_of
from tangram.training.data.files import list_files
from tangram.training.data.sources import documents
from tangram.training.data.tokens import BadDocument
from tangram.training.objective.preferences import FORMULAS, Labelled, labelled_figures, labelled_scores
from tests.training.data.test_chat import END_TEXT, encoded, tokenizer_of, tokens_at

PHI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
THINKING = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% if ns.asked < 0 %}{{ raise_exception('nobody asks') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.asked %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Name the intent."},
    {"role": "user", "content": "How do I print?"},
    {"role": "assistant", "content": "<rag>();", "reasoning_content": "new"},
    {"role": "user", "content": "And in colour?"},
    {"role": "assistant", "content": "<followup>();", "reasoning_content": "the same"},
]


def learnt(folder: Path, template: str, messages: list[dict[str, Any]]) -> list[str]:
    tokens = tokens_at(folder, template)
    ((ids, counts),) = encoded(tokens, {"messages": messages})
    runs = groupby(zip(ids, counts, strict=True), lambda one: one[1])
    return [tokens.spelled([i for i, _ in some]) for counted, some in runs if counted]


def test_all_answers_of_a_chat_are_learnt_where_the_last_has_an_end_of_its_own(tmp_path: Path) -> None:
    assert learnt(tmp_path, PHI, CHAT) == ["<rag>();<|im_end|>", f"<followup>();<|im_end|>\n{END_TEXT}"]


def test_an_answer_of_weight_0_is_context(tmp_path: Path) -> None:
    chat = [{**CHAT[n], "weight": 0} if n == 2 else CHAT[n] for n in range(5)]
    assert learnt(tmp_path, PHI, chat) == [f"<followup>();<|im_end|>\n{END_TEXT}"]


def test_answers_whose_thoughts_are_dropped_are_learnt_without(tmp_path: Path) -> None:
    assert learnt(tmp_path, THINKING, CHAT) == [
        "<rag>();<|im_end|>\n", "the same\n</think>\n\n<followup>();<|im_end|>\n",
    ]  # fmt: skip


UNLEARNT: list[dict[str, Any]] = [
    {"weight": 0}, {"train": False}, {"trainable": False}, {"loss": False}, {"loss_mask": 0}, {"training": False},
]  # fmt: skip


@pytest.mark.parametrize("mark", UNLEARNT)
def test_an_answer_that_is_marked_as_context_is_none_to_be_learnt(tmp_path: Path, mark: dict[str, Any]) -> None:
    (key,) = mark
    chat = [*CHAT[:2], {**CHAT[2], **mark}, CHAT[3], {**CHAT[4], key: 1}]
    assert learnt(tmp_path, PHI, chat) == [f"<followup>();<|im_end|>\n{END_TEXT}"]
    rows = [{"prompt": chat[:2], "chosen": chat[2:], "rejected": CHAT[4:]},
            {"prompt": chat[:2], "completion": chat[2:], "label": True}]  # fmt: skip
    for task, row in zip(("dpo", "kto"), rows, strict=True):
        (tmp_path / "job.toml").write_text(
            f'version = 3\ntask = "{task}"\nmodel.path = "chat-model"\ndata.sources = [{{ path = "rows" }}]\n'
            "run.steps = 1\n"
        )
        with pytest.raises(BadDocument, match="not to be learnt"):
            tokens_of(load(tmp_path / "job.toml")).encode([json.dumps(row).encode()])


def test_a_mask_beside_messages_says_which_answers_are_learnt(tmp_path: Path) -> None:
    tokens = tokens_at(tmp_path, PHI)
    last = f"<followup>();<|im_end|>\n{END_TEXT}"
    masks: list[Any] = [[0, 0, 0, 0, 1], "[1, 1, 0, 1, 1]", [False, True, False, False, True]]
    for mask in masks:
        ((ids, counts),) = encoded(tokens, {"messages": CHAT, "loss_mask": mask})
        assert tokens.spelled([i for i, counted in zip(ids, counts, strict=True) if counted]) == last
    for mask in ([0, 1], [0, 0, 0, 0, 0.5], [[0], 0, 0, 0, 1], 1):
        with pytest.raises(BadDocument, match='"loss_mask" that is no list of a 0 or 1 for each of its 5 messages'):
            encoded(tokens, {"messages": CHAT, "loss_mask": mask})


@pytest.mark.parametrize(
    "message",
    [
        {**CHAT[2], "weight": 0.5},
        {**CHAT[2], "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]},
        {**CHAT[2], "content": [{"type": "text", "text": "a", "train": False}, {"type": "text", "text": "b"}]},
    ],
)
def test_a_part_of_an_answer_is_not_learnt_for_another(tmp_path: Path, message: dict[str, Any]) -> None:
    with pytest.raises(BadDocument, match="give it of a message, as 0 or 1"):
        learnt(tmp_path, PHI, [*CHAT[:2], message])


CALLER = PHI.replace(
    "{{ m.content }}", "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}"
)


def test_no_calls_are_none(tmp_path: Path) -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": "<rag>();", "tool_calls": []}
    assert learnt(tmp_path, CALLER, [CHAT[1], answer]) == [f"<rag>();<|im_end|>\n{END_TEXT}"]


THINKER = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 < ns.asked %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def test_no_turn_of_others_is_learnt_where_thoughts_before_it_are_dropped(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>that is so</think>look"},
        {"role": "tool", "content": "found"}, {"role": "assistant", "content": "<think>that is so</think>look"},
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>that is so</think>look"},
    ]  # fmt: skip
    assert learnt(tmp_path, THINKER, chat) == [
        "look<|im_end|>", "look<|im_end|>", "that is so</think>look<|im_end|>",
    ]  # fmt: skip


def test_no_question_is_left_out_of_a_chat_whose_template_wants_one(tmp_path: Path) -> None:
    wants = THINKING.replace("nobody asks", "No user query found in messages.")
    chat = [CHAT[0], {"role": "user", "content": "How do I print in colour?"}, CHAT[4]]
    assert learnt(tmp_path, wants, chat) == ["the same\n</think>\n\n<followup>();<|im_end|>\n"]


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_no_prompt_stands_beside_its_own_answer(tmp_path: Path, batch: int) -> None:
    (tmp_path / "chat-model").mkdir()
    tokenizer_of(tmp_path / "chat-model", PHI)
    rows = [{"prompt": f"{n}?", "completion": [{"role": "assistant", "content": f"is {n}"}], "label": n % 2 == 0}
            for n in range(batch)]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "kto.toml").write_text(
        'version = 3\ntask = "kto"\nmodel.path = "chat-model"\ndata.sources = [{ path = "a.jsonl" }]\nrun.steps = 1\n'
        f'data.global_batch = {batch}\ndata.micro_batch = {batch}\ndata.cache = "cache"\n'
    )
    job = load(tmp_path / "kto.toml")
    tokens = tokens_of(job)
    prepare(job.data, tokens, lambda event: None)
    (own,) = step_batches(
        open_corpus(job.data, tokens), job.data, seed=0, first_sample=0, index=0, size=1, micro_steps=1,
        device=torch.device("cpu"),
    ).micro  # fmt: skip

    def answers(of: Batch) -> list[str]:
        return [tokens.spelled(row[row != IGNORE].tolist()) for row in of.labels_BS]

    assert own.others is not None
    mine, others = answers(own), answers(own.others)
    assert sorted(mine) == sorted(others)
    assert all(a != b for a, b in zip(mine, others, strict=True))


@pytest.mark.parametrize("bad", [False, True])
def test_answers_of_one_kind_alone_have_a_loss(bad: bool) -> None:
    logps_B = torch.tensor([-3.0, -200.0, 0.0], dtype=torch.float64, requires_grad=True)
    before_B, kl_B = torch.tensor([-4.0, -190.0, 0.0], dtype=torch.float64), torch.full((3,), 0.5, dtype=torch.float64)
    share_B, none_B = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    compared = Labelled(before_B, kl_B, *((none_B, share_B) if bad else (share_B, none_B)))
    bad_B, counts_B = torch.full((3,), bad), torch.tensor([True, True, False])  # the last row is an empty one
    plan = PreferencePlan(loss_type="kto")
    losses_B = FORMULAS["kto"].loss(labelled_scores(logps_B, compared, bad_B, counts_B), plan)
    sign = -1 if bad else 1
    expected_B = 1 - torch.sigmoid(sign * 0.1 * (logps_B - before_B - kl_B)).detach()
    assert losses_B[:2].tolist() == pytest.approx(expected_B[:2].tolist(), rel=1e-12)
    assert losses_B[2] == 0
    (slope_B,) = torch.autograd.grad(losses_B.sum(), logps_B)
    assert slope_B.isfinite().all()
    assert slope_B[2] == 0
    assert labelled_figures(logps_B, compared, bad_B, counts_B, 0.1).isfinite().all()


CALLS = [
    {"messages": [
        {"role": "user", "content": "a\u2028b\u0085c"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
        {"role": "assistant", "content": "done"},
    ]}
    for name, arguments in (("first", {"x": 1, "of": [{"a": 1}]}), ("second", {"content": "z", "of": [{"b": 2}]}))
]  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_calls_of_tools_have_their_own_arguments(kind: str, tmp_path: Path) -> None:
    if kind == "jsonl":
        lines = "\n\n \n".join(json.dumps(row, ensure_ascii=False) for row in CALLS)
        (tmp_path / "rows.jsonl").write_text(f"\ufeff{lines}\n")
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow.parquet")
        pyarrow.write_table(pytest.importorskip("pyarrow").Table.from_pylist(CALLS), tmp_path / "rows.parquet")
    else:
        pytest.importorskip("datasets").Dataset.from_list(CALLS).save_to_disk(str(tmp_path / "rows"))
    path = tmp_path if kind != "datasets" else tmp_path / "rows"
    rows = documents(list_files(SourcePlan(path=str(path))), "*")
    assert [json.loads(row.text) for row in rows] == CALLS
