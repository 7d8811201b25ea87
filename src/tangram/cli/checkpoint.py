"""`tangram checkpoint`: look into checkpoints, verify them, compare two, export one, prune a folder of them."""

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tangram.cli.convert import TypedOptions, compared, config_option, run
from tangram.cli.grouped import Json, with_options
from tangram.cli.output import byte_bar, print_json, print_table, size
from tangram.errors import UserError
from tangram.training.observe.text_tables import count, printable

if TYPE_CHECKING:
    from tangram.checkpoint.inspect.verify import VerifyReport


ROWS = 30
"""Of a table of what is wrong or differs; --json has all."""

checkpoint = typer.Typer()


def _local(path: Path) -> Path:
    """The path. Raises UserError for the address of an object store, which is none."""
    scheme, colon, rest = str(path).partition(":/")
    if colon and len(scheme) > 1 and scheme.isalnum() and not path.exists():
        raise UserError(
            f'"{scheme}://{rest}" is the address of an object store, which this does not look into: '
            "`tangram checkpoint convert ADDRESS DIR --to tangram` brings a checkpoint here, and `diff` reads it there"
        )
    return path


Folder = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a folder of them.", callback=_local)]
Pattern = Annotated[str, typer.Argument(metavar="[NAMES]", help="Only tensors that fit, as 'model.layers.*'.")]


@checkpoint.callback(invoke_without_command=True)
def _none(context: typer.Context) -> None:
    """Look into checkpoints, verify, compare, export and prune them."""
    if context.invoked_subcommand is None:
        raise UserError("give one of inspect, verify, diff, convert, family and prune; --help lists them")


@checkpoint.command()
def inspect(
    path: Folder,
    pattern: Pattern = "*",
    values: Annotated[str | None, typer.Option(metavar="NAME", help="Look at the values of a tensor.")] = None,
    all_lines: Annotated[bool, typer.Option("--all", help="A line for each tensor; layers are not folded.")] = False,
    depth: Annotated[int, typer.Option(min=1, help="How many levels of the tree.")] = 99,
    json: Json = False,
) -> None:
    """Show the tree of tensors of a checkpoint, and where it comes from; of a folder, its checkpoints."""
    from tangram.checkpoint.inspect import foreign, quantised_weights, tree
    from tangram.checkpoint.store import commits
    from tangram.cli.foreign import inspect_foreign, print_tree, print_values, quantised_rows

    with _files():
        if not (path / commits.MARKER).exists() and (found := commits.committed(path)):
            rows = [(p.name, str(m.step), m.created, size(sum(m.sizes.values()))) for p, m in found]
            listed = [{"path": str(p), "step": m.step, "created": m.created, "id": m.id} for p, m in found]
            if json:
                print_json({"checkpoints": listed})
            else:
                _table(str(path), ("checkpoint", "step", "created", "size"), rows)
            return
        if (kind := foreign.format_of(path)) is not None:
            inspect_foreign(path, kind, pattern, values, all_lines, depth, json)
            return
        foreign.refuse_unknown(path)
        manifest, quantised = quantised_weights.of_own(path, commits.read_manifest(path))
        if values is not None:
            print_values(foreign.values_of_own(path, manifest, values), json)
            return
        tensors = tree.chosen(manifest, pattern)
        if json:
            print_json(tree.as_json(path, manifest, tensors))
            return
    about = [("step", str(manifest.step)), ("created", manifest.created), ("id", manifest.id)]
    about += [("mesh", manifest.mesh or "not said"), ("tensors", f"{len(manifest.tensors):,}, {size(manifest.nbytes)}")]
    about += [("files", f"{len(manifest.files):,}, {size(sum(f.size for f in manifest.files.values()))}")]
    about += quantised_rows(quantised)
    _table(str(path), ("what", "value"), about)
    print_tree(tensors, all_lines, depth)
    if manifest.objects:
        _table("Objects", ("name", "value"), [(k, tree.short(v)) for k, v in manifest.objects.items()])


