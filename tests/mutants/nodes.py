"""Mistakes planted in snapshots that stay on several nodes, and in what their launchers agree on."""

from tests.mutants.mutant import Mutant

_DEAL = "tests/checkpoint/test_exchange.py::test_every_wanted_block_is_read_once_and_comes_to_all_who_want_it"
_NODES = "tests/resilience/test_nodes.py::test_"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "read-where-it-is-not", "checkpoint/loading/assign_blocks.py",
        "able = np.flatnonzero(held[rows, some[0]])", "able = np.arange(len(rows))",
        "a block is read on a node that does not have its file", (_DEAL,),
    ),
    Mutant(
        "nobody-carries", "checkpoint/loading/assign_blocks.py",
        "np.flatnonzero(lacking & ~served)", "np.flatnonzero(lacking & served)",
        "what no node that wants it has is not sent by the one that has it", (_DEAL,),
    ),
    Mutant(
        "half-a-snapshot", "resilience/shares.py",
        "if by_number.keys() == set(range(first.of)):", "if first.number == 0:",
        "a snapshot is gone on from of which a share is nowhere",
        (_NODES + "all_go_on_from_the_newest_of_which_every_share_is_somewhere",),
    ),
    Mutant(
        "copies-unproved", "resilience/carrier.py",
        "if any(checksum(reading.read(BLOCK)) != expected for expected in stored.sums):", "if False:",
        "a copy on another node has other bytes than were written",
        (_NODES + "what_has_rotted_in_memory_is_not_copied",),
    ),
    Mutant(
        "first-word-counts", "resilience/nodes.py",
        "    if isinstance(error, RankError) and not error.details:\n        return 0\n", "",
        "who misses a killed rank is blamed for its end", (_NODES + "the_error_that_came_first_counts_on_all",),
    ),
    Mutant(
        "copied-one-too-far", "resilience/carrier.py",
        "(self._nodes.index + i) % self._nodes.count)", "(self._nodes.index + i - 1) % self._nodes.count)",
        "a node keeps its own share as the copy, and goes with it",
        (_NODES + "the_memory_of_any_one_node_may_be_lost",),
    ),
    Mutant(
        "turns-by-what-others-have", "checkpoint/loading/assign_blocks.py",
        "np.concatenate([wants, wants & held])", "np.concatenate([wants, held])",
        "of three nodes two mean others to read a block, and wait for ever",
        ("tests/checkpoint/test_exchange.py::test_every_wanted_block_is_read_once_and_comes_to_all_who_want_it",),
    ),
)
