"""The ranking of plans for people and programs: the best plan of each row, one process beside it, what did not fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # these load torch, and tables of clusters need the type of a table alone
    from tangram.hardware.measuring.rates import Rates
    from tangram.planner.local.rank import Ranked

Titled = tuple[str, tuple[str, ...], list[tuple[str, ...]]]

HEADERS = ("", "plan", "mesh", "micro-batch", "memory", "step", "90 % interval", "tokens/s")


@dataclass(frozen=True)
class Ranking:
    """Every plan for a job on so many processes of this machine."""

    processes: int
    ranked: tuple[Ranked, ...]
    alone: Ranked | None
    """The best plan for one process; None where one process is what was asked for."""
    rates: Rates
    notes: tuple[str, ...] = ()
    """What it was corrected by, in sentences."""

    @property
    def fitting(self) -> tuple[Ranked, ...]:
        """The plans that can be run here, the best first."""
        return tuple(one for one in self.ranked if one.fits)

    def tables(self) -> list[Titled]:
        """Titles, headers and rows: what can be taken, the memory of it, and what cannot."""
        fitting = self.fitting
        rows = [_row(str(number), one) for number, one in enumerate(fitting, start=1)]
        if self.alone is not None and self.alone.estimate is not None:
            rows.append(_row("-", self.alone))
        seconds = [_seconds(str(number), one) for number, one in enumerate(fitting, start=1)]
        memory = [_memory(str(number), one) for number, one in enumerate(fitting, start=1)]
        tables: list[Titled] = []
        if rows:
            word = "process" if self.processes == 1 else "processes"
            tables.append((f"Plans for {self.processes} {word}, predicted", HEADERS, rows))
        if fitting and fitting[0].estimate:
            from tangram.planner.local.estimate import WORDS  # it is there already where something is estimated

            parts = tuple(WORDS.get(name, name) for name in asdict(fitting[0].estimate.seconds))
            tables.append(("A step, as estimated without what was measured", ("", "total", *parts), seconds))
        if memory:
            parts = tuple(asdict(fitting[0].estimate.memory)) if fitting[0].estimate else ()
            tables.append((f"Memory of a rank, of {megabytes(self.rates.memory)}", ("", "total", *parts), memory))
        refused = [one for one in self.ranked if not one.fits]
        if refused:
            said = [(one.name, one.mesh, str(one.micro_batch or ""), one.why_not) for one in refused]
            tables.append(("Not possible", ("plan", "mesh", "micro-batch", "why not"), said))
        return tables

    def as_json(self) -> dict[str, object]:
        """The same for programs; `plans` have the ones that fit first."""
        return {
            "processes": self.processes,
            "rates": asdict(self.rates),
            "notes": list(self.notes),
            "plans": [one.as_json() for one in self.ranked],
            "one_process": self.alone.as_json() if self.alone else None,
        }


def megabytes(nbytes: float) -> str:
    """As `planner.local.estimate` writes them."""
    from tangram.planner.local import estimate

    return estimate.megabytes(nbytes)


def _row(number: str, one: Ranked) -> tuple[str, ...]:
    if one.estimate is None:
        raise ValueError(f"{one.name} has no estimate")
    return (
        number,
        one.name,
        one.mesh,
        str(one.micro_batch),
        megabytes(one.estimate.memory.total),
        f"{1e3 * one.step:.0f} ms{', measured' if one.likely and one.likely.measured else ''}",
        f"{1e3 * one.likely.low:.0f} to {1e3 * one.likely.high:.0f} ms" if one.likely else "",
        f"{one.tokens_per_second:,.0f}",
    )


def _seconds(number: str, one: Ranked) -> tuple[str, ...]:
    if one.estimate is None:
        raise ValueError(f"{one.name} has no estimate")
    seconds = one.estimate.seconds
    return (number, *(f"{1e3 * part:.1f} ms" for part in (seconds.total, *asdict(seconds).values())))


def _memory(number: str, one: Ranked) -> tuple[str, ...]:
    if one.estimate is None:
        raise ValueError(f"{one.name} has no estimate")
    return (number, megabytes(one.estimate.memory.total), *map(megabytes, asdict(one.estimate.memory).values()))
