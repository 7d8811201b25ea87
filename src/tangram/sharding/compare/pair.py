"""Runs cases in helper processes, and says of each what it found.

All cases of one number of ranks share one set of processes, since starting them costs far more than a case. The cases
do not share a process group: each has its own, so that a rank that raised leaves nothing behind for the next case.
A case that hangs or kills its process costs the set; a fresh one takes the cases after it. So those that are known
for it come last.

A case is a script that needs nothing but torch, put together of the source of the case's function and a frame that is
the same for all (`frame.txt`): a text and no module, since it does what only a program by itself may do: it starts
processes and a default process group, prints and exits. These very scripts are run, so that what is reported is what
the person who saves one will see.
"""

import faulthandler
import inspect
import json
import re
import runpy
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch.distributed import FileStore, PrefixStore

from tangram.errors import UserError
from tangram.hardware.host import workers
from tangram.hardware.host.channel import Json
from tangram.sharding.compare.bodies import FOUND_WITH, CompareCase, Verdict
from tangram.sharding.compare.table import CASES
from tangram.sharding.dtensor.rules import register
from tangram.text import packaged

_START = 180.0
"""Seconds in which the processes must have started, on however busy a machine."""

_CUT_SHORT = "with exit code 1 and without a result"
"""How the helper ends that was not done with a case in time."""

_Result = dict[str, Any]
_ORDER: tuple[Verdict, ...] = ("right", "wrong", "raises", "hangs", "not run")
"""From the mildest: the verdict of a case is the worst of its ranks'."""


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """What became of one case with the torch at hand."""

    name: str
    verdict: Verdict
    expected: str = ""
    """Shape and first values with plain torch."""
    got: str = ""
    """The same with DTensor, or why there is none, of the rank that fared worst."""
    error: float | None = None
    """The largest absolute difference on any rank; None where there is none to take, as for another shape."""
    seconds: float = 0.0
    """Both computations, on the slowest rank."""


def run(
    cases: Sequence[CompareCase] | None = None,
    save: Path | None = None,
    told: Callable[[PairOutcome], None] = lambda outcome: None,
    *,
    fixed: bool = False,
) -> list[PairOutcome]:
    """Run the cases (all of the table by default) on the installed torch; outcomes in the order of the cases, one for
    each name.

    `save`: a folder to put the scripts in, as NAME.py; it is made where there is none. `told` hears of each outcome as
    soon as it is known. `fixed`: with our rules in the place of DTensor's own. Raises UserError when the folder cannot
    be written.
    """
    chosen = list({case.name: case for case in (CASES if cases is None else cases)}.values())
    outcomes: dict[str, PairOutcome] = {}

    def tell(outcome: PairOutcome) -> None:
        outcomes[outcome.name] = outcome
        told(outcome)

    with tempfile.TemporaryDirectory(prefix="tangram-against-") as temporary:
        scripts = _write(chosen, Path(temporary) if save is None else save)
        for ranks in sorted({case.ranks for case in chosen}):
            left = [case for case in chosen if case.ranks == ranks]
            left.sort(key=lambda case: case.expected == "hangs")
            while left:
                left = _set_of_processes(left, scripts, ranks, Path(temporary), tell, fixed)
    return [outcomes[case.name] for case in chosen]


def _write(cases: Sequence[CompareCase], folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for case in cases:
            folder.joinpath(f"{case.name}.py").write_text(script(case))
    except OSError as error:
        raise UserError(f"the scripts cannot be written to {folder} ({error.strerror}); name another folder") from error
    return folder.absolute()


def _set_of_processes(
    cases: list[CompareCase],
    scripts: Path,
    ranks: int,
    temporary: Path,
    tell: Callable[[PairOutcome], None],
    fixed: bool,
) -> list[CompareCase]:
    """Start processes, tell what they find of the cases in turn; the cases that are left when one has cost them."""
    with tempfile.TemporaryDirectory(dir=temporary) as name:
        folder = Path(name)
        todo: list[Json] = [
            {"name": case.name, "script": str(scripts / f"{case.name}.py"), "limit": case.limit} for case in cases
        ]
        jobs = [
            workers.Job(
                f"{__name__}:work", {"todo": todo, "rank": rank, "ranks": ranks, "folder": name, "fixed": fixed}
            )
            for rank in range(ranks)
        ]
        ended = workers.run(jobs, _START + sum(case.limit for case in cases))
        heard = [_heard(folder / f"{rank}.jsonl") for rank in range(ranks)]
    for number, case in enumerate(cases):
        found = [one[case.name] for one in heard if "verdict" in one.get(case.name, {})]
        if len(found) == ranks:
            tell(_sum_up(case, found))
            continue
        began = any(case.name in one for one in heard)
        tell(_unfinished(case, found, ended, began))
        if began:
            return cases[number + 1 :]
    return []


def _heard(path: Path) -> dict[str, _Result]:
    """What a rank has left, by case; the last line is of what it was at when it ended."""
    heard: dict[str, _Result] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):  # the process may have been ended while it wrote
            found = cast(_Result, json.loads(line))
            heard[found["name"]] = found
    return heard


