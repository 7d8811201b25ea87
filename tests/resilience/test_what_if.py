"""What goes with lost ranks, by the layouts."""

import json
from pathlib import Path

import pytest

from tangram.cli import main
from tangram.errors import UserError
from tangram.resilience.what_if import lost, ranks_named, survives_on
from tests.training.small import plan_file, small_plan, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("lost") / "text")


def test_replicas_lose_nothing_and_shards_their_own(text: Path) -> None:
    replicated = lost(small_plan(text, layouts={"parameters": {"*": "..."}}), (1,))
    assert replicated.nbytes == replicated.state > 0
    assert (replicated.only, replicated.first) == (0, "")
    sharded, rest = (lost(small_plan(text), (rank,)) for rank in (1, 0))
    assert sharded.state == replicated.state, "counted once, however it lies"
    assert sharded.nbytes == sharded.only == sharded.state - rest.only
    assert 0.49 < sharded.only / sharded.state < 0.5, "rows of the vocabulary are odd, and the first rank has one more"
    assert "all but" in sharded.sentences()[1]
    everybody = lost(small_plan(text, layouts={"parameters": {"*": "..."}}), (0, 1))
    assert everybody.only == everybody.state


def test_of_shards_with_replicas_both_have_to_go(text: Path) -> None:
    plan = small_plan(text, mesh="rep=2 dp=2", axes={"data": ["rep", "dp"]})
    assert lost(plan, (0,)).only == 0
    assert lost(plan, (0, 1)).only == 0, "the other replica has both halves"
    pair, others = lost(plan, (0, 2)), lost(plan, (1, 3))
    assert pair.only == pair.nbytes == pair.state - others.only
    assert others.only == others.nbytes > 0


def test_what_is_asked_wrongly(text: Path) -> None:
    plan = small_plan(text)
    assert ranks_named("rank:1,0,1", plan) == (0, 1)
    assert ranks_named("node:1/1", plan) == (1,)
    assert ranks_named("node:0/2", plan) == (0, 1)
    for wrong in ("rank:", "node:1", "node:0/0", "rank:x", "1", "rank:1,", "rank:\u0663"):
        with pytest.raises(UserError, match="give rank:N"):
            ranks_named(wrong, plan)
    with pytest.raises(UserError, match="ranks are 0 to 1"):
        ranks_named("rank:2", plan)
    with pytest.raises(UserError, match="ranks are 0 to 1"):
        ranks_named("node:1/999999999", plan)


def test_with_a_node_its_snapshots_are_gone(text: Path) -> None:
    plan = small_plan(text, mesh="rep=2 dp=2", axes={"data": ["rep", "dp"]})
    node = lost(plan, ranks_named("node:1/2", plan), survives=survives_on("node:1/2", plan, 1))
    assert (node.ranks, node.only) == ((2, 3), 0)
    assert "the last snapshot that was copied is on the nodes that are left" in node.sentences()[2]
    both = lost(plan, ranks_named("node:0,1/2", plan), survives=survives_on("node:0,1/2", plan, 1))
    assert "on these nodes alone" in both.sentences()[2]
    assert survives_on("node:1/2", plan, 0) is False
    assert survives_on("rank:1", plan, 0) is None


def test_the_command(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = plan_file(text.parent / "plan.toml", text)
    assert main(["launch", str(file), "--what-if-lost", "rank:1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["only"] == found["nbytes"] > 0
    assert main(["launch", str(file), "--what-if-lost", "rank:1"]) == 0
    assert capsys.readouterr().out.startswith("lost         rank 1 of 2: ")
