"""Jobs of fine-tuning, whose ranks run other forwards beside those of training: clean ones are left in peace."""

from pathlib import Path

import pytest

from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import Strategy, plan_of
from tangram.schema.files import load
from tangram.tracing.files.format import Kind, Phase
from tangram.tracing.reading import RankTrace, read
from tangram.tracing.settings import TraceSettings
from tangram.tracing.show.report import report
from tangram.training.data import open_corpus, prepare, tokens_of
from tangram.training.run.launch import run_ranks
from tangram.training.run.rank import RankJob, train_rank
from tangram.training.state.build_model import source_of
from tangram.training.step.loop import StepCosts
from tests.training.pairs import write_pairs

SET = {
    "data.sequence": "96", "data.global_batch": "8", "run.steps": "8", "checkpoint.every_steps": "3",
    "optimiser.in_backward": "true", "optimiser.clip_norm": "inf",
}  # fmt: skip


def calls_in(trace: RankTrace, phase: Phase) -> int:
    """Collectives that a rank has begun while it was in a phase."""
    now, count = Phase.START, 0
    for event in trace.events:
        now = Phase(event["op"]) if event["kind"] == Kind.PHASE else now
        count += event["kind"] == Kind.ENTER and now is phase
    return count


@pytest.mark.parametrize(
    ("kind", "gathers"),
    [
        # The root and two layers by the reference; then by what is trained, and the layers once more in its backward.
        ("dpo", 8),
        # And before, of answers of others: of the reference with these one root does, layers come for each.
        ("kto", 13),
    ],
)
def test_preferences_beside_a_reference_with_updates_in_the_backward(kind: str, gathers: int, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    asked = load(tmp_path / f"{kind}.toml", {**SET, "data.cache": str(tmp_path / "cache")})
    prepare(asked.data, tokens_of(asked), lambda event: None)
    corpus = open_corpus(asked.data, tokens_of(asked))
    counted = Counted(asked, source_of(asked, tokens_of(asked)).config)
    plan = plan_of(Strategy("FSDP", "dp=2", ("dp",), shard="dp"), asked, counted, 4)
    settings = TraceSettings(tmp_path / "trace", mesh="dp=2", digest_steps=2)
    job = RankJob(plan, tmp_path, corpus.digest, StepCosts(), trace=settings)
    run_ranks(train_rank, job, world=2, on_event=lambda event: None, device="cpu", trace=settings)
    found = report(tmp_path)
    assert [one for one in found.findings if one.kind != "slow"] == []  # on a busy machine one may be
    assert found.basis.startswith(
        f"held against the plan in each step: {gathers} all-gather over dp, 3 reduce-scatter over dp, 1 all-reduce "
        "over dp at the end"
    )
    for trace in read(tmp_path):
        assert [*trace.sums] == [2, 4, 6, 8]
        assert calls_in(trace, Phase.FORWARD) > 0
        assert calls_in(trace, Phase.DATA) == 0, "a reference's are looked at, too"