@checkpoint.command()
def verify(
    path: Folder,
    newest: Annotated[bool, typer.Option("--newest", help="Of a folder only the newest checkpoint.")] = False,
    json: Json = False,
) -> int:
    """Read every byte once: checksums, headers, digests, coverage; exit code 1 when something is wrong."""
    from tangram.checkpoint.inspect import foreign
    from tangram.checkpoint.inspect import verify as of
    from tangram.cli.foreign import verify_foreign

    with _files():
        if foreign.format_of(path) is not None:
            return verify_foreign(path, json)
        foreign.refuse_unknown(path)
        paths = of.checkpoints_in(path)
        paths = paths[-1:] if newest else paths
        with byte_bar("verifying", sum(of.size_of(one) for one in paths)) as on_bytes:
            reports = [of.verify(one, on_bytes) for one in paths]
        damaged = tuple(report.path for report in reports if not report.sound)
        offer = None
        if damaged and reports[-1].path in damaged:
            with byte_bar("looking for an older one that is sound", None) as on_bytes:
                offer = of.newest_sound(reports[-1].path, on_bytes, damaged)
    if json:
        fields = [report.as_json() for report in reports]
        print_json({"sound": not damaged, "checkpoints": fields, "offer": str(offer) if offer else None})
    else:
        for report in reports:
            _print(report)
        if offer:
            print(f'the newest older checkpoint that is sound: "{offer}"')
    return 1 if damaged else 0


@checkpoint.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format; also s3://...")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of any layout, format and structure.")],
    pattern: Pattern = "*",
    config: Annotated[Path | None, config_option("Where the model's config.json lies.")] = None,
    json: Json = False,
) -> int:
    """Compare names, shapes, types, values and objects of two checkpoints; exit code 1 when something differs."""
    from tangram.checkpoint.inspect.tree import short

    with _files():
        found = compared(a, b, pattern, config)
    if json:
        print_json({"a": str(a), "b": str(b), **found.as_json()})
        return 0 if found.same else 1
    rows = [
        (
            one.name,
            {"a": "only in A", "b": "only in B", "codes": "codes, not values"}.get(one.kind, one.kind),
            one.a,
            one.b if one.b != one.a else "",
            f"{one.differing:,} of {one.elements:,}" if one.elements else "",
            f"{one.largest:.3g}" if one.elements else "",
            f"{one.relative:.3g}" if one.elements else "",
            "{:,} {:,}".format(*one.nans) if any(one.nans) else "",
        )
        for one in found.changes
    ]
    if rows:
        headers = ("tensor", "differs", "A", "B", "elements", "largest", "relative", "NaNs")
        _table(f"{count(len(rows), 'tensor')} not the same", headers, rows[:ROWS])
        _more(len(rows))
    if found.objects:
        said = [(one.name, *map(_absent, one.there, (short(one.a, 40), short(one.b, 40)))) for one in found.objects]
        _table(f"{count(len(said), 'object')} not the same", ("name", "A", "B"), said)
    print(f"{count(found.equal, 'tensor')} the same in both" + ("" if found.changes else ", none differs"))
    return 0 if found.same else 1


@checkpoint.command()
@with_options(TypedOptions)
def convert(
    asked: TypedOptions,
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint of any format that is read; also s3://...")
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="A new directory, or the address of an object store.")],
) -> int:
    """Convert a checkpoint to another format and structure, as a stream; what is not cast has the same bits."""
    with _files():
        run(source, target, asked)
    return 0


@checkpoint.command()
def family(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint of any format that is read.")],
    name: Annotated[str | None, typer.Argument(metavar="[FAMILY]", help="A name, or a file of your own.")] = None,
    config: Annotated[Path | None, config_option("Where the configuration lies.")] = None,
    json: Json = False,
) -> int:
    """Say what of a checkpoint its family does not name, and what is missing; exit code 1 where it does not fit."""
    from tangram.checkpoint.conversion.convert import config_of, small_of
    from tangram.checkpoint.conversion.quantised import by_weights
    from tangram.checkpoint.formats.detect import open_any
    from tangram.checkpoint.inspect.family_coverage import cover
    from tangram.models.families import family_named, family_of

    with _files():
        source = by_weights(open_any(path))
        found = config_of(small_of(config) if config else dict(source.small))
        if found is None:
            raise UserError("there is no config.json, which says what the model is: give --config DIR")
        fit = cover(source, family_named(name) if name else family_of(found), found)
    if json:
        print_json({"path": str(path), "format": source.format, **fit.as_json()})
        return 0 if fit.complete else 1
    rows = [(what, one) for what, some in (("not named", fit.uncovered), ("missing", fit.missing)) for one in some]
    if rows:
        _table("", ("what", "tensor"), rows[:ROWS])
        _more(len(rows))
    if fit.wrong:
        print(printable(fit.wrong))
    names = f"{count(len(source.specs), 'tensor')} by the names of {fit.names}"
    left = f", {len(fit.left):,} of optimiser states" if fit.left else ""
    said = f"{fit.covered:,} named, {len(fit.uncovered):,} not, {len(fit.missing):,} missing"
    print(f"{path}: the family {fit.family}, {names}{left}: {said}{'' if fit.complete else ': it does not fit'}")
    return 0 if fit.complete else 1


