"""Mistakes planted in `tangram.relayout`, by file."""

from tests.mutants.mutant import Mutant

_SPINE = "tests/relayout/test_spine.py"
_RANDOM = "tests/relayout/test_random.py"
_MISTAKES = "tests/relayout/test_mistakes.py"
_REFUSALS = "tests/relayout/test_refusals.py"
_CASES = "tests/relayout/test_cases.py"
_CASES_FAMILIES = "tests/relayout/test_cases_families.py"
_EXECUTE = "tests/relayout/test_execute.py"
_NAMES = "tests/relayout/test_names.py"
_CODECS = "tests/relayout/test_codecs.py"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    # ---------------------------------------------------------------- cells
    Mutant(
        "compose-carry-twice", "relayout/mapping/cells.py",
        "digits.append(IndexDigit(d.offset * rest + carry, d.size, d.stride * rest, d.factor))\n            carry = 0",
        "digits.append(IndexDigit(d.offset * rest + carry, d.size, d.stride * rest, d.factor))",
        "parts behind the first factor of a term lie too far along the dim",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "compose-inner-offset-unscaled", "relayout/mapping/cells.py", "Digit(d.offset * rest + carry,",
        "Digit(d.offset + carry,", "a sum inside a product lands between its own rows",
        (_RANDOM + "::test_mappings_and_layouts",),
    ),
    Mutant(
        "compose-inner-tail-unscaled", "relayout/mapping/cells.py", "carry += index.tail * rest", "carry += index.tail",
        "a part of one element inside a product lands on its neighbour",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "compose-inner-stride-lost", "relayout/mapping/cells.py", "d.size, d.stride * rest, d.factor))",
        "d.size, rest, d.factor))", "a product inside a product walks with the outer stride only",
        (_RANDOM + "::test_mappings_and_layouts",),
    ),
    Mutant(
        "expand-terms-overlap", "relayout/mapping/cells.py", "        base += n\n    return out\n\n\ndef _leaf",
        "    return out\n\n\ndef _leaf", "every part of a concatenation is the first one",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "match-without-labels", "relayout/mapping/cells.py",
        "return self.labels, frozenset(d.factor for d in self.digits)",
        "return frozenset(), frozenset(d.factor for d in self.digits)",
        "queries, keys and values are told apart by nothing",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "match-without-factors", "relayout/mapping/cells.py",
        "return self.labels, frozenset(d.factor for d in self.digits)", "return self.labels, frozenset()",
        "parts with one label and other factors are taken for the same elements", (_REFUSALS + "::test_mappings",),
    ),
    Mutant(
        "restrict-ignores-tail", "relayout/mapping/cells.py",
        "return [()] if intervals.intersect(s, ((tail, tail + 1),)) else []", "return [()]",
        "a single element is written for every region that is near it",
        (_CASES + "::test_parts_of_one_row",),
    ),
    Mutant(
        "restrict-keeps-outside", "relayout/mapping/cells.py",
        "intervals.intersect(s, ((d.offset, d.offset + d.size * d.stride),))", "s",
        "rows of k are written as rows of v that do not exist",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "restrict-forgets-offset", "relayout/mapping/cells.py",
        "for outer, part in intervals.digits(intervals.shift(inside, -d.offset), d.stride)",
        "for outer, part in intervals.digits(inside, d.stride)",
        "the region is read as if each part began at zero",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "indices-forget-offset-of-runs", "relayout/mapping/cells.py",
        "s = tuple([(o + a * st, o + b * st) for a, b in values])",
        "s = tuple([(a * st, b * st) for a, b in values])",
        "sources are looked for at the place of the first part",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "indices-forget-offset-of-rows", "relayout/mapping/cells.py", "[(o + i * st + a, o + i * st + b) for",
        "[(i * st + a, i * st + b) for", "as above, where rows are not whole",
        (_RANDOM + "::test_mappings_and_layouts",),
    ),
    Mutant(
        "part-sorts-factors", "relayout/mapping/cells.py",
        "slots = tuple(tuple(place[d.factor] for d in dim.digits) for dim in self.dims)",
        "slots = tuple(tuple(sorted(place[d.factor] for d in dim.digits)) for dim in self.dims)",
        "a transposed pair of fused factors swaps", (_CASES + "::test_rotary_halves_to_pairs_and_norm_plus_one",),
    ),
    Mutant(
        "diagonal-let-through", "relayout/mapping/cells.py", "if len(set(found.factors)) != len(found.factors):",
        "if False:", "a diagonal is taken for the whole square", (_REFUSALS + "::test_mappings",),
    ),
    Mutant(
        "source-part-without-counterpart", "relayout/mapping/cells.py", "    alone = sources.keys() ^ targets.keys()",
        "    alone = targets.keys() - sources.keys()", "elements of the source vanish in silence",
        (_REFUSALS + "::test_mappings",),
    ),
    Mutant(
        "look-alikes-in-one-tensor", "relayout/mapping/cells.py",
        "            if any(o.tensor == m.tensor for o in same):", "            if False:",
        "the second of two like parts overwrites the first", (_REFUSALS + "::test_mappings",),
    ),
    Mutant(
        "look-alikes-in-two-tensors", "relayout/mapping/cells.py",
        "        for key, same in here.items():\n            if key in out:",
        "        for key, same in here.items():\n            if False:",
        "of two like parts the second is dropped in silence", (_REFUSALS + "::test_mappings",),
    ),
    Mutant(
        "padding-forgotten", "relayout/mapping/cells.py",
        "    voids = [m for tensors in target for m in tensors if m.void]", "    voids: list[Monomial] = []",
        "padding keeps what the buffer held before",
        (_CASES + "::test_vocabulary_padded_to_what_tensor_ranks_divide",),
    ),
    # ---------------------------------------------------------------- pieces
    Mutant(
        "find-never-subtracts", "relayout/copies/pieces.py", "left = [z for x in left for z in box_subtract(x, have)]",
        "left = list(left)", "an element that two pieces hold is copied from both",
        (_SPINE + "::test_other_layouts_of_the_fused_weight",),
    ),
    Mutant(
        "find-takes-more-than-left", "relayout/copies/pieces.py",
        "got = [b for x in left if (b := box_intersect(x, have)) is not None]",
        "got = [have] if any(box_intersect(x, have) for x in left) else []",
        "overlapping pieces write an element twice", (_CASES + "::test_a_cut_term_beside_one_that_all_hold",),
    ),
    Mutant(
        "owners-all-copy", "relayout/copies/pieces.py", "left = intervals.subtract(left, mine)", "",
        "an element that several ranks hold comes from each of them",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "nearest-last", "relayout/copies/pieces.py",
        "key=lambda p: (p.place != near,", "key=lambda p: (p.place == near,",
        "ranks that hold what they want ask others for it",
        (_SPINE + "::test_each_rank_reads_the_replica_that_is_its_own",),
    ),
    Mutant(
        "find-first-piece-only", "relayout/copies/pieces.py", "            if not left:\n                break",
        "            break", "what lies in several pieces is said to be missing",
        (_SPINE + "::test_other_layouts_of_the_fused_weight",),
    ),
    Mutant(
        "flat-cut-open-axes", "relayout/copies/pieces.py",
        "        if any(axis not in known for dim in layout.dims for axis in dim.axes):", "        if False:",
        "a flat cut over a partly cut sum cannot be read",
        (_CASES + "::test_a_cut_term_beside_one_that_all_hold",),
    ),
    Mutant(
        "held-by-one-held-by-all", "relayout/copies/pieces.py", "key = (tensor, i, tuple([at[a] for a in dim.axes]))",
        "key = (tensor, i)", "every rank is told what the first one holds",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "at-forgotten", "relayout/copies/pieces.py", "        if layout.flat or layout.at:\n",
        "        if layout.flat:\n", "ranks outside @ claim to hold the tensor",
        (_CASES + "::test_tied_embeddings_on_two_stages_with_padding",),
    ),
    Mutant(
        "flat-cut-forgotten", "relayout/copies/pieces.py", "out += self._flat(part, coords, tuple(values), to)",
        "out.append((self.piece(part.tensor, nearest_holder(layout, self.mesh, coords, to)), tuple(values)))",
        "whole local blocks are read where a rank holds a slice of it",
        (_SPINE + "::test_other_layouts_of_the_fused_weight",),
    ),
    Mutant(
        "search-stops-early", "relayout/copies/pieces.py", "        if node.tops[i] <= lo:\n            break",
        "        if node.hulls[i][1] <= lo:\n            break", "pieces behind a short one are not found",
        (_RANDOM + "::test_mappings_and_layouts",),
    ),
    Mutant(
        "two-pieces-one-place", "relayout/copies/pieces.py", "if stands_there(seen, p, family):", "if False:",
        "two pieces share one buffer and one of them is not read",
        (_REFUSALS + "::test_wanted_twice_and_pieces_twice_and_outside",),
    ),
    Mutant(
        "search-misses-inner-starts", "relayout/copies/pieces.py", "bisect_right(node.starts, hi - 1) - 1",
        "bisect_right(node.starts, lo) - 1", "pieces that begin inside what is wanted are not found",
        (_SPINE + "::test_other_layouts_of_the_fused_weight",),
    ),
    # ---------------------------------------------------------------- plan
    Mutant(
        "coverage-not-counted", "relayout/copies/plan.py", "        if size != box_size(box):", "        if False:",
        "holes keep what the buffer held before",
        (_CASES_FAMILIES + "::test_a_padded_bucket_as_explicit_regions",),
    ),
    Mutant(
        "coverage-off-by-one", "relayout/copies/plan.py", "        if size != box_size(box):",
        "        if size < box_size(box) - 1:", "a hole of one element is not seen",
        (_RANDOM + "::test_pieces_with_overlaps_and_holes",),
    ),
    Mutant(
        "wanted-twice", "relayout/copies/pieces.py", "    if mark in seen or whole in seen or (",
        "    if whole in seen or (", "two copies race for one buffer",
        (_REFUSALS + "::test_a_family_and_one_of_its_members_are_not_wanted_together",),
    ),
    Mutant(
        "first-box-only", "relayout/copies/plan.py",
        "boxes = [b for box in region.boxes for b in cell.target.boxes(box)]",
        "boxes = [b for box in region.boxes[:1] for b in cell.target.boxes(box)]",
        "only a part of an irregular region is filled", (_SPINE + "::test_other_layouts_of_the_fused_weight",),
    ),
    Mutant(
        "ties-unchecked", "relayout/copies/plan.py", "    if cell.source is None or not cell.tied:\n        return []",
        "    return []", "tied weights that differ load without a word",
        (_REFUSALS + "::test_tied_copies_that_are_to_be_compared_must_be_there",),
    ),
    Mutant(
        "error-names-first-member", "relayout/copies/plan.py", "index = tuple(s[0][0] for s in region.boxes[0][:n])",
        "index = (0,) * n", "the error sends a person to the wrong layer",
        (_REFUSALS + "::test_a_hole_in_a_family_names_the_real_tensor",),
    ),
    Mutant(
        "error-names-whole-box", "relayout/copies/plan.py", "    for b in got:\n        left = [z",
        "    for b in ():\n        left = [z", "the error calls elements missing that are there",
        (_REFUSALS + "::test_a_hole_names_tensor_and_region",),
    ),
    # ---------------------------------------------------------------- lower
    Mutant(
        "moved-from-zero", "relayout/copies/lower.py", "base[dim] += (lo - start) * step", "base[dim] += lo * step",
        "a block that was split for the other side begins elsewhere",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "moved-without-step", "relayout/copies/lower.py", "base[dim] += (lo - start) * step", "base[dim] += lo - start",
        "a block that was split for the other side begins elsewhere",
        (_EXECUTE + "::test_tied_copies_are_compared_wherever_their_elements_lie",),
    ),
    Mutant(
        "flattened-weights", "relayout/copies/lower.py", "        weight *= n\n", "        weight = n\n",
        "a region that is no grid is read in the wrong rows", (_RANDOM + "::test_pieces_with_overlaps_and_holes",),
    ),
    Mutant(
        "flattened-offset", "relayout/copies/lower.py", "const += axis.const * weight", "const += axis.const",
        "a part of a region that is no grid begins elsewhere",
        (_SPINE + "::test_other_layouts_of_the_fused_weight",),
    ),
    Mutant(
        "flattened-strides", "relayout/copies/lower.py", "strides = [*(s * weight for s in axis.strides), *strides]",
        "strides = [*axis.strides, *strides]", "a region that is no grid is read in the wrong order",
        (_SPINE + "::test_other_layouts_of_the_fused_weight",),
    ),
    Mutant(
        "affine-run-start", "relayout/copies/lower.py",
        "        return ((ranges, before + first - run[0], axis.strides),)",
        "        return ((ranges, before + first, axis.strides),)",
        "the first row of a buffer is taken for the first of the tensor",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "affine-rows-before", "relayout/copies/lower.py",
        "        return ((ranges, before + first - run[0], axis.strides),)",
        "        return ((ranges, first - run[0], axis.strides),)",
        "later runs of a buffer are read from its start", (_SPINE + "::test_other_layouts_of_the_fused_weight",),
    ),
    Mutant(
        "affine-over-a-gap", "relayout/copies/lower.py", "    if last < run[1]:", "    if last <= run[1] + 1:",
        "a block runs over what the buffer does not hold",
        (_CASES + "::test_a_cut_term_beside_one_that_all_hold",),
    ),
    Mutant(
        "crooked-taken-as-straight", "relayout/copies/lower.py",
        "    if not bool((straight == index).all()):\n        return None", "",
        "ragged rows are read with one stride", (_RANDOM + "::test_mappings_and_layouts",),
    ),
    Mutant(
        "innermost-leaves-its-run", "relayout/copies/lower.py", "    whole = bool((run == end_run).all())",
        "    whole = True", "a block crosses from one run into the next",
        (_CASES + "::test_pairs_that_a_cut_takes_apart",),
    ),
    Mutant(
        "axis-tail", "relayout/copies/lower.py", "dim.tail + sum(d.offset for d in dim.digits)",
        "sum(d.offset for d in dim.digits)", "a part of one element is looked for at the start of the buffer",
        (_CASES + "::test_parts_of_one_row",),
    ),
    Mutant(
        "axis-offsets", "relayout/copies/lower.py", "dim.tail + sum(d.offset for d in dim.digits)", "dim.tail",
        "every part is looked for at the start of the buffer",
        (_SPINE + "::test_hugging_face_tp2_to_megatron_tp4_and_back",),
    ),
    Mutant(
        "members-not-chosen", "relayout/copies/lower.py",
        "choices = [[(i, i + 1) for i in intervals.elements(s)] if k in chosen else list(s) for k, s in "
        "enumerate(box)]", "choices = [list(s) for k, s in enumerate(box)]",
        "all layers are written into the first one",
        (_CASES_FAMILIES + "::test_experts_on_their_own_mesh_beside_dense_layers",),
    ),
    Mutant(
        "member-offset-in-a-sum", "relayout/copies/lower.py", "at = [a.const + sum(st * ranges[k][0]",
        "at = [sum(st * ranges[k][0]", "the second stack of layers is written over the first",
        (_NAMES + "::test_one_number_is_a_sum_of_two_stacks",),
    ),
    Mutant(
        "halving-loses-one", "relayout/copies/lower.py", "for half in ((lo, mid), (mid, hi))]",
        "for half in ((lo, mid), (mid + 1, hi))]", "an element is not written where blocks are halved",
        (_RANDOM + "::test_mappings_and_layouts",),
    ),
    # ---------------------------------------------------------------- names
    Mutant(
        "name-without-offset", "relayout/mapping/names.py", "out += [str(i + offset), text]", "out += [str(i), text]",
        "layers.{l+3} begins at layers.0",
        (_CASES_FAMILIES + "::test_uneven_stages_and_numbers_that_do_not_begin_at_zero",),
    ),
    Mutant(
        "number-without-offset", "relayout/mapping/names.py",
        "index = tuple(int(x) - o for", "index = tuple(int(x) for",
        "layers.3 is taken for the fourth layer of layers.{l+3}",
        (_CASES_FAMILIES + "::test_uneven_stages_and_numbers_that_do_not_begin_at_zero",),
    ),
    Mutant(
        "number-outside-family", "relayout/mapping/names.py",
        "return index if all(0 <= i < n for i, n in zip(index, self.spec.shape, strict=False)) else None",
        "return index", "a layer that does not exist is planned",
        (_CASES_FAMILIES + "::test_first_layers_dense_the_others_experts",),
    ),
    Mutant(
        "leading-zero-member", "relayout/mapping/names.py",
        "if found is None or any(str(int(x)) != x for x in found.groups()):", "if found is None:",
        "layers.007 is written as layers.7",
        (_NAMES + "::test_numbers_with_leading_zeros_are_names_of_their_own",),
    ),
    Mutant(
        "leading-zero-joins", "relayout/mapping/names.py",
        r'_NUMBERS = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")', r'_NUMBERS = re.compile(r"(\d+)")',
        "layers.007 and layers.7 are one tensor",
        (_NAMES + "::test_numbers_with_leading_zeros_are_names_of_their_own",),
    ),
    Mutant(
        "missing-member", "relayout/mapping/names.py", "    if len(inside) != math.prod(sizes):", "    if False:",
        "a layer that is missing is not noticed", (_NAMES + "::test_what_is_wrong_with_names_is_said",),
    ),
    Mutant(
        "written-numbers-ignored", "relayout/mapping/names.py",
        "return groups.get(tuple([c for c in constants if c is not None]), [])",
        "return [n for group in groups.values() for n in group]", "tower.0 and tower.1 are thrown together",
        (_NAMES + "::test_numbers_that_are_written_out_part_families",),
    ),
    Mutant(
        "index-beside-digit", "relayout/mapping/names.py",
        "if before[-1:].isdigit() or after[:1].isdigit() or \"\" in texts[1:-1]:", "if False:",
        "a{l}{m} cannot be read back from a name", (_NAMES + "::test_what_is_wrong_with_names_is_said",),
    ),
    # ---------------------------------------------------------------- bind
    Mutant(
        "claimed-twice", "relayout/mapping/bind.py", "        if name in used:\n", "        if False:\n",
        "the second target of a weight replaces the first",
        (_NAMES + "::test_two_wild_cards_for_one_name_are_refused",),
    ),
    Mutant(
        "source-dtypes-mixed", "relayout/mapping/bind.py", "        if len(dtypes) > 1:", "        if False:",
        "bits of one dtype are read as another", (_REFUSALS + "::test_dtypes_change_by_a_named_cast_only",),
    ),
    Mutant(
        "target-dtype-differs", "relayout/mapping/bind.py", "        if statement.target and wanted - {result}:",
        "        if False:", "bits of one dtype are written as another",
        (_REFUSALS + "::test_dtypes_change_by_a_named_cast_only",),
    ),
    Mutant(
        "unused-let-through", "relayout/mapping/bind.py", "    if unused and not partial:", "    if False:",
        "a tensor that was forgotten is lost", (_NAMES + "::test_what_is_wrong_with_names_is_said",),
    ),
    Mutant(
        "dims-not-counted", "relayout/mapping/bind.py", "        _check_ranks(flat, dims)\n", "",
        "a dim that the text forgets is ignored", (_REFUSALS + "::test_mappings",),
    ),
    # ---------------------------------------------------------------- wilds
    Mutant(
        "wild-takes-all", "relayout/mapping/names.py", "                if name not in taken[side]:\n",
        "                if name:\n", "a wild card takes what a statement names",
        (_NAMES + "::test_wild_cards_take_what_nothing_else_names",),
    ),
    Mutant(
        "real-name-is-first", "relayout/mapping/names.py", "lead = tuple(span(i, i + 1) for i in index)",
        "lead = tuple(span(0, 1) for i in index)", "every real name means the first member of its family",
        (_CASES_FAMILIES + "::test_experts_on_their_own_mesh_beside_dense_layers",),
    ),
    Mutant(
        "outside-let-through", "relayout/mapping/names.py", "        if not region.within(shape):", "        if False:",
        "regions beyond the tensor are planned", (_REFUSALS + "::test_wanted_twice_and_pieces_twice_and_outside",),
    ),
    Mutant(
        "members-differ", "relayout/mapping/bind.py", "    if other is not None:", "    if False:",
        "a family whose tensors differ is read by the first one's shape",
        (_NAMES + "::test_the_members_of_a_family_are_alike",),
    ),
    # ---------------------------------------------------------------- inverse
    Mutant(
        "inverse-keeps-order", "relayout/mapping/inverse.py", "for o in reversed(statement.options) if",
        "for o in statement.options if", "(x + 3) * 2 is undone as (y - 3) / 2",
        (_CODECS + "::test_codecs_in_the_order_they_are_written_and_back",),
    ),
    Mutant(
        "drop-comes-back", "relayout/mapping/inverse.py", "    if loses and not fill and not lossy:", "    if False:",
        "what was dropped comes back as zeros without a word",
        (_CODECS + "::test_what_has_no_way_back_without_loss",),
    ),
    Mutant(
        "lossy-cast-back", "relayout/mapping/inverse.py", "    if not exact and not lossy:", "    if False:",
        "bits that a cast lost are invented", (_CODECS + "::test_what_has_no_way_back_without_loss",),
    ),
    Mutant(
        "inverse-forgets-fill", "relayout/mapping/inverse.py", "        options += fill or [(FILL, 0.0)]",
        "        options += [(FILL, 0.0)]", "what was dropped comes back as another value",
        (_CODECS + "::test_inverse",),
    ),
    # ---------------------------------------------------------------- codecs
    Mutant(
        "add-undone-by-add", "relayout/mapping/codecs.py", "    return -_number(value, \"add\")",
        "    return _number(value, \"add\")", "norm + 1 comes back as norm + 2",
        (_CASES + "::test_rotary_halves_to_pairs_and_norm_plus_one",),
    ),
    Mutant(
        "mul-undone-by-mul", "relayout/mapping/codecs.py", "return 1 / _number(value, \"mul\")",
        "return _number(value, \"mul\")", "a scale comes back squared",
        (_CODECS + "::test_codecs_in_the_order_they_are_written_and_back",),
    ),
    Mutant(
        "exact-by-half", "relayout/mapping/codecs.py", "return all(a <= b for", "return any(a <= b for",
        "float16 to bfloat16 is said to lose nothing", (_CODECS + "::test_what_has_no_way_back_without_loss",),
    ),
    Mutant(
        "cast-undone-by-itself", "relayout/mapping/codecs.py", "    return f\"{target}:{source}\"",
        "    return f\"{source}:{target}\"", "the way back casts in the way's own direction",
        (_CODECS + "::test_codecs_in_the_order_they_are_written_and_back",),
    ),
    Mutant(
        "nibbles-not-swapped", "relayout/mapping/codecs.py", "return (x << 4) | (x >> 4)", "return (x << 4) | (x & 15)",
        "half of each packed pair is lost", (_CODECS + "::test_cast_and_nibbles",),
    ),
    Mutant(
        "cast-takes-any", "relayout/mapping/codecs.py", "    if dtype != source:\n", "    if False:\n",
        "a cast meets a dtype that it was not written for", (_REFUSALS + "::test_mappings",),
    ),
    # ---------------------------------------------------------------- execute
    Mutant(
        "ties-not-compared", "relayout/copies/plan.py",
        "    for check in plan.checks:\n        compare(check, sources)\n", "",
        "tied weights that differ load without a word", (_REFUSALS + "::test_tied_copies_that_differ",),
    ),
    Mutant(
        "ties-first-row-only", "relayout/copies/plan.py", "            if not torch.equal(x, y):",
        "            if not torch.equal(x[:1], y[:1]):",
        "tied weights that differ below their first row load without a word",
        (_REFUSALS + "::test_tied_copies_that_differ",),
    ),
    Mutant(
        "shared-memory", "relayout/copies/plan.py", "    refuse_shared(plan.bound, sources, targets)\n", "",
        "a source is overwritten while it is read", (_REFUSALS + "::test_source_and_target_share_memory",),
    ),
    Mutant(
        "span-too-short", "relayout/copies/buffers.py",
        "return str(t.device), t.data_ptr(), t.data_ptr() + reach * t.element_size()",
        "return str(t.device), t.data_ptr(), t.data_ptr() + t.numel()", "overlap of strided views is not seen",
        (_REFUSALS + "::test_source_and_target_share_memory",),
    ),
    Mutant(
        "overlapping-target", "relayout/copies/buffers.py", "        if self.written and _overlaps_itself(t):",
        "        if False:", "elements that share memory are written in any order",
        (_REFUSALS + "::test_buffers",),
    ),
    Mutant(
        "conjugate-bits", "relayout/copies/buffers.py", "return t if written else t.resolve_conj().resolve_neg()",
        "return t", "a conjugate view is copied as the numbers that it stands on",
        (_EXECUTE + "::test_conjugate_views_are_compared_by_what_they_mean",),
    ),
    Mutant(
        "meta-let-through", "relayout/copies/buffers.py", "    if raw.is_meta:", "    if False:",
        "a tensor without values is read", (_REFUSALS + "::test_buffers",),
    ),
    Mutant(
        "read-only-written", "relayout/copies/buffers.py", "        if written and not array.flags.writeable:",
        "        if False:", "memory that others believe constant changes", (_REFUSALS + "::test_buffers",),
    ),
    Mutant(
        "buffer-dtype", "relayout/copies/buffers.py", "        if str(t.dtype).removeprefix(\"torch.\") != dtype:",
        "        if False:", "bits of one dtype are copied as another", (_REFUSALS + "::test_buffers",),
    ),
    Mutant(
        "buffer-shape", "relayout/copies/buffers.py", "            if t.ndim != 1 or t.numel() != math.prod(shape):",
        "            if t.numel() != math.prod(shape):",
        "a transposed buffer is filled in the order of its storage", (_REFUSALS + "::test_buffers",),
    ),
    Mutant(
        "view-from-zero", "relayout/copies/buffers.py", "offset = t.storage_offset() + sum(", "offset = sum(",
        "a view into a larger tensor is read from that tensor's start",
        (_EXECUTE + "::test_sources_may_be_any_view",),
    ),
    Mutant(
        "numpy-scalar", "relayout/copies/buffers.py", "        if written and isinstance(raw, np.generic):",
        "        if False:", "what is written into a numpy scalar is lost",
        (_REFUSALS + "::test_a_numpy_scalar_cannot_be_written",),
    ),
    Mutant(
        "ties-as-numbers", "relayout/copies/buffers.py",
        "    x = torch.view_as_real(x) if x.is_complex() else x\n    return x.view(",
        "    return x if x.is_floating_point() else x.view(", "NaN differs from itself, and -0.0 equals 0.0",
        (_REFUSALS + "::test_tied_copies_that_differ",),
    ),
    Mutant(
        "tied-share", "relayout/copies/buffers.py", "and not _same_tie(bound, key, other[4])", "",
        "two names of one tensor cannot be loaded",
        (_REFUSALS + "::test_tied_targets_may_share_memory_with_each_other_only",),
    ),
    Mutant(
        "made-names-unclaimed", "relayout/mapping/bind.py", "{family.name: None, **dict.fromkeys(family.members)}",
        "{family.name: None}", "two families of one mapping make the same tensor",
        (_MISTAKES + "::test_made_names_stand_once",),
    ),
    Mutant(
        "tied-members-share", "relayout/copies/buffers.py",
        "alike = x[0] == y[0] and a != b and (i == j or None in (i, j))",
        "alike = True", "layers of a tied family overwrite each other",
        (_MISTAKES + "::test_only_the_same_elements_of_a_tie_share_memory",),
    ),
    Mutant(
        "steps-by-name-alone", "relayout/mapping/state_rules.py",
        "here = {(k >= sources, m.name)", "here = {(False, m.name)",
        "a parameter that keeps its name loses its step",
        (_MISTAKES + "::test_a_step_stays_with_a_parameter_that_keeps_its_name",),
    ),
    Mutant(
        "blocks-swallow-cuts", "relayout/mapping/states.py",
        "elif not last.axes and last.n", "elif not last.cuts and last.n",
        "half a block on each rank, and its scale on all", (_MISTAKES + "::test_cuts_through_blocks_are_seen",),
    ),
    Mutant(
        "last-part-is-like-the-others", "relayout/mapping/states.py", "for size in (c, n % c)}", "for size in (c,)}",
        "the smaller last part is cut through blocks", (_MISTAKES + "::test_cuts_through_blocks_are_seen",),
    ),
)
# fmt: on
