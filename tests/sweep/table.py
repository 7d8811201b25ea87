"""docs/swept.md, made of what two ranks made of each model: `python -m tests.sweep.table` runs all of them anew.

    python -m tests.sweep.table llama vit    these types of transformers alone, or classes of torch.nn by name
    python -m tests.sweep.table --page       the page alone, from what was found before

What was found is kept in results.tsv: a name, what came of it, and the sentence.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tangram.training.run.launch import run_ranks
from tests.sweep import modules, published
from tests.sweep.ranks import Result, run_all
from tests.sweep.sizes import kinds

KEPT = Path(__file__).with_name("results.tsv")
PAGE = Path(__file__).parents[2] / "docs" / "swept.md"
GROUP = 12
"""So many models share a start of ranks."""
_INTRODUCTION = """# Swept models

Types of transformers and classes of `torch.nn`, each tiny and with its own defaults (dropout on, every flag as the
class has it), over two ranks beside one process: two calls in training and two in evaluation,
every result and gradient.
Tensors are cut by the marks that come with a type, else by transformers' `tp_plan`, else by the marks of a type that
calls its modules the same, else by samples; a module of `torch.nn` by samples and by its first weight. The page is
made by `python -m tests.sweep.table`; `make slow` runs some of it with every commit, and fails where anything else
comes out.
"""


def sentence(text: str) -> str:
    """A reason without what is of this machine, or of the tests' own lines."""
    text = re.sub(r"\S*/(tests/\S+?\.py):\d+", r"\1", text)
    return " ".join(text.split())[:400]


def of_modules(name: str) -> bool:
    """Whether a name is of a class of `torch.nn`."""
    return name.split(",")[0] in _NAMES


_NAMES = frozenset(modules.names())


def read() -> dict[str, Result]:
    """What was found before, by name."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return {name: Result(name, what, why) for name, what, why in (line.split("\t") for line in lines)}


def write(found: Mapping[str, Result]) -> None:
    """Keep it, and make the page."""
    KEPT.write_text("".join(f"{name}\t{one.what}\t{one.why}\n" for name, one in sorted(found.items())))
    PAGE.write_text(page(found))


def page(found: Mapping[str, Result]) -> str:
    """The page as it should be."""
    lines = [_INTRODUCTION]
    for title, of in (("Types of transformers", False), ("Classes of torch.nn", True)):
        own = [one for name, one in sorted(found.items()) if of_modules(name) == of]
        lines += [f"## {title}\n", f"Equal ({_count(own, 'equal')}): {_listed(own, 'equal')}.\n"]
        lines += ["| refused | with |", "|---|---|"]
        by_reason: dict[str, list[str]] = {}
        for one in own:
            if one.what == "refused":
                by_reason.setdefault(one.why, []).append(one.name)
        lines += [f"| {', '.join(names)} | {_escaped(why)} |" for why, names in sorted(by_reason.items())]
        for what, words in (("wrong", "Known to be wrong"), ("crash", "Known to end in a traceback")):
            if _count(own, what):
                lines.append(f"\n{words}: {_listed(own, what)}.")
        lines.append(
            f"\nNot compared, for one process does not run them so small: {_listed(own, 'unfit') or 'none'}.\n"
        )
        left = [name for name in (modules.names() if of else kinds()) if not any(one.name == name for one in own)]
        lines += [f"Not run yet ({len(left)}): {', '.join(left)}.\n"] if left else []
    return "\n".join(lines).rstrip() + "\n"


def _count(found: Iterable[Result], what: str) -> int:
    return sum(one.what == what for one in found)


def _listed(found: Iterable[Result], what: str) -> str:
    return ", ".join(one.name.replace(", ", " with ") for one in found if one.what == what)


def _escaped(text: str) -> str:
    return re.sub(r"([*_|<>])", r"\\\1", text)


def run(names: Sequence[str]) -> list[Result]:
    """What two ranks make of some models of one kind: types, or classes of `torch.nn`."""
    make = modules.cases if of_modules(names[0]) else published.cases
    (found, _) = run_ranks(run_all, partial(make, names), world=2, on_event=lambda _: None, device="cpu")
    return [Result(one.name, one.what, sentence(one.why)) for one in found]


def groups(names: Iterable[str]) -> list[list[str]]:
    """Names in groups, types and classes apart; of a class once."""
    firsts = [*dict.fromkeys(name.split(",")[0] for name in names)]
    sorts = ([n for n in firsts if not of_modules(n)], [n for n in firsts if of_modules(n)])
    return [
        own[i : i + size] for own, size in zip(sorts, (GROUP, 4 * GROUP), strict=True) for i in range(0, len(own), size)
    ]


def main(arguments: Sequence[str]) -> None:
    """As above."""
    found = read()
    if "--page" not in arguments:
        for group in groups(arguments or [*kinds(), *modules.names()]):
            found |= {one.name: one for one in run(group)}
            write(found)
    write(found)


if __name__ == "__main__":
    main(sys.argv[1:])
