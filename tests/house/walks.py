"""How far it is from one thing to another in Tangram: files that a real run crosses, and climbs between rooms.

    python -m tests.house.walks            every walk, with its counts (`make walks`)
    python -m tests.house.walks NAME       one of them, with its files and climbs, one a line

A walk is a call that is really made, watched with `sys.setprofile`. A file is crossed when a function of it is called;
a climb is a call from a file into a file of a higher room, which imports cannot do and a callback, a method or a value
that is carried can: who reads the code has to look upstairs to see what comes next. Code that runs as a module is
imported is no part of a walk. Most of what is crossed lies behind the doors of libraries, as `derive` or `capture`,
which are walks of their own: so the files of the rooms that a walk is about are counted apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType

import tangram
from tests.house.walls import ROOMS

SOURCE = str(Path(tangram.__file__).parent)
ROOT = Path(__file__).parents[2]
Climb = tuple[str, str]
"""From a file to a file of a higher room."""


def room_of(file: str) -> int:
    """How high the room of a file is; -1: beside the rooms."""
    room = file.partition("/")[0]
    return ROOMS.index(room) if room in ROOMS else -1


class Watch:
    """Notes the files of Tangram in which functions are called, and the climbs between them."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.climbs: list[Climb] = []
        self._known: dict[CodeType, str] = {}

    def file_of(self, code: CodeType) -> str:
        """The file of a code, within the package; "" for other people's."""
        if code not in self._known:
            name = code.co_filename
            self._known[code] = name.removeprefix(SOURCE).lstrip("/") if name.startswith(SOURCE) else ""
        return self._known[code]

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """As `sys.setprofile` calls it."""
        if event != "call":
            return
        file = self.file_of(frame.f_code)
        if not file:
            return
        caller = frame.f_back
        while caller is not None and not self.file_of(caller.f_code):
            if caller.f_code.co_filename.startswith("<frozen importlib"):
                return
            caller = caller.f_back
        if frame.f_code.co_name == "<module>":
            return
        if file not in self.files:
            self.files.append(file)
        before = "" if caller is None else self.file_of(caller.f_code)
        climb = before, file
        if before and room_of(before) < room_of(file) and climb not in self.climbs and room_of(before) >= 0:
            self.climbs.append(climb)


def walk(call: Callable[[], object]) -> tuple[list[str], list[Climb]]:
    """The files that a call crosses, in order, and its climbs."""
    watch = Watch()
    before = sys.getprofile()
    sys.setprofile(watch.see)
    try:
        call()
    finally:
        sys.setprofile(before)
    return watch.files, watch.climbs


def job_to_plan() -> tuple[list[str], list[Climb]]:
    """From the quickstart's job, as a file, to the plan that `tangram train` runs for two processes."""
    from tangram.schema.files import load
    from tangram.training.trials.local_plans import plans_of

    file = ROOT / "examples/quickstart/job.toml"

    def plan() -> None:
        assert plans_of(load(file), 2).ranked[0].plan is not None

    return walk(plan)


WALKS: Mapping[str, tuple[Callable[[], tuple[list[str], list[Climb]]], tuple[str, ...]]] = {
    "a job to its plan": (job_to_plan, ("schema", "planner", "training")),
}
"""What is measured, by name, and the rooms that it is about."""


def within(files: Iterable[str], rooms: Sequence[str]) -> list[str]:
    """The files of some rooms."""
    return [file for file in files if file.partition("/")[0] in rooms]


def main() -> None:
    """The command line."""
    wanted = " ".join(sys.argv[1:])
    for name, (measure, rooms) in WALKS.items():
        if wanted and wanted != name:
            continue
        files, climbs = measure()
        own = f"{len(within(files, rooms))} of {', '.join(rooms)}"
        print(f"{name}: {len(files)} files ({own}), {len(climbs)} climbs")
        if wanted:
            print(*files, *(f"{low} -> {high}" for low, high in climbs), sep="\n")


if __name__ == "__main__":
    main()
