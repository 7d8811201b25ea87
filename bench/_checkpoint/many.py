"""Conversions of as many tensors as a mixture has, of one element each: what each tensor costs, whatever its bytes."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from tangram.checkpoint.conversion.convert import IDENTITY, restructure
from tangram.checkpoint.conversion.converting import rare_collections
from tangram.checkpoint.conversion.find_mapping import choose
from tangram.checkpoint.formats.detect import TARGETS as FORMATS
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.inspect import diff, foreign, tree
from tangram.hardware.measuring.measure import Row

TARGETS = {20_000: 10.0, 300_000: 60.0}
"""CPU seconds of each conversion that are the aim."""
EVERY_PAIR = 20_000
"""Tensors up to which every pair of formats is measured; beyond, each is read once and written once."""
ALIKE = tuple(name for name, written in FORMATS.items() if written.structure != "paddle")
"""The formats that are compared: Paddle's tensors have other shapes, which only a configuration tells."""
WRITTEN = tuple(FORMATS)
"""The formats that are written; the first is made of a file of torch.save, the others each of the one before."""


def rows(root: Path, counts: tuple[int, ...]) -> Iterator[Row]:
    """Every pair of formats, then comparisons, verifications and trees."""
    for n in counts:
        folder = root / str(n)
        folder.mkdir()
        read = list(_of_others(folder, n))
        for source, to in zip((read[0], *WRITTEN), WRITTEN, strict=False):
            yield _row(n, f"{source} to {to}", partial(_converted, folder / source, to, folder / to))
        for source, to in itertools.product((*read, *WRITTEN), WRITTEN) if n <= EVERY_PAIR else ():
            yield _row(n, f"{source} to {to}, one of all pairs", partial(_tried, folder / source, to))
        for a, b in itertools.pairwise(ALIKE):
            yield _row(n, f"diff of {a} and {b}", partial(_refuse_unlike, folder / a, folder / b))
        for source in (read[0], *WRITTEN):
            yield _row(n, f"verify {source}", partial(_refuse_damaged, folder / source))
            yield _row(n, f"inspect {source}", partial(_inspected, folder / source))


def _row(n: int, what: str, work: Callable[[], object]) -> Row:
    begin = time.process_time()
    with rare_collections():
        work()
    return Row(f"{n:,} tensors, {what}", "s", time.process_time() - begin, target=TARGETS.get(n))


def _of_others(folder: Path, n: int) -> Iterator[str]:
    """The formats that are read and not written, by their paths; their tensors lie in one file."""
    tensors = {f"layers.{i // 10}.p{i % 10}.weight": torch.full((1,), float(i)) for i in range(n)}
    for name, saved in (
        ("file.pt", tensors),
        ("bin/pytorch_model.bin", tensors),
        ("ranks/model_world_size_1_rank_0.pt", tensors),
        ("deepspeed/mp_rank_00_model_states.pt", {"module": tensors}),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        torch.save(saved, folder / name)
        yield name.partition("/")[0]


def _converted(source: Path, to: str, target: Path) -> None:
    chosen = choose(open_any(source), to, None, text=IDENTITY)
    restructure(chosen.source, chosen.bound, target, to)


def _tried(source: Path, to: str) -> None:
    target = source.with_name("tried")
    _converted(source, to, target)
    shutil.rmtree(target)


def _inspected(path: Path) -> None:
    tree.tree(foreign.tensors_of(open_any(path)))


def _refuse_unlike(a: Path, b: Path) -> None:
    if not diff.compare_across(*diff.seen_as(open_any(a), open_any(b), None)).same:
        raise RuntimeError("other tensors came back than went")


def _refuse_damaged(path: Path) -> None:
    if not foreign.verify(path).sound:
        raise RuntimeError("what was written is damaged")
