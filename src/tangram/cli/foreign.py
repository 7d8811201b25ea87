"""`tangram checkpoint inspect` and `verify` of other programs' formats, and what they print of any."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tangram.cli.output import byte_bar, print_json, print_table, size
from tangram.training.observe.text_tables import count, printable

if TYPE_CHECKING:
    from tangram.checkpoint.conversion.quantised import Quantisation
    from tangram.checkpoint.inspect.tree import Values
    from tangram.checkpoint.store.manifest import StoredTensor


FOUND = 20
"""Findings that are printed; --json has all."""


def inspect_foreign(
    path: Path, kind: str, pattern: str, values: str | None, all_lines: bool, depth: int, json: bool
) -> None:
    """Print what is in a checkpoint of another format. Raises UserError where it cannot be read."""
    from tangram.checkpoint.formats.detect import FORMATS, open_any
    from tangram.checkpoint.inspect import foreign, quantised_weights, tree

    opened = open_any(path)
    if values is not None:
        print_values(foreign.values_of(opened, values), json)
        return
    every, quantised = quantised_weights.seen_together(opened, foreign.tensors_of(opened))
    tensors = tree.fitting(every, pattern)
    nbytes = sum(tensor.nbytes for tensor in every)
    if json:
        rows = {tensor.name: tree.tensor_json(tensor) for tensor in tensors}
        fields = {"path": str(path), "format": opened.format, "tensors": rows, "bytes": nbytes}
        fields |= {"quantised": quantised.method} if quantised else {}
        print_json({**fields, "beside": opened.beside, "skipped": opened.skipped})
        return
    about = [("format", FORMATS[kind].title), ("tensors", f"{len(every):,}, {size(nbytes)}")]
    about += quantised_rows(quantised)
    about += [("states", ", ".join(opened.states))] if opened.states else []
    about += [("not the model's", _some(opened.beside))] if opened.beside else []
    about += [("no tensors", _some(opened.skipped))] if opened.skipped else []
    _table(str(path), ("what", "value"), about)
    print_tree(tensors, all_lines, depth)


def quantised_rows(quantised: "Quantisation | None") -> list[tuple[str, str]]:
    """What a table says of quantised weights."""
    if quantised is None:
        return []
    if quantised.problem:
        return [
            ("quantised", f"{quantised.method or 'in some way'}; codes and scales are shown apart: {quantised.problem}")
        ]
    return [
        (
            "quantised",
            f"{quantised.method}, {count(len(quantised.groups), 'weight')} of codes and scales, each one tensor here",
        )
    ]


def verify_foreign(path: Path, json: bool) -> int:
    """Read all of a checkpoint of another format; 1 where something cannot be."""
    from tangram.checkpoint.inspect import foreign

    with byte_bar("reading", None) as on_bytes:
        found = foreign.read_all(path, on_bytes)
    if json:
        print_json({"sound": found.sound, "checkpoints": [found.as_json()], "offer": None})
        return 0 if found.sound else 1
    codes = f" ({found.quantised:,} of codes and scales)" if found.quantised else ""
    read = f"{found.format}, {count(found.tensors, 'tensor')}{codes}, {size(found.nbytes)} read"
    if found.sound:
        sums = "its checksums (CRC-32) agree" if found.summed else "it has no checksums, so a changed value is not seen"
        print(f"{path}: whole: {read}; {sums}")
        return 0
    print(f"{path}: DAMAGED, {count(len(found.findings), 'finding')}: {read}")
    for one in found.findings[:FOUND]:
        print(printable(f"  {one}"))
    if len(found.findings) > FOUND:
        print(f"and {len(found.findings) - FOUND:,} more, which --json lists")
    return 1


def print_tree(tensors: "Sequence[StoredTensor]", all_lines: bool, depth: int) -> None:
    """Tensors as a tree of their names."""
    from tangram.checkpoint.inspect import tree

    rows = [
        (
            "  " * line.depth + line.label,
            f"{line.tensors:,}",
            line.dtype,
            " ".join(map(str, line.shape)) if line.shape or not line.dtype else "scalar",
            line.layout,
            size(line.nbytes),
            f"{line.pieces:,}",
            line.digest[:12],
        )
        for line in tree.tree(tensors, fold=not all_lines)
        if line.depth < depth
    ]
    _table("Tensors", ("name", "tensors", "dtype", "shape", "layout", "size", "pieces", "digest"), rows)


def print_values(values: "Values", json: bool) -> None:
    """What is in one tensor."""
    fields = values.as_json()
    if json:
        print_json(fields)
    else:
        _table(values.name, ("what", "value"), [(key, _value(value)) for key, value in fields.items()])


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_value, cast("list[Any]", value)))
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_table(printable(title), headers, [[printable(cell) for cell in row] for row in rows])
