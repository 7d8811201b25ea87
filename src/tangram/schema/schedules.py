"""The schedules of pipelines by name: what each needs, and its table.

    GPipe                 all forwards, then all backwards (Huang et al. 2019)
    1F1B                  forwards and backwards in turn, as soon as there is a backward (Narayanan et al. 2019)
    Interleaved1F1B       the same with several stages for each rank, dealt out in turn (Narayanan et al. 2021)
    LoopedBFS             all micro-batches through a stage before the rank's next one (Lamy-Poirier 2023)
    InterleavedZeroBubble as Interleaved1F1B, with gradients of weights where a rank would wait (ZB1P, Qi et al. 2024)
    ZBVZeroBubble         two stages for each rank, down the ranks and up again (ZB-V, Qi et al. 2024)
    DualPipeV             the same, forwards and backwards of unlike stages in pairs (DeepSeek 2024)

The orders are those of torch.distributed.pipelining, with which tests compare them action by action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tangram.errors import UserError
from tangram.schema.schedule_table import Action, Kind, Row, Schedule, parse


def looped(ranks: int, stages: int) -> tuple[int, ...]:
    """The rank of each stage, where they are dealt out in turn."""
    return tuple(stage % ranks for stage in range(stages))


def folded(ranks: int, stages: int) -> tuple[int, ...]:
    """The rank of each of two stages for every rank: down the ranks, and up again."""
    return tuple(min(stage, stages - 1 - stage) for stage in range(stages))


def forward_only(rank_of: tuple[int, ...], micros: int) -> Schedule:
    """Of an evaluation: each micro-batch goes through all stages, and there is no backward."""
    rows: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    for micro in range(micros):
        for stage, rank in enumerate(rank_of):
            rows[rank].append(Action(stage, "F", micro))
    return Schedule(tuple(map(tuple, rows)), rank_of, micros)


def _gpipe(rank: int, ranks: int, own: int, micros: int) -> Iterator[Action]:
    for kind in ("F", "B"):
        for micro in range(micros):
            yield Action(rank, kind, micro)


def _one_forward_one_backward(rank: int, ranks: int, own: int, micros: int) -> Iterator[Action]:
    early = ranks - 1 - rank
    for micro in range(micros + early):
        if micro < micros:
            yield Action(rank, "F", micro)
        if micro >= early:
            yield Action(rank, "B", micro - early)


def _looped_bfs(rank: int, ranks: int, own: int, micros: int) -> Iterator[Action]:
    stages = range(rank, ranks * own, ranks)
    for stage in stages:
        for micro in range(micros):
            yield Action(stage, "F", micro)
    for stage in reversed(stages):
        for micro in reversed(range(micros)):
            yield Action(stage, "B", micro)


def _rounds(ranks: int, micros: int) -> int:
    """In how many rounds micro-batches pass the stages of a rank."""
    return max(1, micros // ranks)


class _Counted:
    """Actions with each stage's micro-batches counted up, for each kind by itself."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, str], int] = {}

    def __call__(self, stage: int, kind: Kind) -> Action:
        """The next of a stage; B counts as I, too."""
        key = stage, "I" if kind == "B" else kind
        micro = self._next.get(key, 0)
        self._next[key] = micro + 1
        return Action(stage, kind, micro)


def _interleaved(rank: int, ranks: int, own: int, micros: int) -> Iterator[Action]:
    return _in_rounds(rank, ranks, own, micros, per_hop=2, split=False)


def _interleaved_zero_bubble(rank: int, ranks: int, own: int, micros: int) -> Iterator[Action]:
    return _in_rounds(rank, ranks, own, micros, per_hop=1, split=True)


