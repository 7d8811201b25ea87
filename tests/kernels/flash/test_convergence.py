"""The bench of convergence: its queue repeats nothing, its table knows what is worse, its runs are the trainer's."""

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import convergence
from bench._convergence import page, running, table
from bench._convergence.initial import biased
from bench._convergence.settings import MILLION, QUICK, SMALL, Run, digest_of, queue, settings_of
from bench._convergence.waiting import work
from tangram.errors import UserError
from tangram.training.run.run_folder import alone

NEVER = math.inf
RUN = Run(QUICK, "plain", "bf16", 256, 1)
RUNS = [RUN, replace(RUN, seed=2), replace(RUN, recipe="fp8")]

# ---------------------------------------------------------------- the queue


class Trainer:
    """Writes what a run leaves, without training; `fails` in the place of the named ones."""

    def __init__(self) -> None:
        self.trained: list[str] = []
        self.fails: dict[str, type[Exception]] = {}

    def __call__(self, run: Run, folder: Path) -> dict[str, Any]:
        self.trained.append(run.name)
        if (error := self.fails.get(run.name)) is not None:
            raise error
        found = {"digest": digest_of(settings_of(run)), "held_out": 2.0}
        (folder / run.name / running.RESULT).write_text(json.dumps(found))
        return found


def test_what_is_finished_is_not_repeated(tmp_path: Path) -> None:
    trainer = Trainer()
    assert work(RUNS, tmp_path, NEVER, trainer) == 3
    assert work(RUNS, tmp_path, NEVER, trainer) == 0
    assert trainer.trained == [run.name for run in RUNS]


def test_other_settings_are_another_run(tmp_path: Path) -> None:
    trainer = Trainer()
    work(RUNS, tmp_path, NEVER, trainer)
    others = [replace(run, size=replace(QUICK, lr=1e-3)) for run in RUNS]
    assert [run.name for run in others] == [run.name for run in RUNS]
    assert work(others, tmp_path, NEVER, trainer) == 3
    assert running.result_of(RUN, tmp_path) is None, "of the new settings now"


@pytest.mark.parametrize("left", ["", '{"digest": "', '{"held_out": 1.0}'])
def test_what_was_broken_off_begins_anew(tmp_path: Path, left: str) -> None:
    trainer = Trainer()
    (tmp_path / RUN.name).mkdir()
    (tmp_path / RUN.name / running.RESULT).write_text(left)
    assert work([RUN], tmp_path, NEVER, trainer) == 1
    assert running.result_of(RUN, tmp_path) is not None


def test_a_run_that_fails_has_no_result(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.fails = {RUNS[1].name: RuntimeError}
    with pytest.raises(RuntimeError):
        work(RUNS, tmp_path, NEVER, trainer)
    trainer.fails = {RUNS[1].name: running.StoppedError}
    assert work(RUNS, tmp_path, NEVER, trainer) == 0, "and nothing after it is begun"
    trainer.fails = {}
    assert work(RUNS, tmp_path, NEVER, trainer) == 2


def test_time_that_is_up(tmp_path: Path) -> None:
    assert work(RUNS, tmp_path, 0.0, Trainer()) == 1, "a call that trains nothing would never come to an end"
    assert work(RUNS, tmp_path, 0.0, Trainer()) == 1


def test_what_another_process_trains_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / RUN.name).mkdir()
    trainer = Trainer()
    with alone(tmp_path / RUN.name):
        assert work(RUNS, tmp_path, NEVER, trainer) == 2
    assert RUN.name not in trainer.trained


def test_chosen_runs_and_unknown_words() -> None:
    runs = [*queue(SMALL, 3)]
    assert len({run.name for run in runs}) == len(runs) == 84
    million = [*queue(MILLION, 3)]
    assert {(run.setting, run.size) for run in convergence.chosen([*runs, *million], ("million",))} == {
        ("plain", MILLION)
    }
    assert len({run.name for run in (*runs, *million)}) == 84 + 24
    found = convergence.chosen(runs, ("mild", "bf16", "2048"))
    assert {(run.setting, run.recipe, run.step_tokens) for run in found} == {("mild", "bf16", 2048)}
    assert {run.recipe for run in queue(SMALL, 1, kernels_only=True)} == {"bf16", "fp8", "fp8-fwd", "nvfp4-emulated"}
    with pytest.raises(UserError, match="nothing called 'fp4'"):
        next(iter(convergence.rows(quick=True, only=("fp4",))))


