"""Mistakes planted in `tangram.relayout`'s collectives and sequences of them, by file."""

from tests.mutants.mutant import Mutant

_SEQUENCES = "tests/relayout/test_sequences.py"
_RUN = _SEQUENCES + "::test_every_rank_has_its_target_and_receives_what_is_said"
_BEST = _SEQUENCES + "::test_no_sequence_of_any_length_receives_less"
_RUN_CASES = _SEQUENCES + "::test_cases"
_NEST = _SEQUENCES + "::test_axes_that_do_not_nest_are_refused"
_SLOW = _SEQUENCES + "::test_slow_links_carry_parts"
_SHARE = _SEQUENCES + "::test_replicas_share_what_is_to_be_reduced"
_REFUSALS = _SEQUENCES + "::test_refusals"
_RANKS = "tests/relayout/test_collectives.py"
_CLUSTER = "tests/hardware/test_cluster.py"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    # ---------------------------------------------------------------- collectives
    Mutant(
        "gather-not-summed-back", "relayout/collectives/one_collective.py",
        '("sum", "cut"): REDUCE_SCATTER', '("sum", "cut"): SLICE',
        "the gradient of what each rank used otherwise is the first ranks' alone", (_RANKS,),
    ),
    Mutant(
        "dual-of-several-is-same", "relayout/collectives/one_collective.py",
        '"several": "sum", "sum"', '"several": "same", "sum"',
        "gradients of what ranks use each otherwise are not summed", (_RANKS,),
    ),
    Mutant(
        "zero-on-no-rank", "relayout/collectives/one_collective.py", "if me == 0 else", "if me >= 0 else",
        "every rank keeps the summand, and the sum is k times too large", (_RANKS,),
    ),
    Mutant(
        "gathered-blocks-in-a-row", "relayout/collectives/one_collective.py",
        "blocks = parts.reshape(k, *before, outer, n // outer, *after).movedim(0, dim + 1)",
        "blocks = parts.reshape(k, *before, outer, n // outer, *after).movedim(0, dim)",
        "parts of blocks are joined block after block", (_RANKS,),
    ),
    Mutant(
        "recut-in-the-givers-order", "relayout/collectives/one_collective.py",
        "torch.cat(theirs).argsort()", "torch.cat(theirs)",
        "rows of a dim that is cut in other blocks are out of order", (_RANKS,),
    ),
    Mutant(
        "slice-keeps-all", "relayout/collectives/one_collective.py",
        "[me].clone(memory_format=torch.contiguous_format)", "[me]",
        "a part keeps the whole tensor alive", (_RANKS,),
    ),
    # ---------------------------------------------------------------- digits
    Mutant(
        "minor-digit-first", "relayout/collectives/digits.py", "outer = spot.outer * (stride * k // high)",
        "outer = spot.outer * (low // stride)", "an axis that is several digits holds them in the other order",
        (_NEST, _RUN),
    ),
    Mutant(
        "second-cut-from-the-front", "relayout/collectives/digits.py", "found.append((digit, DigitSpot(d, outer)))",
        "found.append((digit, DigitSpot(d, 1)))", "every axis cuts the first digit of its dim", (_RUN,),
    ),
    Mutant(
        "idle-axes-everywhere", "relayout/collectives/digits.py",
        "a.stride * a.k <= b.stride or b.stride * b.k <= a.stride",
        "True", "an axis of another view is used beside the one that it shares ranks with", (_RUN_CASES,),
    ),
    Mutant(
        "remainder-cut", "relayout/collectives/digits.py", "if max(n, left) % own:", "if False:",
        "eight rows are cut in three equal parts", (_REFUSALS,),
    ),
    Mutant(
        "zigzag-as-chunks", "relayout/collectives/digits.py", "if cut.map and k > 1:", "if False:",
        "zigzag is moved as if it were chunks", (_REFUSALS,),
    ),
    Mutant(
        "digits-over-each-other", "relayout/collectives/digits.py", "if outer % end:", "if False:",
        "two axes cut the same digit on the way", (_BEST, _RUN),
    ),
    # ---------------------------------------------------------------- shares
    Mutant(
        "equal-digits-independent", "relayout/collectives/digits.py", "if root(x) != root(y):", "if True:",
        "axes that swap places are said to receive more than they do", (_RUN, _BEST),
    ),
    Mutant(
        "pairs-count-nothing", "relayout/collectives/digits.py",
        "return _equal(tuple(pairs)) / parts if pairs else", "return",
        "what lies elsewhere on a rank counts as there", (_RUN, _BEST),
    ),
    Mutant(
        "overlaps-not-counted", "relayout/collectives/digits.py",
        "            return _counted(pairs)", "            return 0.0",
        "digits that do not nest have nothing in common", (_BEST,),
    ),
    # ---------------------------------------------------------------- sequences
    Mutant(
        "all-reduce-as-cheap-as-scatter", "relayout/collectives/sequences.py",
        "(k - 1) / k * (2 if whole else 1)", "(k - 1) / k",
        "an all-reduce counts half of what it receives", (_RUN, _BEST),
    ),
    Mutant(
        "replicas-do-not-share", "relayout/collectives/sequences.py",
        "idle and (self.sums or not self.even)", "idle and False",
        "ranks that have the same reduce all of it each", (_SHARE, _BEST),
    ),
    Mutant(
        "bound-too-high", "relayout/collectives/sequences.py", "lacks = (summands - 1) * self.total / self.ranks",
        "lacks = summands * self.total", "the best sequence is cut off", (_BEST,),
    ),
    Mutant(
        "far-counts-as-near", "relayout/collectives/sequences.py", "min(self.links[i].rate for i in some)",
        "max(self.links[i].rate for i in some)", "what passes a slow link costs what a fast one costs", (_SLOW,),
    ),
    Mutant(
        "sums-become-whole-for-nothing", "relayout/collectives/sequences.py",
        "rest = [i for i, spot in enumerate(state) if spot != WAITING]", "rest = list(range(len(state)))",
        "a pending sum is sliced, not summed", (_RUN, _BEST),
    ),
    # ---------------------------------------------------------------- steps
    Mutant(
        "local-outer-of-the-whole", "relayout/collectives/run_sequence.py",
        "return _Place(spot.dim, spot.outer // before, k)",
        "return _Place(spot.dim, spot.outer, k)", "a group cuts where the whole tensor is cut", (_RUN,),
    ),
    Mutant(
        "own-part-from-a-peer", "relayout/collectives/run_sequence.py",
        "if all(a is None or i == j for _, i, j, a, _ in rows):",
        "if False:", "a rank receives what it has", (_RUN_CASES,),
    ),
    Mutant(
        "padded-everywhere", "relayout/collectives/run_sequence.py", "if any(digit and place is None for digit, place",
        "if any(False for digit, place",
        "replicas of a part add it up", (_RUN_CASES,),
    ),
    Mutant(
        "overlaps-as-equal-parts", "relayout/collectives/run_sequence.py",
        "    if None in source or None in target:\n        return False\n", "",
        "a gather beside a cut exchanges equal parts", (_RUN,),
    ),
    Mutant(
        "parts-in-the-dims-order", "relayout/collectives/run_sequence.py",
        "return split, [where[place] for place in places], rest",
        "return split, sorted(where.values()), rest", "parts go to the rank whose digits are the other way round",
        (_RUN,),
    ),
    # ---------------------------------------------------------------- clusters
    Mutant(
        "stride-ignored", "hardware/catalogue/cluster.py", "if k * stride <= link.ranks:", "if k <= link.ranks:",
        "an axis between nodes costs what one inside a node costs", (_CLUSTER,),
    ),
    Mutant(
        "share-above-one", "hardware/catalogue/cluster.py", "if share > 1:", "if share > 2:",
        "a link reaches more than it has", (_CLUSTER,),
    ),
)
