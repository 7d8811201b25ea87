"""`tangram plan FILE|MODEL ...` without a command: the command that its options say; options by their former names.

`tangram plan` was one command once. What was typed then is still read: the command is guessed, a former name of an
option stands for today's, which is said on stderr. The trade-off: a job whose file is named as a command (`show`) has
to be given as `./show`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from tangram.errors import UserError

COMMANDS = ("local", "cluster", "explain", "export", "show", "history")
FORMER: Mapping[str, str] = {
    "--again": "--recompute", "--chunks": "--virtual-stages", "--micro": "--micro-batch", "--uneven": "--fewer-layers",
    "--export": "--to", "--emit": "--job-file",
}  # fmt: skip
"""Options by the names that they had, and have."""
HELP = ("--help",)
HERE = ("--measure", "--processes", "-n", "--stages", "--anew", "--limit")
"""Options of a job on this machine alone."""
OF_CLUSTERS = (
    "--explain", "--to", "--job-file", "--timeline", "--report", "--objective", "--train-tokens", "--tokens", "--hours",
    "--price", "--watts", "--kwh", "--pareto", "--mtbf", "--checkpoint-s", "--restart-s", "--snapshots", "--failures",
    "--runs", "--optimiser", "--offload", "--loss", "--lora", "--base", "--imbalance", "--checkpoint-every",
    "--documents", "--image-tokens", "--lora-targets", "--train-embeddings",
    "--tokens-per-batch", "--seq",
    "--precision", "--framework", "--gpus", "--memory", "--without", "--between",
)  # fmt: skip
"""And of what is planned for a cluster alone."""


def with_command(words: Sequence[str]) -> list[str]:
    """The words with a command in front, as it is typed or as the options say, and today's names of options.

    Raises UserError for an option that is none of the command that the others say.
    """
    words = [part for word in words for part in _today(word)]
    if not words or words[0] in COMMANDS or (words[0] in HELP and len(words) == 1):
        return list(words)
    names = {word.partition("=")[0] for word in words}
    if "--cluster" in names and (other := [name for name in ("--show", "--history") if name in names]):
        raise UserError(f"{other[0]} is of a job on this machine: leave it or --cluster out")
    if "--history" in names:
        return ["history", *_without(words, "--history", 0)[0]]
    if "--show" in names:
        return ["show", *_without(words, "--show", 0)[0]]
    _refuse_others(names)
    if names & {"--to", "--job-file"}:
        words, strategy = _without(words, "--explain", 1)
        return ["export", *words, *(["--strategy", strategy] if strategy else [])]
    if "--explain" in names:
        words, strategy = _without(words, "--explain", 1)
        model = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
        return ["explain", *words[: model + 1], strategy, *words[model + 1 :]]
    return ["cluster" if "--cluster" in names else "local", *words]


def _refuse_others(names: Collection[str]) -> None:
    if "--objective" in names and "--explain" in names:
        raise UserError("--objective ranks strategies, and explain looks at one: give one of the two")
    if "--between" in names and (other := [name for name in ("--explain", "--to", "--job-file") if name in names]):
        raise UserError(f"{other[0]} is of a cluster of one part: leave it out, or name one cluster")
    if "--cluster" in names:
        if other := [name for name in HERE if name in names]:
            raise UserError(f"{other[0]} is of a job on this machine: leave it or --cluster out")
    elif other := [name for name in OF_CLUSTERS if name in names]:
        raise UserError(f"{other[0]} is of what is planned for a cluster: give one with --cluster, or leave it out")


def _today(word: str) -> list[str]:
    name, equals, value = word.partition("=")
    if name not in FORMER:
        return [word]
    print(f"{name} is {FORMER[name]} now", file=sys.stderr)
    return [f"{FORMER[name]}{equals}{value}"]


def _without(words: Sequence[str], option: str, values: int) -> tuple[list[str], str]:
    """The words without an option and its value, and the value."""
    kept: list[str] = []
    value, rest = "", iter(words)
    for word in rest:
        name, equals, after = word.partition("=")
        if name != option:
            kept.append(word)
        elif values:
            value = after if equals else next(rest, "")
    return kept, value
