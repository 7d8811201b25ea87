"""`tangram checkpoint convert`: from any format and structure that is read to any that is written."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram.cli.grouped import Json
from tangram.cli.output import byte_bar, print_json, print_table, size
from tangram.errors import UserError
from tangram.training.observe.text_tables import count, printable

if TYPE_CHECKING:
    from tangram.checkpoint.conversion.convert import Restructured
    from tangram.checkpoint.conversion.converting import ConvertOptions
    from tangram.checkpoint.conversion.find_mapping import ChosenMapping
    from tangram.checkpoint.conversion.new_tensors import NewTensor
    from tangram.checkpoint.formats.common.opened import OpenCheckpoint
    from tangram.checkpoint.formats.hf_export import Converted
    from tangram.checkpoint.inspect.diff import CheckpointDiff


NAMES = ("transformer_engine", "local")
ROWS = 40
"""Of the table of a dry run; --json has all."""
SAMPLE = 64 << 20
"""Bytes that are read and written to see how fast the disk is."""
UNSET = "the settings of the optimiser are not known, which Megatron-core needs to go on: --optimiser FILE gives them"
BARE = "there is no tokenizer and no generation_config.json: --config DIR copies those that training began from"
UNCONFIGURED = "there is no config.json: transformers needs one, which --config DIR copies"
REASONED = ("torch", "deepspeed")
"""Formats that say what they do not take; the entries of others that are no tensors are empty states of layers."""
SKIPPED = 12


def config_option(text: str) -> Any:
    """`--config`: a directory, or the config.json in it."""

    def folder(config: Path | None) -> Path | None:
        return config.parent if config is not None and config.name == "config.json" and config.is_file() else config

    return typer.Option(metavar="DIR", help=text, callback=folder)


@dataclass(frozen=True)
class TypedOptions:
    """The options of the command."""

    to: Annotated[
        str, typer.Option(help="The format: hf, torch_dist (Megatron-core's), dcp (torch's), tangram or paddle.")
    ]
    dtype: Annotated[str | None, typer.Option(help="Cast floating point to it, as bfloat16.")] = None
    rounded: Annotated[bool, typer.Option("--round", help="The cast may lose bits.")] = False
    dequantise: Annotated[
        bool, typer.Option("--dequantise", "--dequantize", help="Make weights of codes and scales (FP8, GPTQ ...).")
    ] = False
    shard_size: Annotated[str, typer.Option(help="The largest file.")] = "5GB"
    memory: Annotated[str, typer.Option(help="For all buffers.")] = "512MiB"
    config: Annotated[Path | None, config_option("Where configuration and tokenizer lie.")] = None
    mapping: Annotated[Path | None, typer.Option(metavar="FILE", help="A mapping of your own.")] = None
    sizes: Annotated[list[str] | None, typer.Option("--size", help="A size that shapes leave open: g=8.")] = None
    family: Annotated[str | None, typer.Option(metavar="FILE", help="A family of your own, or one by name.")] = None
    optimiser: Annotated[Path | None, typer.Option(metavar="FILE", help="A plan or job with its settings.")] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="LoRA adapters of peft's, to merge; DIR=0.5: times that."),
    ] = None
    part: Annotated[
        str | None, typer.Option(metavar="KEY", help="What lies under it alone, as model_ema, not the model.")
    ] = None
    transformer_impl: Annotated[str, typer.Option(help="Whose names: transformer_engine or local.")] = NAMES[0]
    pad_vocabulary: Annotated[int, typer.Option(min=1, help="Pad the vocabulary to a multiple of it.")] = 1
    betas: Annotated[str | None, typer.Option(metavar="B1,B2", help="Of Adam, for steps from or to Paddle.")] = None
    apart: Annotated[bool, typer.Option("--apart", help="Layers of a torch_dist one by one, not stacked.")] = False
    one_optimiser: Annotated[
        bool, typer.Option("--one-optimiser", help="For Megatron-core without expert-parallel ranks.")
    ] = False
    model_only: Annotated[bool, typer.Option("--model-only", help="Leave the optimiser's states out.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")] = False
    json: Json = False


def run(source: str, target: str, asked: TypedOptions) -> None:
    """Convert, and say what was done. Raises UserError for what cannot be."""
    from tangram.checkpoint.conversion.convert import target_of
    from tangram.checkpoint.conversion.converting import exported_as_it_is, refuse_target
    from tangram.checkpoint.conversion.object_store import opening
    from tangram.checkpoint.formats.hf_export import bytes_of
    from tangram.checkpoint.store.objects import is_remote

    target_of(asked.to)
    if asked.transformer_impl not in NAMES:
        raise UserError(f"--transformer-impl {asked.transformer_impl}: give {' or '.join(NAMES)}")
    room = {"shard": bytes_of(asked.shard_size), "memory": bytes_of(asked.memory)}
    refuse_target(target, asked.to)
    local = not is_remote(source) and not is_remote(target)
    with opening(source) as opened:
        options = _options(asked, room)
        # Our own model as it is needs no mapping, and its digests prove every tensor.
        notes = None if asked.dry_run else exported_as_it_is(opened, source, target, asked.to, options)
        if notes is not None:
            _export(Path(source), Path(target), asked, room, notes)
        else:
            _convert(opened, target, asked, options, local)


def _options(asked: TypedOptions, room: Mapping[str, int]) -> "ConvertOptions":
    """What was typed, read. Raises UserError."""
    from tangram.checkpoint.conversion.converting import ConvertOptions

    return ConvertOptions(
        asked.dtype, asked.rounded, room["shard"], room["memory"], asked.config, _text(asked.mapping),
        _sizes(asked.sizes or ()), asked.family, _settings(asked.optimiser) if asked.optimiser else None,
        _betas(asked.betas) if asked.betas is not None else None, asked.transformer_impl == "local",
        asked.pad_vocabulary, not asked.apart, not asked.one_optimiser, not asked.model_only,
        tuple(map(_adapter, asked.adapter or ())),
        asked.dequantise, asked.part,
    )  # fmt: skip


def _adapter(text: str) -> tuple[Path, float]:
    """A directory, and by what its adapter is multiplied."""
    folder, mark, number = text.rpartition("=")
    if Path(text).exists() or not mark:
        return Path(text), 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f'--adapter "{text}": "{number}" is no number, by which the adapter "{folder}" is multiplied')
    return Path(folder), weight


def compared(a: str, b: str, pattern: str, config: Path | None) -> "CheckpointDiff":
    """What differs between two checkpoints: by digests where both are Tangram's own, else one seen as the other's."""
    from tangram.checkpoint.conversion.convert import config_of, small_of
    from tangram.checkpoint.conversion.object_store import opening
    from tangram.checkpoint.conversion.quantised import dequantised, quantisation_of
    from tangram.checkpoint.inspect import diff, quantised_weights
    from tangram.checkpoint.inspect.foreign import is_foreign
    from tangram.checkpoint.store import commits
    from tangram.checkpoint.store.objects import is_remote

    def foreign(place: str) -> bool:
        return is_remote(place) or is_foreign(Path(place))

    if not (foreign(a) or foreign(b)):
        one, other = ((Path(path), commits.read_manifest(Path(path))) for path in (a, b))
        if (codes := quantised_weights.of_two_own(one, other, pattern)) is not None:
            return codes
        with byte_bar("comparing", diff.to_read(one[1], other[1], pattern)) as on_bytes:
            return diff.compare(one, other, pattern, on_bytes)
    with opening(a) as one_side, opening(b) as other:
        quantised = quantisation_of(one_side), quantisation_of(other)
        if (known := quantised_weights.both_understood(quantised)) is not None:
            with byte_bar("comparing", None) as on_bytes:
                return quantised_weights.compare(one_side, other, known, pattern, on_bytes)
        small = small_of(config) if config else {**other.small, **one_side.small}
        left, right = (  # one quantised, one not: by their weights
            side if codes is None or all(quantised) else dequantised(side, codes)[0]
            for side, codes in zip((one_side, other), quantised, strict=True)
        )
        way, other_side = diff.seen_as(left, right, config_of(small))
        with byte_bar("comparing", diff.to_read_across(way, other_side, pattern)) as on_bytes:
            return diff.compare_across(way, other_side, pattern, on_bytes)


def _export(source: Path, target: Path, asked: TypedOptions, room: Mapping[str, int], notes: Sequence[str]) -> None:
    """The model of one of Tangram's checkpoints as it is: proved by digests."""
    from tangram.checkpoint.formats import hf_export as of
    from tangram.checkpoint.formats.common.side_files import is_of_tokenizer

    with byte_bar("exporting", of.size_of(source, asked.dtype, asked.rounded)) as on_bytes:
        made = of.to_hugging_face(
            source, target, dtype=asked.dtype, rounded=asked.rounded, config=asked.config, on_bytes=on_bytes, **room
        )
    if asked.json:
        print_json({**made.as_json(), "notes": notes})
        return
    proof = f"{count(made.tensors - made.cast, 'tensor')} proved equal to the checkpoint by their digests"
    cast = f", {made.cast:,} cast to {asked.dtype}" if made.cast else ""
    rate = size(made.nbytes / made.seconds)
    print(f"{target}: {size(made.nbytes)} in {count(len(made.files), 'file')}, {rate}/s; {proof}{cast}")
    _beside(made)
    for note in notes:
        print(printable(note))
    if not made.configured:
        print(UNCONFIGURED)
    elif not any(is_of_tokenizer(name) or name == "generation_config.json" for name in made.files):
        print(BARE)