def _in_rounds(rank: int, ranks: int, own: int, micros: int, *, per_hop: int, split: bool) -> Iterator[Action]:
    """`per_hop`: how many forwards more a rank begins with than the next one. `split`: W comes `rank` times later."""
    total, length = own * micros, micros // _rounds(ranks, micros)
    early = min((own - 1) * length + per_hop * (ranks - 1 - rank), total)
    count, weights = _Counted(), deque[int]()
    for turn in range(total + early):
        if turn < total:
            yield count(turn // length % own * ranks + rank, "F")
        if turn >= early:
            stage = (own - 1 - (turn - early) // length % own) * ranks + rank
            yield count(stage, "I" if split else "B")
            weights.append(stage)
            if split and turn - early >= rank:
                yield count(weights.popleft(), "W")
    if split:
        for stage in weights:
            yield count(stage, "W")


def _zero_bubble_v(rank: int, ranks: int, own: int, micros: int) -> Iterator[Action]:
    """Made for as many micro-batches as fill the pipeline; of fewer the others are left out."""
    return (action for action in _full_zero_bubble_v(rank, ranks, max(2 * ranks - 1, micros)) if action.micro < micros)


def _full_zero_bubble_v(rank: int, ranks: int, micros: int) -> Iterator[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    count = _Counted()
    begun, ended = 0, 0  # forwards of the one stage and of the other

    for _ in range(2 * (ranks - rank) - 1):
        yield count(down, "F")
        begun += 1
    for _ in range(rank):
        yield count(up, "F")
        yield count(down, "F")
        ended, begun = ended + 1, begun + 1
    for _ in range(ranks - rank):
        yield from (count(up, kind) for kind in ("F", "I", "W"))
        ended += 1
    while ended < begun or begun < micros:
        if begun < micros:
            yield count(down, "F")
            begun += 1
        yield from (count(down, kind) for kind in ("I", "W"))
        yield from (count(up, kind) for kind in ("F", "I", "W"))
        ended += 1
    for _ in range(rank):
        yield count(down, "I")
        yield count(up, "I")
    for _ in range(ranks - rank):
        yield count(down, "I")
        yield count(down, "W")
    for stage in (up, down):
        for _ in range(rank):
            yield count(stage, "W")


def _dual_pipe_v(rank: int, ranks: int, own: int, micros: int) -> Iterator[Action]:
    down, up, after = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    does = _Backwards()
    for _ in range(2 * after):
        yield does.count(down, "F")
    for _ in range(rank + 1):
        yield does.count(down, "F")
        yield does.count(up, "F")
    for _ in range(after):
        yield does.backward(up, split=True)
        yield from does.weights(1)
        yield does.count(up, "F")
    for _ in range(micros - 2 * ranks + rank + 1):
        for forward, backward in ((down, up), (up, down)):
            yield does.count(forward, "F")
            yield does.backward(backward)
    for _ in range(after):
        yield does.backward(up)
        yield does.count(up, "F")
        yield does.backward(down)
    yield from does.last(rank, after)


class _Backwards:
    """Backwards of DualPipeV: whole, or in two parts, of which the second waits for its turn."""

    def __init__(self) -> None:
        self.count = _Counted()
        self._waiting = deque[int]()

    def backward(self, stage: int, *, split: bool = False) -> Action:
        if split:
            self._waiting.append(stage)
        else:
            self.count(stage, "W")
        return self.count(stage, "I" if split else "B")

    def weights(self, most: int) -> Iterator[Action]:
        for _ in range(min(most, len(self._waiting))):
            yield self.count(self._waiting.popleft(), "W")

    def last(self, rank: int, after: int) -> Iterator[Action]:
        """The backwards that are left when there is no forward any more, split from the middle of them on."""
        down, up = rank, rank + 2 * after + 1
        for turn in range(2 * (rank + 1)):
            yield self.backward(down if turn % 2 else up, split=turn > rank)
        for _ in range(after):
            yield from self.weights(1)
            yield self.backward(down, split=True)
        yield from self.weights(len(self._waiting))


@dataclass(frozen=True)
class Maker:
    """One schedule."""

    row: Callable[[int, int, int, int], Iterator[Action]]
    """What a rank does, of so many ranks, stages for each and micro-batches."""
    own: int | None
    """How many stages each rank has; None: one or more."""
    rank_of: Callable[[int, int], tuple[int, ...]] = looped
    least: Callable[[int], int] = lambda ranks: 1
    """The fewest micro-batches that it takes."""
    rounds: bool = False
    """Whether micro-batches pass in rounds of one length."""
    splits: bool = False
    """Whether it does backwards in two parts."""


MAKERS: Mapping[str, Maker] = {
    "GPipe": Maker(_gpipe, 1),
    "1F1B": Maker(_one_forward_one_backward, 1, least=lambda ranks: ranks),
    "Interleaved1F1B": Maker(_interleaved, None, rounds=True),
    "LoopedBFS": Maker(_looped_bfs, None),
    "InterleavedZeroBubble": Maker(_interleaved_zero_bubble, None, rounds=True, splits=True),
    "ZBVZeroBubble": Maker(_zero_bubble_v, 2, folded, splits=True),
    "DualPipeV": Maker(_dual_pipe_v, 2, folded, least=lambda ranks: 2 * ranks, splits=True),
}


def stages_unlike(name: str, ranks: int, stages: int) -> str | None:
    """Why a schedule does not take so many stages, and the nearest number that it takes; None where it does."""
    own = MAKERS[name].own
    if stages == ranks * own if own else stages % ranks == 0:
        return None
    if own is None:
        nearest = ranks * max(1, round(stages / ranks))
        return f'with the schedule "{name}" each rank has as many as the others: give {nearest}'
    each = "one" if own == 1 else "two"
    return f'with the schedule "{name}" each has {each}: give {ranks * own}'


def micros_unlike(name: str, ranks: int, micros: int) -> str | None:
    """Why a schedule does not take so many micro-batches; None where it does."""
    maker = MAKERS[name]
    if micros < (least := maker.least(ranks)):
        return f'the schedule "{name}" takes {least} or more over {ranks} ranks'
    if maker.rounds and micros % (rounds := _rounds(ranks, micros)):
        return f'the schedule "{name}" takes {rounds} rounds of as many each over {ranks} ranks'
    return None


def nearest_micro_batch(name: str, ranks: int, micro_batch: int, share: int) -> int | None:
    """The size nearest to this in which a rank's `share` of a batch can pass, rather one that divides it."""
    fitting = (size for size in range(1, share + 1) if not micros_unlike(name, ranks, -(-share // size)))
    return min(fitting, key=lambda size: (abs(size - micro_batch) + (share % size > 0), size), default=None)


def read_table(path: str) -> Schedule:
    """One's own, from a file. Raises UserError for one that cannot be read or run."""
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the table {path} of pipeline.table cannot be read: {error}") from None


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> Schedule:
    return parse(Path(path).read_text(encoding="utf-8"), path)


def schedule(name: str, ranks: int, stages: int, micros: int) -> Schedule:
    """The table of that name. Raises UserError where there is none for these numbers."""
    if why := stages_unlike(name, ranks, stages):
        raise UserError(f"{stages} stages for {ranks} ranks: {why}")
    if why := micros_unlike(name, ranks, micros):
        raise UserError(f"{micros} micro-batches: {why}")
    maker = MAKERS[name]
    rows: list[Row] = [tuple(maker.row(rank, ranks, stages // ranks, micros)) for rank in range(ranks)]
    return Schedule(tuple(rows), maker.rank_of(ranks, stages), micros)
