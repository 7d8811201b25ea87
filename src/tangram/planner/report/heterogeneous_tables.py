"""What `tangram plan MODEL --cluster A.toml,B.toml` says, for people and programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tangram.models.outlines.outline import Outline
from tangram.planner.local.ranking_table import Titled
from tangram.planner.report.answer_tables import ZERO
from tangram.planner.search.heterogeneous import Mixed, Part
from tangram.planner.search.strategy import Ask, Choice


@dataclass(frozen=True)
class OverParts:
    """Everything that was found."""

    outline: Outline
    parts: tuple[Part, ...]
    ask: Ask
    between: float
    """Bytes per second that a device gets of another part's."""
    mixed: tuple[Mixed, ...]
    alone: tuple[Choice | None, ...]
    """Of each part the quickest plan on it without the others."""
    times: int
    """Where nothing was found: with how many times the memory something would be; 0: with none that was tried."""

    def tables(self) -> list[Titled]:
        """Titles, headers and rows."""
        beside = ("Beside it, each part alone", ("part", "mesh", "step", "than the first"), self._beside())
        if not self.mixed:
            return [("Nothing fits over the parts together", ("what",), [(self._too_small(),)]), beside]
        rate = f"{self.between / 1e9:g} GB/s between their devices"
        title = f"{self.outline.description} over {len(self.parts)} parts, {rate}"
        headers = ("", "mesh", "parts", "micro-batch x accumulation", "EP x TP of experts", "ZeRO", "recompute", "step",
                   "tokens/s/device")  # fmt: skip
        rows = [self._row(str(number), one) for number, one in enumerate(self.mixed, start=1)]
        return [
            (f"{title}, predicted without what runs have taught", headers, rows),
            (
                "Stages of the first",
                ("part", "devices", "layers of its stages", "longest stage", "memory", "may use"),
                [self._stages(self.mixed[0], place) for place in range(len(self.parts))],
            ),
            beside,
        ]

    def document(self) -> dict[str, object]:
        """The same for programs."""
        return {
            "model": self.outline.name,
            "between": self.between,
            "parts": [
                {"name": part.cluster.name, "devices": part.cluster.ranks, "limit": part.limit} for part in self.parts
            ],
            "strategies": [asdict(one) for one in self.mixed],
            "alone": [None if one is None else asdict(one) for one in self.alone],
            "fits_with_times_the_memory": None if self.mixed else self.times,
        }

    def _row(self, number: str, one: Mixed) -> tuple[str, ...]:
        names = ", then ".join(self._name(at) for at in one.parts)
        experts = f"{one.expert} x {one.expert_tensor}" if any(block.experts for block, _ in self.outline.runs) else ""
        return (
            number, one.mesh, names, f"{one.micro} x {one.micros}", experts, ZERO[one.zero], one.again,
            f"{one.step:.2f} s", f"{one.tokens_per_device:,.0f}",
        )  # fmt: skip

    def _stages(self, one: Mixed, place: int) -> tuple[str, ...]:
        at = one.parts[place]
        return (
            self._name(at), str(self.parts[at].cluster.ranks), runs_of(one.blocks[place]),
            f"{1e3 * one.stage[place]:.1f} ms", f"{one.memory[place] / 1e9:.1f} GB",
            f"{self.parts[at].limit / 1e9:.1f} GB",
        )  # fmt: skip

    def _beside(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for at, one in enumerate(self.alone):
            if one is None:
                rows.append((self._name(at), "nothing fits", "", ""))
                continue
            than = f"{one.step / self.mixed[0].step:.2f} times" if self.mixed else ""
            rows.append((self._name(at), one.mesh, f"{one.step:.2f} s", than))
        return rows

    def _name(self, at: int) -> str:
        """Of a part; with its number where others are called so, too."""
        names = [part.cluster.name for part in self.parts]
        return names[at] if names.count(names[at]) == 1 else f"{names[at]} ({at + 1})"

    def _too_small(self) -> str:
        if self.times:
            return f"with {self.times} times the memory of every part something fits"
        return "with 16 times the memory of every part nothing does either"


def runs_of(sizes: Sequence[int]) -> str:
    """Of stages in a row, as "1, 2, 2 x 3": how many stages, times their layers where they are several alike."""
    found: list[list[int]] = []
    for size in sizes:
        if found and found[-1][1] == size:
            found[-1][0] += 1
        else:
            found.append([1, size])
    return ", ".join(str(size) if count == 1 else f"{count} x {size}" for count, size in found)