# ---------------------------------------------------------------- runs


def test_a_run_is_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained for four steps: the same twice, another by another recipe, and with the channels that it should have."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which has the kernels, and these only what is no study
    size = replace(QUICK, tokens=512, steps_of=(128,))
    one = Run(size, "outliers", "bf16", 128, 1)
    found = running.train(one, tmp_path)
    assert running.result_of(one, tmp_path) == json.loads(json.dumps(found))
    assert [step for step, _ in found["losses"]] == [1, 2, 3, 4]
    assert 4.0 < found["held_out"] < 6.0
    assert found["ended"] is None
    assert found["largest_logits"][-1][0] == 4
    again = running.train(one, tmp_path)
    assert (again["losses"], again["held_out"]) == (found["losses"], found["held_out"])
    other = running.train(replace(one, recipe="nvfp4-dropin-emulated"), tmp_path)
    assert other["losses"][0][1] == pytest.approx(found["losses"][0][1], rel=0.02), "the same weights and text"
    assert other["gradient_norms"] != found["gradient_norms"]
    plain = running.train(replace(one, setting="plain"), tmp_path)
    assert abs(found["largest_logits"][0][1]) > 3 * abs(plain["largest_logits"][0][1])


def test_the_largest_logit_is_that_of_what_is_seen() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, heads, 6, 8, generator=generator) for heads in (4, 2))
    begins = torch.tensor([0, 0, 0, 3, 3, 3])
    numbers = torch.stack([begins, torch.arange(6)], -1).expand(2, -1, -1)[:, None]
    k[:, :, 5] *= 100.0  # only the last token sees it
    q[:, :, 5] = 0.0
    found: list[float] = []
    given = running.watching(lambda *values, **others: "out", found, torch.nn.Identity(), q, k, k, numbers, scaling=0.5)
    assert given == "out"
    seen = [(i, j) for i in range(6) for j in range(i + 1) if begins[i] == begins[j]]
    for head in range(4):
        of_pairs = [float(0.5 * q[b, head, i] @ k[b, head // 2, j]) for b in range(2) for i, j in seen]
        assert found[head] == pytest.approx(max(of_pairs), rel=1e-5)


def test_channels_that_begin_far_from_zero() -> None:
    found = biased(128, 64, 24.0, torch.Generator().manual_seed(1)).view(2, 64)
    assert [int((head != 0).sum()) for head in found] == [4, 4]
    assert 10.0 < float(found.abs().amax()) < 45.0
    assert not found[:, :28].any()
    assert not found[:, 32:60].any()


# ---------------------------------------------------------------- the table

LOSSES = (2.00, 2.02, 1.99)


def planted(recipe: str, off: tuple[float, ...] = (0.0, 0.0, 0.0), **changes: Any) -> dict[Run, dict[str, Any]]:
    """Results of three seeds that lie so far from those of BF16."""
    return {
        replace(RUN, recipe=recipe, seed=seed): {
            "held_out": loss + more, "ended": None, "skipped": [], "seconds": 1.0, "device": "cpu",
            "settings": {"run": {"step_tokens": 256, "size": {"tokens": 5120}}},
            "losses": [[step, 5.0 - 0.1 * step] for step in range(1, 21)],
            "gradient_norms": [[step, 9.0 if step < 3 else 1.0 + seed] for step in range(1, 21)],
            "largest_logits": [[10, 3.0], [20, 4.0 + seed]], **changes,
        }
        for seed, (loss, more) in enumerate(zip(LOSSES, off, strict=True), 1)
    }  # fmt: skip


def lines_of(*groups: dict[Run, dict[str, Any]]) -> dict[str, table.Line]:
    return {one.recipe: one for one in table.lines({run: found for group in groups for run, found in group.items()})}


def test_what_is_worse_lies_outside_and_what_is_equal_inside() -> None:
    found = lines_of(
        planted("bf16"), planted("fp8-fwd", (0.002, -0.001, 0.002)), planted("fp8", (0.05, 0.06, 0.07)),
        planted("nvfp4-emulated", (-0.2, -0.2, -0.2)),
        planted("nvfp4-dropin-emulated", ended="not finite", held_out=None, skipped=[4, 5]),
    )  # fmt: skip
    assert found["bf16"].band == pytest.approx(0.03)
    assert found["bf16"].verdict == ""
    assert found["fp8-fwd"].verdict == "inside"
    worse = found["fp8"]
    assert worse.verdict == "outside"
    assert worse.gap == pytest.approx(0.06)
    assert worse.bands == pytest.approx(2.0)
    assert worse.within == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-5)
    assert found["nvfp4-emulated"].verdict == "better"
    gone = found["nvfp4-dropin-emulated"]
    assert (gone.verdict, gone.loss, gone.ended, gone.skipped) == ("diverged", None, 3, 6)


def test_pairs_are_of_the_same_seed() -> None:
    """Of the seeds that both have: the mean of all of BF16's is another number."""
    own = {run: one for run, one in planted("fp8", (0.01, 0.01, 0.01)).items() if run.seed < 3}
    found = lines_of(planted("bf16"), own)["fp8"]
    assert found.seeds == 2
    assert found.gap == pytest.approx(0.01)
    assert found.within == pytest.approx(0.0, abs=1e-9)


def test_norms_and_logits() -> None:
    found = lines_of(planted("bf16"))["bf16"]
    assert (found.usual_norm, found.largest_norm, found.largest_logit) == (4.0, 4.0, 7.0)
    lost = lines_of(planted("bf16", largest_logits=[[10, 3.0], [20, math.nan], [30, 4.0]]))["bf16"]
    assert math.isnan(lost.largest_logit)
    high = planted("bf16", gradient_norms=[[step, 50.0 if step == 12 else 1.0] for step in range(1, 21)])
    assert (lines_of(high)["bf16"].usual_norm, lines_of(high)["bf16"].largest_norm) == (1.0, 50.0)


def test_one_seed_has_no_band() -> None:
    one = {run: found for run, found in {**planted("bf16"), **planted("fp8", (0.1, 0.1, 0.1))}.items() if run.seed == 1}
    found = lines_of(one)["fp8"]
    assert (found.band, found.bands, found.within, found.verdict) == (None, None, None, "")
    assert found.gap == pytest.approx(0.1)


def test_rows_of_the_bench() -> None:
    rows = {row.figure: row for row in table.rows(QUICK, {**planted("bf16"), **planted("fp8", (0.05, 0.06, 0.07))})}
    gap = rows["quick, plain, 256 tokens a step: fp8, gap"]
    assert (round(gap.ours, 6), gap.met) == (2.0, False)
    assert rows["quick, plain, 256 tokens a step: fp8, held-out loss"].peers["bf16"] == pytest.approx(sum(LOSSES) / 3)


# ---------------------------------------------------------------- the page


def write_page(folder: Path, marks: Callable[[str], str] = lambda text: text) -> Path:
    (folder / page.NAME).write_text(
        marks(
            "".join(f"<!-- quick {name} -->\nold\n<!-- end of quick {name} -->\n" for name in ("plain", "runs"))
            + "words\n"
        )
    )
    page.write(folder, QUICK, {**planted("bf16"), **planted("fp8", (0.05, 0.06, 0.07))})
    return folder / page.NAME


def test_page(tmp_path: Path) -> None:
    text = write_page(tmp_path).read_text()
    assert "| 256 | fp8 | 3 | 2.0633 | +0.0600 ± 0.0248 | +2.00 | outside |" in text
    assert "Seed band of BF16: 0.0300 nats at 256 tokens a step." in text
    assert "6 runs of 1,024 tokens each, on cpu" in text
    assert "old" not in text
    assert text.endswith("words\n")
    picture = tmp_path / "images" / "attention-convergence-quick-plain.svg"
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")
    assert "fp8" in picture.read_text()


def test_no_page_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to write"):
        list(convergence.rows(quick=True, only=("page",), folder=tmp_path))


def test_a_page_without_marks_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lacks the marks"):
        write_page(tmp_path, marks=partial(str.replace, *("<!-- quick runs -->", "")))  # pyright: ignore
    assert not (tmp_path / "images").exists()