def _beside(made: "Converted | Restructured") -> None:
    """What became of the files beside the weights, where it is not all of them as they were."""
    if made.changed:
        print(printable(f"config.json: {'; '.join(made.changed)}"))
    if made.left_beside:
        more = f" and {len(made.left_beside) - SKIPPED:,} more" if len(made.left_beside) > SKIPPED else ""
        print(printable(f"beside the weights, not carried: {', '.join(made.left_beside[:SKIPPED])}{more}"))


def _convert(
    source: "OpenCheckpoint", target: str, asked: TypedOptions, options: "ConvertOptions", local: bool
) -> None:
    from tangram.checkpoint.conversion.converting import prepare

    found = prepare(source, asked.to, options)
    if asked.dry_run:
        rate = _disk(found.source, Path(target)) if local else None
        _planned(found.source, target, asked, found.chosen, found.ways, found.nbytes, found.notes, rate)
        return
    with byte_bar("converting", found.nbytes) as on_bytes:
        made = found.write(target, on_bytes)
    if asked.json:
        decoded = {"dequantised": found.dequantised.as_json()} if found.dequantised else {}
        counts = {"by": found.chosen.description, "left_out": len(found.chosen.left), "skipped": found.source.skipped}
        print_json({**made.as_json(), **counts, "beside": found.source.beside, "notes": found.notes, **decoded})
        return
    _print_result(made, found.chosen, asked, found.source, found.notes)
    if found.dequantised:
        print(found.dequantised)


