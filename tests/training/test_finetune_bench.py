"""The bench of fine-tuning: its groups that need no minutes."""

import json

import pytest

from bench import finetune
from tangram.cli import main
from tangram.errors import UserError


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_the_bench_of_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "finetune", "--quick", "--only", "packing", "--only", "meshes", "--json"]) == 0
    rows = {row["figure"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["best fit: places with a token"]["ours"] > 0.97
    assert (
        rows["best fit: places with a token"]["ours"]
        > 3 * rows["a conversation to a sample of 1,024: places with a token"]["ours"]
    )
    kept = rows["QLoRA, fsdp=2: bytes kept on a rank"]
    assert kept["met"]
    assert kept["ratio"] > 0.95
    assert rows["QLoRA, fsdp=2: losses of 4 steps beside one process's"]["met"]


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(UserError, match="has no group 'speeds': it has speed, meshes, packing, lines"):
        list(finetune.rows(True, ("speeds",)))
