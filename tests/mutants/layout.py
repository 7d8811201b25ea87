"""Mistakes planted in `tangram.layout`, by file."""

from tests.mutants.mutant import Mutant

INTERVALS = ("tests/layout/test_intervals.py",)
MAPS = ("tests/layout/test_maps.py",)
MESH = ("tests/layout/test_mesh.py",)
REGION = ("tests/layout/test_region.py",)
LAYOUTS = ("tests/layout/test_layouts.py",)
OWNERS = tuple(
    f"tests/layout/test_owners.py::test_{name}"
    for name in (
        "owners_of_chosen_layouts",
        "replicas_are_not_listed_and_are_spread",
        "owners_are_the_ranks_that_hold_it",
    )
)
GRAMMAR = ("tests/layout/test_grammar.py",)
FOLLOW = ("tests/layout/test_follow.py",)
PLACEMENTS = ("tests/layout/test_placements.py",)
DEFECT = tuple(
    f"tests/layout/test_torch_defect.py::test_{name}"
    for name in (
        "local_shapes_choose_the_layout",
        "shapes_that_fit_nothing_are_refused",
        "shapes_of_some_ranks_may_not_be_enough",
    )
)

MUTANTS: tuple[Mutant, ...] = (
    # ---------------------------------------------------------------- intervals
    Mutant(
        "normal-keeps-empty", "layout/intervals.py", "        if a >= b:", "        if a > b:",
        "an empty interval makes two equal sets unequal", INTERVALS,
    ),
    Mutant(
        "normal-does-not-merge-touching", "layout/intervals.py", "a <= out[-1][1]", "a < out[-1][1]",
        "one set has two forms, so equal regions differ", INTERVALS,
    ),
    Mutant(
        "normal-shortens", "layout/intervals.py", "if b > out[-1][1]:", "if b != out[-1][1]:",
        "an interval inside another loses the other's end", INTERVALS,
    ),
    Mutant(
        "intersect-steps-wrong", "layout/intervals.py", "        if b < d:", "        if a < c:",
        "overlaps are skipped: elements are never copied", INTERVALS,
    ),
    Mutant(
        "subtract-forgets-the-tail", "layout/intervals.py", "high = max(x[-1][1], y[-1][1])", "high = y[-1][1]",
        "elements after the last hole vanish", INTERVALS,
    ),
    Mutant(
        "take-without-clamp", "layout/intervals.py",
        "out.append((max(a, wanted[k][0]) + by,", "out.append((wanted[k][0] + by,",
        "positions of an earlier interval leak into the next", INTERVALS,
    ),
    Mutant(
        "rank-forgets-the-base", "layout/intervals.py", "_moved([(a, b, p - a) for p,", "_moved([(a, b, -a) for p,",
        "positions after the second interval are wrong", INTERVALS,
    ),
    Mutant(
        "product-takes-a-suffix-for-whole", "layout/intervals.py",
        "            if b - a == n:", "            if b == n:",
        "a rank that holds the end of the rows is given all columns", INTERVALS,
    ),
    Mutant(
        "product-wrong-stride", "layout/intervals.py", "        n *= m\n", "        n = m\n",
        "three factors get the stride of two", INTERVALS,
    ),
    Mutant(
        "digits-lose-a-whole-row", "layout/intervals.py", "if first < b // n:", "if first < last:",
        "a set that is one whole row disappears", INTERVALS,
    ),
    Mutant(
        "digits-count-the-first-row-twice", "layout/intervals.py", "            first += 1", "            first += 0",
        "a row that begins in the middle is taken whole", INTERVALS,
    ),
    # ---------------------------------------------------------------- maps
    Mutant(
        "chunk-rounds-down", "layout/intervals.py", "    c = -(-n // k)\n", "    c = max(n // k, 1)\n",
        "uneven cuts lose their last rows", MAPS,
    ),
    Mutant(
        "chunk-without-clamp", "layout/intervals.py", "min(i * c + c, n))", "i * c + c)",
        "the last part runs over the end of the tensor", MAPS,
    ),
    Mutant(
        "zigzag-off-by-one", "layout/intervals.py", "for j in (i, 2 * k - 1 - i):", "for j in (i, 2 * k - i):",
        "a rank gets its neighbour's late chunk", MAPS,
    ),
    Mutant(
        "zigzag-document-offset", "layout/intervals.py", "        base += m\n", "        base = m\n",
        "the third document is cut where the second stands", MAPS,
    ),
    Mutant(
        "zigzag-who-folds-wrong", "layout/intervals.py", "min(j, 2 * k - 1 - j)", "j % k",
        "late chunks are asked of the wrong rank", MAPS,
    ),
    Mutant(
        "segments-begin-at-their-end", "layout/intervals.py",
        "(ends[j] - lengths[j], lengths[j])", "(ends[j], lengths[j])",
        "positions in a packed document are negative", MAPS,
    ),
    Mutant(
        "cyclic-wrong-stride", "layout/intervals.py", "range(i * block, n, k * block)", "range(i * block, n, k)",
        "blocks of a rank overlap those of others", MAPS,
    ),
    Mutant(
        "strided-drops-the-offset", "layout/intervals.py", "out += shift(_chunk_holds(b - a, k, i), a)",
        "out += _chunk_holds(b - a, k, i)", "every piece is taken from the first", MAPS,
    ),
    Mutant(
        "sizes-start-one-late", "layout/intervals.py", "start = sum(args[:i])", "start = sum(args[: i + 1])",
        "ragged parts are those of the next rank", MAPS,
    ),
    Mutant(
        "sizes-any-number-of-parts", "layout/intervals.py", "len(sizes) != k or sum(sizes) != n", "sum(sizes) != n",
        "ranks beyond the list fail in the middle of a job", MAPS,
    ),
    Mutant(
        "documents-may-be-too-short", "layout/intervals.py",
        "if docs and sum(docs) != n:", "if docs and sum(docs) > n:",
        "the tail of a packed batch is with nobody", MAPS,
    ),
    # ---------------------------------------------------------------- mesh
    Mutant(
        "mesh-column-major", "layout/mesh.py", "            for axis, n in view:\n",
        "            for axis, n in reversed(view):\n",
        "all ranks hold another rank's part", MESH,
    ),
    Mutant(
        "mesh-name-with-two-meanings", "layout/mesh.py", "known != (n, stride) and", "known[0] != n and",
        "dp of one view is taken for dp of another", MESH,
    ),
    Mutant(
        "mesh-dependent-axes-pass", "layout/mesh.py", "return s % (t * m) == 0 or t % (s * n) == 0", "return s != t",
        "axes that share ranks cut together, and elements are lost", MESH,
    ),
    Mutant(
        "free-digits-skip-none", "layout/mesh.py", "            top = stride\n", "            top = stride * n\n",
        "replicas are listed that do not exist", MESH,
    ),
    Mutant(
        "peers-from-the-rank-itself", "layout/mesh.py",
        "base = rank - sum(at[a] * self.axis(a)[1] for a in axes)", "base = rank",
        "a group contains ranks outside it", MESH,
    ),
    Mutant(
        "nearest-is-not-spread", "layout/mesh.py", "to // s % n * s", "to % n * s",
        "a rank is not its own nearest holder: copies cross the network", MESH,
    ),
    # ---------------------------------------------------------------- region
    Mutant(
        "subtract-overlaps", "layout/region.py", "(*common[:i], rest, *x[i + 1 :])", "(*x[:i], rest, *x[i + 1 :])",
        "a difference has elements twice; the values copied are still right", REGION,
    ),
    Mutant(
        "scalar-boxes-are-false", "layout/region.py", "return out if all(out) else None",
        "return out if out and all(out) else None",
        "scalars are never copied", REGION,
    ),
    Mutant(
        "flat-without-clamp", "layout/region.py", "stop = min(stop, math.prod(shape))", "stop = max(stop, 0)",
        "the padding of a bucket counts as elements", REGION,
    ),
    Mutant(
        "within-looks-at-the-first-run", "layout/region.py", "s[-1][1] <= n", "s[0][1] <= n",
        "elements outside the tensor pass", REGION,
    ),
    Mutant(
        "hull-ends-early", "layout/region.py", "max(s[-1][1] for s in dim)", "max(s[0][1] for s in dim)",
        "a ragged region is read from too small a block", REGION,
    ),
    Mutant(
        "regions-not-canonical", "layout/region.py",
        "Region(tuple(kept) if len(kept) < 2 else tuple(_canonical(kept)))",
        "Region(tuple(kept))", "overlapping boxes count twice, and equal regions differ", REGION,
    ),
    Mutant(
        "coverage-misses-doubles-outside", "layout/region.py", "if count > 1:", "if count > 1 and wanted:",
        "two writers of one padding element go unseen", REGION,
    ),
    Mutant(
        "coverage-counts-two-as-one", "layout/region.py", "if count > 1:", "if count > 2:",
        "an element that is written twice passes as exact", REGION,
    ),
    Mutant(
        "unflatten-wrong-inner", "layout/region.py", "inner = math.prod(counts[1:])", "inner = counts[-1]",
        "flat ranges of tensors with three dims are wrong", REGION,
    ),
    # ---------------------------------------------------------------- sizes
    Mutant(
        "sizes-too-small-pass", "layout/sizes.py", "            if dim.n != n:", "            if dim.n > n:",
        "a text that covers part of a tensor is accepted", LAYOUTS,
    ),
    Mutant(
        "rest-one-short", "layout/sizes.py", "missing = len(shape) - len(dims) + 1", "missing = len(shape) - len(dims)",
        "... stands for one dim too few", LAYOUTS,
    ),
    Mutant(
        "two-unknowns-guessed", "layout/sizes.py",
        "    if len(unknown) > 1:\n        return False\n    (name,) = unknown\n",
        "    name = min(unknown)\n    env.update(dict.fromkeys(unknown - {name}, 1))\n",
        "a guess instead of an error", LAYOUTS,
    ),
    # ---------------------------------------------------------------- locate
    Mutant(
        "sum-drops-the-offset", "layout/locate.py",
        "intervals.shift(intervals.product([indices_of_rank(x, mesh, at) for x in term], sizes), base)",
        "intervals.product([indices_of_rank(x, mesh, at) for x in term], sizes)", "k and v are taken from q", LAYOUTS,
    ),
    Mutant(
        "cuts-by-index-not-by-what-is-held", "layout/locate.py",
        "s = intervals.take(s, _part(cut, intervals.size(s), mesh, at[cut.axis]))",
        "s = intervals.intersect(s, _part(cut, intervals.size(s), mesh, at[cut.axis]))",
        "an inner cut loses elements", LAYOUTS,
    ),
    Mutant(
        "places-ignored", "layout/locate.py", "if any(at[axis] not in coords for axis, coords in layout.at):",
        "if any(at[axis] < 0 for axis, _ in layout.at):", "every stage believes it holds the embedding", LAYOUTS,
    ),
    Mutant(
        "flat-cut-through-the-family", "layout/locate.py", "lead, local = sets[:family_dims], sets[family_dims:]",
        "lead, local = sets[:0], sets", "ZeRO cuts the stack of all layers instead of each", LAYOUTS,
    ),
    Mutant(
        "flat-axes-not-checked", "layout/locate.py", "parts += [(cut.axis,) for cut in layout.flat]",
        "parts += [(cut.axis,) for cut in layout.flat[:0]]", "one axis cuts twice and leaves holes", LAYOUTS,
    ),
    Mutant(
        "independence-not-checked", "layout/locate.py",
        "            if not mesh.independent(x, y):", "            if x > y > x:",
        "tp and kv cut together, and elements are lost", LAYOUTS,
    ),
    Mutant(
        "bracket-cut-independence", "layout/locate.py", "        mesh.require_independent(sorted(inner), str(dim))",
        "        mesh.require_independent((), str(dim))", "owners are coordinates that no rank has", LAYOUTS,
    ),
    Mutant(
        "owners-by-index-not-position", "layout/locate.py", "row.who(n, k, intervals.rank(have, sub), args)",
        "row.who(n, k, sub, args)", "the second cut is asked for the wrong elements", OWNERS,
    ),
    Mutant(
        "owners-hold-only-what-was-asked", "layout/locate.py",
        "intervals.take(have, row.holds(n, k, i, args)) if whole or not last else ()",
        "intervals.take(have, positions) if whole or not last else ()",
        "the next cut divides what was asked for instead of what is held", OWNERS,
    ),
    Mutant(
        "owners-sum-offset", "layout/locate.py", "        base += n\n", "        base = n\n",
        "the third part of a sum is looked for in the second", OWNERS,
    ),
    Mutant(
        "owners-at-every-place", "layout/locate.py", "tuple(sorted((*owner.coords, *places))))\n\n\ndef nearest",
        "tuple(sorted(owner.coords)))\n\n\ndef nearest", "stages that do not hold a tensor are asked for it", OWNERS,
    ),
    Mutant(
        "nearest-always-the-first-place", "layout/locate.py", "allowed[to % len(allowed)]", "allowed[0]",
        "one of two tied copies serves everybody", OWNERS,
    ),
    # ---------------------------------------------------------------- grammar and words
    Mutant(
        "errors-drift-by-line", "layout/notation.py", "at += len(line) + 1", "at += len(line)",
        "errors in a long mapping point at the wrong line", GRAMMAR,
    ),
    Mutant(
        "numbers-eat-words", "layout/grammar.py", r"|-?inf|nan)(?![\w:])/", "|-?inf|nan)/",
        "cast=infer is read as infinity", GRAMMAR,
    ),
    Mutant(
        "options-lose-digits", "layout/syntax.py", "{value:.17g}",
        "{value:g}", "a mapping does not print as it parses", GRAMMAR,
    ),
    Mutant(
        "places-print-in-part", "layout/notation.py", '",".join(map(str, coords)) for axis, coords in self.at',
        '",".join(map(str, coords[:1])) for axis, coords in self.at', "the second tied copy is lost in a file", GRAMMAR,
    ),
    # ---------------------------------------------------------------- companions and placements
    Mutant(
        "companions-everywhere", "layout/blocks.py", "at=base.at", "at=()",
        "optimiser states are on stages without weights", FOLLOW,
    ),
    Mutant(
        "companions-lose-bracket-cuts", "layout/blocks.py", "if not inner <= names:", "if not inner & names:",
        "scales that a rank needs are elsewhere, in silence", FOLLOW,
    ),
    Mutant(
        "sums-and-products-alike", "layout/blocks.py", "terms = tuple(tuple(_factors(term)) for term in dim.terms)",
        "terms = tuple(x for term in dim.terms for x in _factors(term))", "the cut of q + k + v goes to q k v", FOLLOW,
    ),
    Mutant(
        "negative-dims-stay", "layout/placements.py", "return dim % ndim",
        "return dim", "Shard(-1) is read as replicated", PLACEMENTS,
    ),
    Mutant(
        "strides-ignored", "layout/placements.py", 'Cut(axis, "strided", (p.split_factor,))', "Cut(axis)",
        "FSDP inside TP is read as FSDP outside", PLACEMENTS,
    ),
    Mutant(
        "written-placements-unproved", "layout/placements.py", "if region(back, mesh, r) != region(layout, mesh, r):",
        "if region(back, mesh, r).size != region(layout, mesh, r).size:",
        "DTensor is told something that is not so", PLACEMENTS,
    ),
    Mutant(
        "partition-spec-misses-dims", "layout/placements.py", "[()] * (ndim - len(entries))", "[()] * ndim",
        "a short PartitionSpec has too many dims", PLACEMENTS,
    ),
    Mutant(
        "fsdp-order-counts-itself", "layout/placements.py", "for c in cuts[i + 1 :])", "for c in cuts[i:])",
        "torch's defect is not recognised", DEFECT,
    ),
    Mutant(
        "one-shape-proves-all", "layout/placements.py", "return all(math.prod(s) == region",
        "return any(math.prod(s) == region", "rank 0's shape decides for all", DEFECT,
    ),
    Mutant(
        "ambiguous-shapes-pass", "layout/placements.py", "if len(fits) == 2 and any(", "if len(fits) > 2 and any(",
        "the wrong one of two layouts is taken", DEFECT,
    ),
)  # fmt: skip
