"""Quantised weights looked at and compared: codes, scales, zero points and orders of columns are shown as one tensor.

opened checkpoint -> its groups -> one line a weight: codec, shape, all bytes
two of them -> the stored bits, group by group -> of those that differ, the values that they stand for
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tangram.checkpoint.conversion.quantised import Quantisation, dequantised, quantisation_of
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.inspect import diff
from tangram.checkpoint.inspect.diff import CheckpointDiff, Side, TensorChange, described
from tangram.checkpoint.inspect.tree import QuantisedTensor, fits
from tangram.checkpoint.saving.rank_parts import MODEL
from tangram.checkpoint.store.manifest import Manifest, StoredTensor
from tangram.errors import UserError
from tangram.relayout import TensorSpec
from tangram.relayout.quantised.grids import TensorGroup
from tangram.relayout.quantised.table import GROUP_CODECS

WIDE = "float32"
"""In which values are compared."""


def seen_together(
    opened: OpenCheckpoint, tensors: Sequence[StoredTensor], front: str = ""
) -> tuple[list[StoredTensor], Quantisation | None]:
    """Tensors of a checkpoint with one in the place of each group's, and what is quantised (None: nothing).

    `front`: what the tensors' names have before those of the opened checkpoint.
    """
    quantised = quantisation_of(opened)
    by_name = {tensor.name: tensor for tensor in tensors}
    if quantised is None or quantised.problem:
        return list(tensors), quantised
    owners = {front + name: front + weight for name, weight in owners_of(quantised.groups).items()}
    groups = {front + group.name: _together(group, by_name, front) for group in quantised.groups}
    names = dict.fromkeys(owners.get(name, name) for name in by_name)
    return [groups[name] if name in groups else by_name[name] for name in names], quantised


def _together(group: TensorGroup, by_name: Mapping[str, StoredTensor], front: str) -> QuantisedTensor:
    stored = {role: by_name[front + name] for role, name in group.members.items()}
    pieces = tuple(piece for one in stored.values() for piece in one.pieces)
    spec = TensorSpec(group.form.shape, group.codec)
    return QuantisedTensor(front + group.name, spec, "", pieces, stored["codes"].layout, stored)


def owners_of(groups: Collection[TensorGroup]) -> dict[str, str]:
    """Of each stored tensor of a quantised weight the weight's name."""
    return {name: group.name for group in groups for name in group.members.values()}


def may_be_quantised(manifest: Manifest) -> bool:
    """Whether a checkpoint of Tangram's own has tensors of a type that codes have."""
    kinds = {dtype for row in GROUP_CODECS.values() for dtype in row.dtypes} - {"bfloat16", "float16", "float32"}
    return any(one.spec.dtype in kinds and name.startswith(f"{MODEL}.") for name, one in manifest.tensors.items())


def of_own(path: Path, manifest: Manifest) -> tuple[Manifest, Quantisation | None]:
    """The manifest of a checkpoint of Tangram's own with quantised weights as one tensor each, for people."""
    if not may_be_quantised(manifest):
        return manifest, None
    tensors, quantised = seen_together(open_any(path), list(manifest.tensors.values()), f"{MODEL}.")
    return replace(manifest, tensors={tensor.name: tensor for tensor in tensors}), quantised


def with_weights(opened: OpenCheckpoint, name: str) -> OpenCheckpoint:
    """A checkpoint in which a quantised weight of that name has its values, where it is one."""
    quantised = quantisation_of(opened)
    if quantised is None or quantised.problem or name not in {group.name for group in quantised.groups}:
        return opened
    return dequantised(opened, quantised, WIDE)[0]


# ---------------------------------------------------------------- comparing


def of_two_own(a: Side, b: Side, pattern: str = "*") -> CheckpointDiff | None:
    """Compare two checkpoints of Tangram's own that are quantised; None where either is not, as far as it is known."""
    if not (may_be_quantised(a[1]) and may_be_quantised(b[1])):
        return None
    sides = (open_any(a[0]), open_any(b[0]))
    quantised = both_understood((quantisation_of(sides[0]), quantisation_of(sides[1])))
    if quantised is None:
        return None
    found = diff.compare(a, b)
    chosen = replace(found, objects=tuple(one for one in found.objects if fits(one.name, pattern)))
    return by_weights(chosen, sides, (a[1].tensors, b[1].tensors), quantised, pattern, None, f"{MODEL}.")