@checkpoint.command()
def prune(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of checkpoints.", callback=_local)],
    keep: Annotated[list[str] | None, typer.Option(help="last=3, every=1000, best=loss:min:2, younger=7d.")] = None,
    partials: Annotated[bool, typer.Option("--partials", help="Also what is torn or dead runs left.")] = False,
    verified: Annotated[bool, typer.Option("--verify", help="First read the newest: it must be sound.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and stop.")] = False,
    json: Json = False,
) -> None:
    """Remove the checkpoints that no rule keeps; the newest stays in any case."""
    from tangram.checkpoint.inspect.verify import verify as read
    from tangram.checkpoint.store import retention

    policy = retention.parse(keep or [])
    with _files():
        with byte_bar("verifying the newest", None) as on_bytes:
            pruning = retention.plan(
                folder, policy, sound=(lambda path: read(path, on_bytes).sound) if verified else None
            )
        if not dry_run:
            retention.prune(pruning, partials)
    if json:
        print_json({"dry_run": dry_run, **pruning.as_json()})
        return
    goes, stays = ("would be removed", "would stay") if dry_run else ("removed", "stays")
    rows = [(path.name, stays, ", ".join(why)) for path, why in pruning.kept.items()]
    rows += [(path.name, goes, size(nbytes)) for path, nbytes in pruning.removed.items()]
    for one in pruning.leftovers:
        left = "not removed: --partials" if one.dead else "not removed"
        rows.append((one.path.name, goes if partials and one.dead else left, f"{size(one.nbytes)}, {one.why}"))
    _table(str(folder), ("checkpoint", "what", "why"), rows)


def _print(report: "VerifyReport") -> None:
    rate = f", {size(report.nbytes / report.seconds)}/s" if report.nbytes else ""
    said = "sound" if report.sound else f"DAMAGED, {count(len(report.findings), 'finding')}"
    print(
        f"{report.path}: {said}: step {report.step}, {report.tensors:,} tensors, "
        f"{size(report.nbytes)} in {report.files:,} files read{rate}"
    )
    if report.findings:
        rows = [
            (
                one.kind,
                one.text,
                f"{one.start:,} to {one.stop:,}" if one.start is not None else "",
                ", ".join(one.tensors[:3]) + (f" and {len(one.tensors) - 3:,} more" if len(one.tensors) > 3 else ""),
            )
            for one in report.findings
        ]
        _table("", ("kind", "what", "bytes", "tensors"), rows[:ROWS])
        _more(len(rows))


def _absent(there: bool, text: str) -> str:
    return text if there else "not there"


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of what others wrote: names that would move the cursor are shown as what they are."""
    print_table(printable(title), headers, [[printable(cell) for cell in row] for row in rows])


def _more(rows: int) -> None:
    if rows > ROWS:
        print(f"and {rows - ROWS:,} more, which --json lists")


@contextlib.contextmanager
def _files() -> Generator[None]:
    """What the file system refuses is told in a sentence; cycles are looked for seldom among a million tensors."""
    from tangram.checkpoint.conversion.converting import rare_collections

    try:
        with rare_collections():
            yield
    except OSError as error:
        what = f'"{error.filename}"' if error.filename else "a file cannot be read or written to its end"
        raise UserError(f"{what}: {error.strerror or error}") from None