def _skipped(source: "OpenCheckpoint", notes: Sequence[str]) -> None:
    """What stands in the source and is not taken, with the reason where it has one, and what was noted of it."""
    for note in notes:
        print(printable(note))
    if source.beside:
        more = f" and {len(source.beside) - SKIPPED:,} more" if len(source.beside) > SKIPPED else ""
        print(printable(f"left out, no tensors of the model: {', '.join(source.beside[:SKIPPED])}{more}"))
    if source.format in REASONED and source.skipped:
        more = f" and {len(source.skipped) - SKIPPED:,} more" if len(source.skipped) > SKIPPED else ""
        print(printable(f"not taken: {', '.join(source.skipped[:SKIPPED])}{more}"))


def _how(chosen: "ChosenMapping") -> str:
    from tangram.checkpoint.conversion.find_mapping import KEPT

    return chosen.description if chosen.description.startswith(KEPT) else f"by {chosen.description}"


def _print_result(
    made: "Restructured", chosen: "ChosenMapping", asked: TypedOptions, source: "OpenCheckpoint", notes: Sequence[str]
) -> None:
    cast = f", {made.cast:,} cast to {asked.dtype}" if made.cast else ""
    rate = size(made.nbytes / made.seconds)
    tensors = count(made.tensors, "tensor")
    print(f"{made.path}: {made.format}, {tensors}, {size(made.nbytes)}, {rate}/s; {_how(chosen)}{cast}")
    _skipped(source, notes)
    if made.rounded:
        off = f"a value by up to {max(made.rounded.values()):.2g} of itself"
        print(f"{count(len(made.rounded), 'tensor')} rounded by the mapping's add or mul, {off}: float32 loses less")
    if chosen.left:
        print(f"{count(len(chosen.left), 'tensor')} of optimiser states not converted")
    _beside(made)
    if "quantised" in chosen.source.objects:
        print(f"still {chosen.source.objects['quantised']}, bit for bit: --dequantise would make weights of it")
    if made.format == "hf" and not made.configured:
        print(UNCONFIGURED)
    if made.format == "torch_dist" and chosen.source.states and "settings" not in chosen.source.objects:
        print(UNSET)