def both_understood(
    quantised: tuple[Quantisation | None, Quantisation | None],
) -> tuple[Quantisation, Quantisation] | None:
    """What is quantised in two checkpoints whose codes are understood; None where either is not one."""
    mine, theirs = quantised
    if mine is None or theirs is None or mine.problem or theirs.problem:
        return None
    return mine, theirs


def compare(
    a: OpenCheckpoint,
    b: OpenCheckpoint,
    quantised: tuple[Quantisation, Quantisation],
    pattern: str = "*",
    on_bytes: Callable[[int], None] | None = None,
) -> CheckpointDiff:
    """Compare two quantised checkpoints weight by weight: equal where all that is stored of it has the same bits.

    A weight that is not is compared by its values in float32; its change is of the kind `codes` where those are the
    same. Raises UserError where no tensor fits the pattern.
    """
    stored = {name for side in _sides((a.specs, b.specs), quantised, pattern, "") for name in side}
    if not stored:
        raise UserError(f"no tensor of either fits {pattern!r}")
    found = diff.compare_across(*diff.seen_as(a, b, None), on_bytes=on_bytes, among=stored)
    return by_weights(found, (a, b), (a.specs, b.specs), quantised, pattern, on_bytes)


def by_weights(
    found: CheckpointDiff,
    sides: tuple[OpenCheckpoint, OpenCheckpoint],
    names: tuple[Collection[str], Collection[str]],
    quantised: tuple[Quantisation, Quantisation],
    pattern: str = "*",
    on_bytes: Callable[[int], None] | None = None,
    front: str = "",
) -> CheckpointDiff:
    """A comparison of stored tensors (of all `names` that fit) as one of weights.

    `front`: what these names have before those of the opened sides.
    """
    known = _sides(names, quantised, pattern, front)
    both = set(known[0].values()) & set(known[1].values())
    weights = {front + group.name for one in quantised for group in one.groups}
    changes = {one.name: one for one in found.changes if any(one.name in side for side in known)}
    owners = {name: {side[name] for side in known if name in side} & weights for name in changes}
    plain = [one for name, one in changes.items() if not owners[name]]
    differ = {name.removeprefix(front) for some in owners.values() for name in some}
    values = _of_values(sides, quantised, differ, on_bytes) if differ else []
    changed = [*plain, *(replace(one, name=front + one.name) for one in values)]
    equal = len(both - {one.name for one in changed})
    return CheckpointDiff(tuple(sorted(changed, key=lambda one: one.name)), found.objects, equal)


def _sides(
    names: tuple[Collection[str], Collection[str]],
    quantised: tuple[Quantisation, Quantisation],
    pattern: str,
    front: str,
) -> list[dict[str, str]]:
    """Of the stored tensors of both sides the weight, or their own name; those of which that fits."""
    found: list[dict[str, str]] = []
    for some, known in zip(names, quantised, strict=True):
        owners = {front + name: front + weight for name, weight in owners_of(known.groups).items()}
        found.append({name: own for name in some if fits(own := owners.get(name, name), pattern)})
    return found


def _of_values(
    sides: tuple[OpenCheckpoint, OpenCheckpoint],
    quantised: tuple[Quantisation, Quantisation],
    names: Collection[str],
    on_bytes: Callable[[int], None] | None,
) -> list[TensorChange]:
    """The changes of weights of which some bits differ: in values, or in codes alone."""
    left, right = (dequantised(one, known, WIDE)[0] for one, known in zip(sides, quantised, strict=True))
    found = diff.compare_across(*diff.seen_as(left, right, None), on_bytes=on_bytes, among=names)
    changes = {one.name: one for one in found.changes}
    first, second = (
        {group.name: f"{group.codec} {list(group.form.shape)}" for group in one.groups} for one in quantised
    )
    made: list[TensorChange] = []
    for name in names:
        change = changes.get(
            name, TensorChange(name, "codes", described(left.specs[name]), described(right.specs[name]))
        )
        made.append(replace(change, a=first.get(name, change.a), b=second.get(name, change.b)))
    return made
