"""The date that a chat template writes: the job's, whatever day it is."""

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest

from tangram.errors import UserError
from tangram.schema.files import dumps, load, loads
from tangram.training.data import open_corpus, prepare
from tests.training.data.test_chat import CHATML, TURNS, encoded, tokens_at, write_rows

TODAY = (
    "\n  {% if true %}\n{% endif %}\n  "
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
)
"""As Llama 3.2's; gpt-oss and SmolLM3 call it, too."""
FIXED = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
"""As Llama 3.1's."""
WRITES = "{{ 'Today Date: ' + date_string }}" + CHATML


def spelled(folder: Path, template: str, row: dict[str, Any], tally: Counter[str] | None = None, **data: Any) -> str:
    tokens = tokens_at(folder, template, **data)
    ((ids, _),) = encoded(tokens, row, tally=tally)
    return tokens.spelled(ids).partition("<")[0]


@pytest.mark.parametrize("template", [TODAY, FIXED])
def test_it_is_the_same_on_any_day(tmp_path: Path, template: str) -> None:
    row: dict[str, Any] = {"messages": TURNS}
    assert spelled(tmp_path, template + WRITES, row).endswith("Today Date: 26 Jul 2024")
    assert spelled(tmp_path, template + WRITES, row, date="2025-01-31").endswith("Today Date: 31 Jan 2025")
    today = datetime.now().astimezone()
    tokens = tokens_at(tmp_path, template + WRITES, date=today.date().isoformat())
    tokenizer = cast(Any, tokens._tokenizer)  # pyright: ignore[reportPrivateUsage]
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)  # the tokenizer's own clock goes on
    assert template is FIXED or f"Today Date: {today:%d %b %Y}<" in text
    assert template is FIXED or tokens.spelled(encoded(tokens, row)[0][0]).startswith(text.partition("<")[0])
    own = row | {"chat_template_kwargs": {"date_string": "1 May 1999"}}
    assert spelled(tmp_path, template + WRITES, own, date="2025-01-31").endswith("Today Date: 1 May 1999")


def test_it_is_told_and_part_of_what_the_tokens_are(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows", "jsonl", [{"messages": TURNS}] * 3)
    told = list[str]()
    for day in ({}, {"date": "2025-01-31"}):
        tokens = tokens_at(tmp_path, TODAY + WRITES, cache=str(tmp_path / "cache"), held_out=0, **day)
        job = load(tmp_path / "sft.toml")
        assert loads(dumps(job)).data.date == job.data.date
        prepare(job.data, tokens, lambda event: None)
        told += [tokens.digest, *open_corpus(job.data, tokens).read]
    assert told[0] != told[2]
    assert told[1].endswith("the date for the chat template is 2024-07-26 (data.date)")
    assert told[3].endswith("the date for the chat template is 2025-01-31 (data.date)")


def test_a_template_without_one_and_what_is_no_date_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat-model writes no date: leave data\.date out"):
        tokens_at(tmp_path, date="2025-01-31")
    other = {"task": "pretrain", "data.sequence": "8", "data.global_batch": "8", "optimiser.lr": "1e-3"}
    with pytest.raises(UserError, match=r"data\.date: no chat template"):
        load(
            tmp_path / "sft.toml",
            other,
        )
    with pytest.raises(UserError, match=r"data\.date: day is out of range"):
        tokens_at(tmp_path, TODAY + WRITES, date="2025-02-31")
