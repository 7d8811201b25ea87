"""Mistakes planted in what `tangram.relayout` does between ranks, by file."""

from tests.mutants.mutant import Mutant

_EXCHANGE = "tests/relayout/test_exchange.py"
_PARTS = "tests/relayout/test_exchange_parts.py"
_EVERY_WAY = _EXCHANGE + "::test_every_pattern_by_every_way"
_JOBS = _EXCHANGE + "::test_codecs_fills_ties_and_odd_shapes"
_WRONG = _EXCHANGE + "::test_what_is_wrong_on_one_rank_is_said_on_all_and_nothing_is_written"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "digests-not-compared", "relayout/exchange/redistribute.py",
        "if check.cell.source is None or torch.equal(", "if True or torch.equal(",
        "tied weights on two ranks that differ are moved without a word", (_WRONG,),
    ),
    Mutant(
        "served-buffers-shared", "relayout/exchange/redistribute.py",
        "        refuse_shared(self._bound, self._sources, self._targets)\n", "",
        "what others want is overwritten while it is sent", (_WRONG,),
    ),
    Mutant(
        "served-in-part", "relayout/exchange/redistribute.py",
        "or sum(box_size(b) for _, b in lies) != box_size(r.box):", "and False:",
        "what is not here is sent as whatever lies in memory", (_WRONG,),
    ),
    Mutant(
        "tied-part-confused", "relayout/exchange/redistribute.py",
        "cell.source if r.part == 0 else cell.tied[r.part - 1]", "cell.source",
        "a tied copy is compared with itself", (_WRONG,),
    ),
    Mutant(
        "messages-unsorted", "relayout/exchange/redistribute.py",
        "some.sort(key=lambda pair: -pair[1].wire.dtype.itemsize)", "some.sort(key=lambda pair: 0)",
        "an element lies across two rounds", (_JOBS,),
    ),
    Mutant(
        "codec-twice", "relayout/exchange/messages.py",
        "buffer.copy_(block if segment.wire.early else coded(", "buffer.copy_(coded(",
        "a codec is applied by the sender and by the receiver", (_JOBS,),
    ),
    Mutant(
        "cut-between-bytes", "relayout/exchange/messages.py",
        "self.nbytes * i // rounds // ALIGNED * ALIGNED", "self.nbytes * i // rounds",
        "a round ends inside an element", (_EVERY_WAY,),
    ),
    Mutant(
        "rows-counted-down", "relayout/exchange/messages.py",
        "a, b = -(-first // row), stop // row", "a, b = first // row, stop // row",
        "a row is sent twice", (_PARTS + "::test_a_box_is_cut_in_row_major_order",),
    ),
    Mutant(
        "fault-in-the-midst", "relayout/exchange/rounds.py",
        "            self._faults.append(error)", "            del error",
        "what one rank could not write is taken as written",
        (_EXCHANGE + "::test_a_rank_that_fails_in_the_midst_is_heard_of",),
    ),
    Mutant(
        "memory-of-one-side", "relayout/exchange/rounds.py", "staged = of.received + ", "staged = ",
        "a rank that only receives packs everything at once", (_EVERY_WAY,),
    ),
    Mutant(
        "gathered-unevenly", "relayout/exchange/rounds.py",
        "len({r.alike for r in ranks}) == 1", "all(r.alike > 0 for r in ranks)",
        "an all-gather of different lengths", (_PARTS + "::test_the_way_follows_from_the_pattern",),
    ),
    Mutant(
        "lane-read-early", "relayout/exchange/shared_lanes.py",
        "for i in [i for i in left if self._lanes[i].packed > k]:", "for i in list(left):",
        "a lane is read before it is filled", (_EVERY_WAY, _JOBS),
    ),
    Mutant(
        "gone-not-seen", "relayout/exchange/shared_lanes.py", "if (rank := self._missed()) is not None:", "if False:",
        "the ranks wait for ever for one that was killed",
        (_PARTS + "::test_a_rank_that_is_killed_is_missed_by_the_others",),
    ),
    Mutant(
        "who-left-is-blamed", "relayout/exchange/shared_lanes.py",
        "next(iter(said + ended), None)", "next(iter(ended + said), None)",
        "a rank that left because another was killed is blamed for it",
        (_PARTS + "::test_who_was_killed_is_blamed_by_all",),
    ),
    Mutant(
        "replicas-from-the-first", "relayout/copies/pieces.py", "return place ^ near if", "return place if",
        "all ranks ask one of those that hold a replica", (_EXCHANGE + "::test_replicas_are_spread",),
    ),
)
# fmt: on
