"""Low-precision attention on the CPU, value-exact: errors of recipes; mutants that our criterion and others' find.

`--only`: a group of figures (errors, mutants). `--repeats`: on how many inputs, of seven, mutants are tried (1).
`--folder`: the documentation's folder, whose page `attention-numerics.md` gets its tables (only what lies between its
marks is replaced) and pictures. `--quick`: few recipes.

Errors are relative norms against float64; the peer is attention in bf16. Nothing here is timed, and a second run gives
the same numbers on the same torch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from bench._numerics import page
from bench._numerics.cases import TENSORS
from bench._numerics.metrics import Measured
from bench._numerics.study import CRITERIA, OURS, Score, errors, held_out, laws_of, put_to_the_test
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row
from tangram.kernels.lab.recipes import RECIPES

GROUPS = ("errors", "mutants")
FEW = ("bf16", "fp8 per tensor", "fp8 forward, bf16 backward", "nvfp4")


def rows(quick: bool, only: tuple[str, ...] = (), repeats: int = 1, folder: Path | None = None) -> Iterable[Row]:
    """The figures; with `folder` the page, too."""
    if unknown := [name for name in only if name not in GROUPS]:
        raise UserError(f"there is no group {unknown[0]!r} of figures here; known are {', '.join(GROUPS)}")
    if folder is not None and (quick or only):
        raise UserError("--folder writes a page of all figures: leave --quick and --only out")
    if folder is not None and not (folder / page.NAME).is_file():
        raise UserError(f'"{folder}" holds no {page.NAME}: give the folder of the documentation')
    wanted, names = only or GROUPS, FEW if quick else tuple(RECIPES)
    with _one_thread():
        yield from _rows(names, wanted, repeats, folder)


def _rows(names: Sequence[str], wanted: Sequence[str], repeats: int, folder: Path | None) -> Iterable[Row]:
    from bench._numerics.dumped import dumped  # loads transformers, which takes seconds

    model = dumped()
    found: list[tuple[str, Measured]] = []
    if "errors" in wanted:
        for law, one in errors(laws_of(model), names):
            found.append((law, one))
            yield _error(law, one, found)
    if "mutants" not in wanted:
        return
    inputs = held_out(model)
    score = put_to_the_test(inputs, names, min(repeats, len(inputs)), done=lambda name: None)
    yield from _scores(score)
    if folder is not None:
        page.write(folder, found, score, min(repeats, len(inputs)))


@contextmanager
def _one_thread() -> Generator[None]:
    """These tensors are small, and threads wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _error(law: str, one: Measured, found: list[tuple[str, Measured]]) -> Row:
    """The worst of the four tensors."""
    plain = next((x for other, x in found if other == law and x.recipe == "bf16"), None)
    peers = {"bf16": _worst(plain)} if plain is not None and plain is not one else {}
    return Row(f"{law}: {one.recipe}", "% error", _worst(one), peers)


def _worst(one: Measured) -> float:
    return 100 * max(one.against_inputs[name].relative for name in TENSORS)


def _scores(score: Score) -> Iterable[Row]:
    refused = {name: 100 * (1 - passed / score.wrong) for name, passed in score.passed.items()}
    accepted = {name: 100 * (1 - no / score.right) for name, no in score.refused.items()}
    ours, kept = refused.pop(OURS), accepted.pop(OURS)
    killed, pairs = sum(score.killed.values()), len(score.killed)
    yield Row(
        f"mutants refused, of {score.wrong} (mutant, recipe, input)", "%", ours, refused, target=100.0, better="higher"
    )
    yield Row(f"mutants refused on some input, of {pairs} (mutant, recipe)", "%", 100 * killed / pairs,
              target=100.0, better="higher")  # fmt: skip
    yield Row(f"right kernels accepted, of {score.right}", "%", kept, accepted, target=100.0, better="higher")
    yield Row("the furthest right kernel, of its limit", "ratio", score.nearest, target=1.0)
    for kind, own in score.kinds.items():
        peers = {name: 100 * (1 - own[name] / own[""]) for name in CRITERIA if name != OURS}
        yield Row(
            f"of these {kind}, {own['']}", "%", 100 * (1 - own[OURS] / own[""]), peers, target=100.0, better="higher"
        )