def _planned(
    source: "OpenCheckpoint",
    target: str,
    asked: TypedOptions,
    chosen: "ChosenMapping",
    ways: Sequence["NewTensor"],
    total: int,
    notes: Sequence[str],
    rate: float | None,
) -> None:
    """What would be done, and how long it would take at so many bytes a second."""
    from tangram.checkpoint.formats.hf_export import by_size, bytes_of

    files = len(by_size(ways, bytes_of(asked.shard_size), lambda way: way.nbytes))
    fields: dict[str, Any] = {
        "from": source.format, "to": asked.to, "by": chosen.description, "tensors": len(ways), "bytes": total,
        "files": files, "left_out": list(chosen.left), "skipped": source.skipped,
        "seconds": round(total / rate, 1) if rate else None,
    }  # fmt: skip
    if asked.json:
        print_json({"dry_run": True, **fields, "ways": [way.as_json() for way in ways]})
        return
    time_ = f"about {total / rate:,.1f} s at {size(rate)}/s, read and written, as measured here" if rate else "no time"
    rows = [
        (way.name, way.spec.dtype, " ".join(map(str, way.spec.shape)) or "scalar", ", ".join(way.sources) or "filled")
        for way in ways[:ROWS]
    ]
    print_table(target, ("tensor", "dtype", "shape", "made of"), [[printable(c) for c in row] for row in rows])
    if len(ways) > ROWS:
        print(f"and {len(ways) - ROWS:,} more, which --json lists")
    what = f"{count(len(ways), 'tensor')}, {size(total)} in about {count(files, 'data file')}"
    print(f"{source.format} to {asked.to}, {_how(chosen)}: {what}; {time_}")
    _skipped(source, notes)
    if "dequantised" in source.objects:
        print(f"{count(source.objects['dequantised']['tensors'], 'weight')} would be dequantised")
    if chosen.left:
        print(f"{count(len(chosen.left), 'tensor')} of optimiser states would not be converted")


def _disk(source: "OpenCheckpoint", target: Path) -> float | None:
    """Bytes a second that go from the source to where the target will lie; None where nothing is there to read."""
    import os
    import tempfile

    there = source.path.iterdir() if source.path.is_dir() else [source.path]
    files = sorted((f for f in there if f.is_file()), key=lambda f: f.stat().st_size)
    folder = next((one for one in (target.parent, *target.parent.parents) if one.is_dir()), None)
    if not files or folder is None or not files[-1].stat().st_size:
        return None
    begin = time.perf_counter()
    with files[-1].open("rb") as stream, tempfile.TemporaryFile(dir=folder) as out:
        data = stream.read(SAMPLE)
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    return len(data) / (time.perf_counter() - begin)


def _text(file: Path | None) -> str | None:
    """A mapping of the user's own: statements, and lines that begin with #."""
    if file is None:
        return None
    if "->" in str(file) and not file.exists():
        raise UserError(f"--mapping takes a file: write {file} into one, and give its name")
    lines = file.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _settings(file: Path) -> dict[str, Any]:
    """Of the table `optimiser` of a plan or job. Raises UserError for a file that has none."""
    import tomllib

    from tangram.checkpoint.formats.common.opened import SETTINGS

    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("optimiser", {})
    except tomllib.TOMLDecodeError as error:
        raise UserError(f'"{file}" is no TOML: {error}') from None
    found = {key: table[key] for key in SETTINGS if key in table}
    if not found:
        raise UserError(f'"{file}" has no table [optimiser] with {", ".join(SETTINGS)}')
    return found


def _betas(given: str) -> tuple[float, float]:
    try:
        first, second = map(float, given.split(","))
    except ValueError:
        raise UserError(f"--betas {given}: give two numbers, as 0.9,0.95") from None
    return first, second


def _sizes(given: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in given:
        name, _, number = one.partition("=")
        if not name.isidentifier() or not number.isdigit():
            raise UserError(f"--size {one}: give a name and a number, as g=8")
        found[name] = int(number)
    return found
