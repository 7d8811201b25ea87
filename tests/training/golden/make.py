"""Write the golden losses: what the runs of `tests/training/oracle` lose, step by step, in a file for each.

    python -m tests.training.golden.make

They say whether training is what it was when they were made; whether it is right, the oracle says. Make them anew after
a change that is meant to change losses, and say so in the commit.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tangram.training.run.launch import run_ranks
from tests.training.oracle.cases import Case, cases
from tests.training.oracle.warm import Work, prepared, work

FOLDER = Path(__file__).parent
GOLDEN = (
    "fsdp",
    "copies",
    "hsdp",
    "tensor",
    "tensor inside fsdp",
    "tied: tensor inside fsdp",
    "biases: tensor inside fsdp",
)
RELATIVE = 1e-4


def file_of(case: str) -> Path:
    return FOLDER / (re.sub("[^a-z0-9]+", "-", case) + ".json")


def settings(case: Case) -> dict[str, Any]:
    """The plan, without the paths of this machine and without what nobody has set."""
    plan = case.plan.model_dump(mode="json", exclude_defaults=True)
    plan["data"].pop("cache", None)
    plan["data"]["sources"][0]["path"] = "written by tests.training.small"
    if plan["model"].get("path"):
        plan["model"]["path"] = Path(plan["model"]["path"]).name
    return plan


def page(case: Case, losses: tuple[float, ...]) -> dict[str, Any]:
    """What stands in the file."""
    return {
        "case": case.name,
        "made with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "plan": settings(case),
        "losses": list(losses),
    }


def difference(golden: Mapping[str, Any], case: Case, losses: tuple[float, ...]) -> str:
    """A sentence on where today's run is another; empty where it is the same."""
    if golden["plan"] != settings(case):
        return "it was made with other settings: make it anew (python -m tests.training.golden.make)"
    if len(golden["losses"]) != len(losses):
        return f"it has {len(golden['losses'])} losses, today's run has {len(losses)}"
    for step, (then, now) in enumerate(zip(golden["losses"], losses, strict=True), 1):
        if not abs(now - then) <= RELATIVE * abs(then):
            return f"the loss of step {step} is {now}; it was {then} with torch {golden['made with']['torch']}"
    return ""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(folder)
        chosen = {key: case for key, case in cases(folder / "text").items() if key in GOLDEN}
        done = run_ranks(work, Work(chosen, {}, None, folder), world=4, on_event=print, device="cpu")
        for key, case in chosen.items():
            text = json.dumps(page(case, done[0].traces[key].losses), indent=1)
            file_of(key).write_text(text + "\n", encoding="utf-8")
            print(file_of(key))


if __name__ == "__main__":
    main()
