"""What the planner says of runs that users told of in public, beside what they measured. Run as a module.

Nothing is learned from these rows. A step is right where it lies in the interval, memory where the verdict is: a run
that fitted is not called out of memory (less than one chance in ten to fit), one that ran out is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench._planner import memories, predict
from bench._planner.rows import Case, cases, number, read, why_not
from tangram.planner.cost.calibration import Learned, Run, published
from tangram.planner.cost.memory import memory
from tangram.planner.search.strategy import probability
from tangram.planner.space.setting import Setting

THREADS = Path(__file__).parents[2] / "data" / "published" / "threads.csv"
UNSAFE = 0.1


@dataclass(frozen=True)
class Verdict:
    """Of one row."""

    step: float
    """Seconds that are predicted."""
    far: float
    """By what the interval's ends are longer and shorter, as a factor."""
    measured: float
    """nan where no step was told."""
    bytes_needed: float
    """Of the kind that the row tells of."""
    bytes_told: float
    fits: float
    """The chance to."""
    ran_out: bool

    @property
    def inside(self) -> bool:
        """Whether the step lies in its interval, or none was told."""
        return not self.measured > 0 or self.step / self.far <= self.measured <= self.step * self.far

    @property
    def right(self) -> bool:
        """Whether the verdict of memory is."""
        return (self.fits < UNSAFE) == self.ran_out


def verdict(case: Case, run: Run, learned: Learned) -> Verdict:
    """What is said of a row, with what published runs have taught."""
    step, spread = learned.correct([run])
    of = memory(case.outline, case.grid, Setting(None, case.framework, case.precision, case.node))
    fits = probability(float(of.device[0]), memories.usable(case))
    return Verdict(
        float(step[0]), float(np.exp(learned.half_of([run], spread)[0])), case.step, memories.predicted(case),
        number(case.row, "mem_gib", 0.0) * memories.GIB, fits, case.row["oom"] == "1",
    )  # fmt: skip


def main(path: Path) -> None:
    """Print a line a row, and what they come to."""
    rows = read(path)
    known = [one for one in cases(rows) if predict.known(one.gpu)]
    found = [verdict(one, run, published()) for one, run in zip(known, predict.runs(known), strict=True)]
    for one, said in zip(known, found, strict=True):
        print(
            f"{one.row['row']} {one.row['model']} {one.row['n_gpus']} x {one.gpu} {one.row['precision']}: "
            f"{said.step:.2f} s (x{said.far:.2f}), told {said.measured:.2f}, {'inside' if said.inside else 'OUTSIDE'}; "
            f"{said.bytes_needed / memories.GIB:.1f} GiB, told {said.bytes_told / memories.GIB:.1f}, "
            f"fits {said.fits:.2f}{', ran out' if said.ran_out else ''}, {'right' if said.right else 'WRONG'}"
        )
    off = [said.bytes_needed / said.bytes_told - 1 for said in found if said.bytes_told > 0]
    threads = {one.row["source"] for one in known}
    print(
        f"{sum(one.inside and one.right for one in found)} of {len(found)} runs of {len(threads)} threads inside the "
        f"interval with the right verdict; inside {sum(one.inside for one in found)}, verdict right "
        f"{sum(one.right for one in found)}; memory off by {np.median(np.abs(off)):.1%} (median of {len(off)})"
    )
    for row in rows:
        if why := why_not(row):
            print(f"{row['row']} is left out: {why}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else THREADS)