def _sum_up(case: CompareCase, found: list[_Result]) -> PairOutcome:
    worst = max(found, key=lambda one: (_ORDER.index(one["verdict"]), one.get("error", 0.0)))
    return PairOutcome(
        case.name,
        worst["verdict"],
        worst.get("expected", ""),
        worst["got"],
        max((one["error"] for one in found if "error" in one), default=None) if "error" in worst else None,
        max(one.get("seconds", 0.0) for one in found),
    )


def _unfinished(case: CompareCase, found: list[_Result], ended: Sequence[workers.Outcome], began: bool) -> PairOutcome:
    """The case that some rank did not finish: it hung, or it ended the process."""
    own = [one.error for one in ended if one.error is not None and not one.error.startswith("ended because")]
    why = next(iter(own), "the processes ended without a word")
    if not began:
        return PairOutcome(case.name, "not run", got=why)
    expected = next((one["expected"] for one in found if "expected" in one), "")
    if "with signal" in why:
        return PairOutcome(case.name, "raises", expected, why)
    if not why.endswith(_CUT_SHORT) and not why.startswith("not done"):
        return PairOutcome(case.name, "not run", expected, why)
    others = f"; another rank {found[0]['verdict']}: {found[0]['got']}" if found else ""
    return PairOutcome(case.name, "hangs", expected, f"a rank was not done within {case.limit:g} s{others}")


def work(todo: list[dict[str, Any]], rank: int, ranks: int, folder: str, fixed: bool = False) -> None:
    """One rank of a set of processes: run the scripts' cases in turn, and leave a line for each before going on."""
    if fixed:
        register()
    store = FileStore(f"{folder}/store", ranks)
    with Path(folder, f"{rank}.jsonl").open("w", buffering=1) as lines:
        for one in todo:

            def report(found: _Result, name: str = one["name"], limit: float = one["limit"]) -> None:
                lines.write(json.dumps({"name": name, **found}) + "\n")
                if found:  # who is done waits longer than who hangs: the first to end is the one that did not answer
                    faulthandler.dump_traceback_later(2 * limit, exit=True)

            report({})
            frame = runpy.run_path(one["script"])
            faulthandler.dump_traceback_later(one["limit"], exit=True)
            frame["on_rank"](rank, ranks, PrefixStore(one["name"], store), report)
            faulthandler.cancel_dump_traceback_later()


_IMPORTS = {
    "sys": "import sys",
    "tempfile": "import tempfile",
    "time": "import time",
    "Callable": "from collections.abc import Callable",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "F": "import torch.nn.functional as F",
    "Tensor": "from torch import Tensor",
    "Store": "from torch.distributed import Store",
    "DeviceMesh": "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh",
    "DTensor": "from torch.distributed.tensor import DTensor, distribute_tensor",
    "local_map": "from torch.distributed.tensor.experimental import local_map",
    "register_sharding": "from torch.distributed.tensor.experimental import register_sharding",
}
"""What a name in the script needs; only what a script uses is in it."""

_PLACEMENTS = ("Placement", "Replicate", "Shard")

_HEAD = '''"""{title}

Operator: {operator}
Inputs placed as: {inputs}. What is compared: {compared}.
With torch {torch}: {found}.{issue}

Starts {ranks} processes that talk over gloo, and needs nothing but torch.
Exit code 0: DTensor gives what plain torch gives; 1: it gives something else; 2: it raises or hangs.
"""
'''


def script(case: CompareCase) -> str:
    """The text of a Python program that shows the case."""
    body = _without_remarks(textwrap.dedent(inspect.getsource(case.body)))
    settings = "".join(f", {key}={json.dumps(value)}" for key, value in case.settings.items())
    constants = (
        f"RANKS = {case.ranks}\nLIMIT = {case.limit:g}  # seconds\nPlace = Callable[[Tensor, Placement], Tensor]"
    )
    call = f"def case(place: Place) -> Tensor:\n    return {case.body.__name__}(place{settings})"
    code = "\n\n\n".join([constants, body.strip(), call, packaged("tangram.sharding.compare", "frame.txt")])
    return f"{_head(case)}\n{_imports(code)}\n\n{code}"


def _head(case: CompareCase) -> str:
    return _HEAD.format(
        title=textwrap.fill(f"{case.name}: {case.wrong}", 110),
        operator=case.operator,
        inputs=", ".join(map(short, case.inputs)),
        compared="the result" if case.direction == "forward" else "a gradient",
        torch=FOUND_WITH,
        found=case.expected,
        issue=f" Reported as {case.issue}." if case.issue else "",
        ranks=case.ranks,
    )


def short(placement: object) -> str:
    """A placement as one writes it: `Shard(1)`."""
    return re.sub(r"\bdim=", "", repr(placement))


def _imports(code: str) -> str:
    lines = [line for name, line in _IMPORTS.items() if re.search(rf"(?<![\w.\"']){name}\b", code)]
    placements = ", ".join(name for name in _PLACEMENTS if re.search(rf"\b{name}\b", code))
    lines.append(f"from torch.distributed.tensor.placement_types import {placements}")
    standard = [line for line in lines if "torch" not in line]
    return "\n".join([*standard, "", *(line for line in lines if "torch" in line)])


def _without_remarks(source: str) -> str:
    """Without what only our own linter and type checker read."""
    return re.sub(r"\s+# (noqa|pyright|type):.*", "", source)
