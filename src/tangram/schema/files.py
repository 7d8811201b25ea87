"""The files of jobs and plans: read, checked before anything starts, and written.

A file is TOML with a version. One with any of `mesh`, `[axes]`, `[layouts]` is a plan, one without them a job. Keys
that are not known are refused, and every mistake is one sentence with the line, the key and, for a misspelt key, the
nearest one that exists. Reading loads neither torch nor transformers, so a mistake shows at once.

Trade-off: TOML parsers keep no positions, so the line of a key is found by a second look.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tangram.errors import UserError
from tangram.schema.job import VERSION, DataPlan, Job
from tangram.schema.plan import Plan
from tangram.schema.tables import Mistake
from tangram.schema.tuning import with_defaults

Tables = dict[str, Any]
STRATEGY = ("mesh", "axes", "layouts")
"""What a plan has and a job has not."""

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_WORDS = {"stdlib", "bytes", "model"}  # stand where a path could, and are none
_NO_CHANGES: Mapping[str, str] = MappingProxyType({})
_Any = TypeVar("_Any", bound=Job)


def load(path: Path | str, changes: Mapping[str, str] = _NO_CHANGES) -> Job | Plan:
    """Read and check a job or a plan, with some keys changed; paths in it become absolute.

    `changes`: dotted keys and values as on the command line, {"run.steps": "300", "data.sources.0.path": "text"}.
    Values are TOML; what is no TOML value is taken as text. Raises UserError for any mistake.
    """
    path = Path(path)
    text = _read(path)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: this is not TOML: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: this is no plan: its values are nested too deeply") from None
    if "version" not in tables:
        raise UserError(f'{path}: the key "version" is missing: write version = {VERSION}')
    try:
        tables = migrate(tables)
    except UserError as error:
        raise UserError(f"{path}, line {line_of(text, ['version'])}: {error}") from None
    for key, value in changes.items():
        _set(tables, key, value)
    tables = with_defaults(tables)
    kind = Plan if any(key in tables for key in STRATEGY) else Job
    try:
        found = absolute(kind.model_validate(tables), path.parent)
    except ValidationError as error:
        raise UserError(_sentence(kind, path, text, changes, error.errors(include_url=False))) from None
    if isinstance(found, Plan):
        found.actions()  # of a table, the file, which is known only now
    return found


def loads(text: str) -> Job | Plan:
    """A job or a plan from what `dumps` wrote, paths as they stand. Raises UserError."""
    try:
        tables = migrate(tomllib.loads(text))
        return (Plan if any(key in tables for key in STRATEGY) else Job).model_validate(tables)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"this is not TOML: {error}") from None
    except ValidationError as error:
        raise UserError(mistakes(error)) from None


def mistakes(error: ValidationError) -> str:
    """What is wrong with a plan that was made in memory, in words: no file, no lines."""
    return "; ".join(_what(Plan, one, _located(Plan, one)) for one in error.errors(include_url=False))


def changes_of(words: Iterable[str]) -> dict[str, str]:
    """The changes that `--set KEY=VALUE` words ask for. Raises UserError for a word without an equals sign."""
    changes: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise UserError(f'--set {word}: write a key and a value, as in "--set run.steps=300"')
        changes[key.strip()] = value.strip()
    return changes


def dumps(plan: Job) -> str:
    """The plan (or job) as a file that reads back equal: paths absolute, defaults left out."""
    plan = absolute(plan, Path.cwd())
    tables = {"version": plan.version, **plan.model_dump(exclude_defaults=True)}
    what = "plan: a job with its strategy" if isinstance(plan, Plan) else "job: what to train, without a strategy"
    use = "tangram plan show FILE explains it, tangram train FILE runs it"
    return f"# A Tangram {what}. {use}.\n\n{tomli_w.dumps(tables)}"


def absolute(plan: _Any, folder: Path) -> _Any:
    """The same with relative paths found from `folder`, `~` and `$VAR` as a shell has them.

    "stdlib", "bytes" and "model" are words and no paths. Raises UserError for a variable that is not set.
    """

    def full(text: str) -> str:
        known = os.path.expandvars(text)
        if missing := _VARIABLE.search(known):
            raise UserError(f"{text!r} is no path: the environment variable {missing[0]} is not set")
        try:
            return text if text in _WORDS else str((folder / Path(known).expanduser()).resolve())
        except (RuntimeError, ValueError, OSError) as error:  # no such home, a zero byte, a loop of links
            raise UserError(f"{text!r} is no path: {error}") from None

    texts = {
        key: sources and tuple(one.model_copy(update={"path": full(one.path)}) for one in sources)
        for key, sources in (("sources", plan.data.sources), ("evaluation", plan.data.evaluation))
    }
    own = {"tokenizer": full(plan.data.tokenizer), "cache": plan.data.cache and full(plan.data.cache)}
    data: DataPlan = plan.data.model_copy(update={**texts, **own})
    paths = {key: text and full(text) for key, text in (("path", plan.model.path), ("rules", plan.model.rules))}
    file, colon, function = (plan.model.code or "").partition(".py:")
    code = file and full(f"{file}.py" if colon else file) + (f":{function}" if colon else "")
    model = plan.model.model_copy(update={**paths, "code": code or None})
    lora = plan.lora and plan.lora.model_copy(update={"start": plan.lora.start and full(plan.lora.start)})
    asked = plan.distill and {"teacher": plan.distill.teacher, "cache": plan.distill.cache}
    distill = plan.distill and plan.distill.model_copy(update={k: v and full(v) for k, v in (asked or {}).items()})
    pipeline = {}
    if isinstance(plan, Plan) and plan.pipeline is not None and plan.pipeline.table is not None:
        pipeline = {"pipeline": plan.pipeline.model_copy(update={"table": full(plan.pipeline.table)})}
    return plan.model_copy(update={"data": data, "model": model, "lora": lora, "distill": distill, **pipeline})


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no plan file {path}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: this is not TOML: it is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"the plan file {path} cannot be read: {error.strerror}") from None


def _set(tables: Tables, key: str, text: str) -> None:
    """Change one key of the tables; what is not there yet is made."""
    keys = _schema_keys(split_key(key))
    here: Any = tables
    for at, part in enumerate(keys[:-1]):
        if isinstance(here, list):
            here = _item(cast(list[Any], here), part, key, text)
        elif isinstance(here, dict):
            here = cast(Tables, here).setdefault(part, {})
        if not isinstance(here, dict | list):
            raise UserError(f'--set {key}={text}: "{".".join(keys[: at + 1])}" is a value and has no keys below it')
    if isinstance(here, list):
        items = cast(list[Any], here)
        _item(items, keys[-1], key, text)
        items[int(keys[-1])] = _value(text)
    else:
        cast(Tables, here)[keys[-1]] = _value(text)


def _schema_keys(parts: Sequence[str]) -> list[str]:
    """The parts of a dotted key; below a table of free names the rest is one name, as in model.change.x."""
    table: Any = Plan
    for at, part in enumerate(parts):
        field = table.model_fields.get(part) if table is not None else None
        if field is None:
            table = table if part.isdigit() else None
        elif get_origin(field.annotation) is dict:
            rest = parts[at + 1 :]
            return [*parts[: at + 1], *([".".join(rest)] if rest else [])]
        else:
            table = _table_in(field.annotation)
    return list(parts)


def _item(items: list[Any], part: str, key: str, text: str) -> Any:
    if not part.isdigit() or int(part) >= len(items):
        raise UserError(f'--set {key}={text}: "{part}" is none of the {len(items)} items, which count from 0')
    return items[int(part)]


def _value(text: str) -> Any:
    try:
        tables = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return tables["value"] if len(tables) == 1 else text


def _sentence(kind: type[Job], path: Path, text: str, changes: Mapping[str, str], errors: list[ErrorDetails]) -> str:
    """All that is wrong as one sentence: one mistake in full, a misspelt key before the key it leaves missing."""
    located = [(error, _located(kind, error)) for error in errors]
    first = {"extra_forbidden": 0, "missing": 2}
    error, keys = min(located, key=lambda item: first.get(item[0]["type"], 1))
    change = next((key for key in changes if keys and _one_holds_other(_schema_keys(split_key(key)), keys)), None)
    line = line_of(text, keys)
    where = f"--set {change}={changes[change]}" if change else f"{path}, line {line}" if line else f"{path}"
    others = len({tuple(keys) for _, keys in located}) - 1
    return f"{where}: {_what(kind, error, keys)}{f' (and {others} more)' if others else ''}"


def _one_holds_other(one: list[str], other: list[str]) -> bool:
    return one[: len(other)] == other[: len(one)]


def _what(kind: type[Job], error: ErrorDetails, keys: list[str]) -> str:
    key = ".".join(keys)
    match error["type"]:
        case "extra_forbidden":
            return f'unknown key "{key}"; {_hint(kind, keys)}'
        case "missing":
            return f'the key "{key}" is missing'
        case "value_error":  # our own sentences
            reason = " ".join(str(error.get("ctx", {}).get("error", error["msg"])).split())
            return f"{key}: {reason}" if key else reason
        case "tuple_type" if isinstance(given := error["input"], str):
            return f'{key} = {given!r}: write a list, as ["{given}"]'
        case "literal_error" if near := _nearest(error):
            return f'{key} = {error["input"]!r}: did you mean "{near}"?'
        case _:
            given = repr(error["input"])
            given = given if len(given) <= 60 else f"{given[:57]}..."
            message = re.sub(r"valid dictionary( or .*)?$", "table", error["msg"])
            return f"{key} = {given}: {message[:1].lower()}{message[1:]}"


def _nearest(error: ErrorDetails) -> str:
    """The known word that is most like the one given; none where nothing is."""
    known = re.findall("'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    return next(iter(difflib.get_close_matches(str(error["input"]), known, n=1)), "")


def _hint(kind: type[Job], keys: list[str]) -> str:
    """The nearest known key of the same table, or the table where a key of this name stands, or all known ones."""
    table = _table_at(kind, keys[:-1])
    known = list(table.model_fields) if table else []
    if near := difflib.get_close_matches(keys[-1], known, n=1):
        return f'did you mean "{near[0]}"?'
    if elsewhere := [name for name in _all_keys(Plan) if name.rpartition(".")[2] == keys[-1]]:
        return f'did you mean "{elsewhere[0]}"?'
    return f"known are {', '.join(known)}"


def _all_keys(table: type[BaseModel], above: str = "") -> Iterable[str]:
    for name, field in table.model_fields.items():
        yield f"{above}{name}"
        if (below := _table_in(field.annotation)) is not None and get_origin(field.annotation) is not tuple:
            yield from _all_keys(below, f"{above}{name}.")


def _located(kind: type[Job], error: ErrorDetails) -> list[str]:
    """Where in the file the mistake is: pydantic's place without what it adds for unions and keys."""
    keys: list[str] = []
    mistake = error.get("ctx", {}).get("error")
    if isinstance(mistake, Mistake):
        return _schema_keys(split_key(mistake.key))
    table: type[BaseModel] | None = kind
    free = False
    for part in error["loc"]:
        if free:
            return [*keys, str(part)]
        keys.append(str(part))
        if isinstance(part, int):
            continue
        field = table.model_fields.get(part) if table else None
        if field is None:
            break
        free = get_origin(field.annotation) is dict
        table = _table_in(field.annotation)
    return keys


def _table_at(kind: type[Job], keys: list[str]) -> type[BaseModel] | None:
    """The schema of the table at `keys`."""
    table: type[BaseModel] | None = kind
    for key in keys:
        if table is None or key.isdigit():
            continue
        table = _table_in(table.model_fields[key].annotation)
    return table


def _table_in(annotation: Any) -> type[BaseModel] | None:
    """The table that an annotation speaks of: itself, or the items of its array."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for kind in get_args(annotation) if (found := _table_in(kind))), None)


# ---------------------------------------------------------------- files of older versions


def migrate(tables: Tables) -> Tables:
    """The tables of a plan file as those of version `VERSION`. Raises UserError for a version that is not known yet."""
    version = tables.get("version")
    if isinstance(version, bool) or not isinstance(version, int):
        return tables
    if version > VERSION:
        raise UserError(
            f"version = {version}: this Tangram reads plans of version {VERSION} and older; update Tangram, or write "
            "the plan anew"
        )
    while version in STEPS:
        tables = STEPS[version](tables)
        version = tables["version"]
    return tables


def one_to_two(tables: Tables) -> Tables:
    """Version 1 had the one mesh axis dp, one source of text, and layouts of parameters only."""
    new = {**tables, "version": 2}
    if isinstance(layouts := new.get("layouts"), dict):
        new["layouts"] = {"parameters": cast(Tables, layouts)}
    if "mesh" in new:
        new["axes"] = {"data": ["dp"]}
    if isinstance(found := new.get("data"), dict):
        data = dict(cast(Tables, found))
        if "root" in data:
            data["sources"] = [{"path": data.pop("root"), "pattern": data.pop("pattern", "**/*.py")}]
        new["data"] = data
    return new


def two_to_three(tables: Tables) -> Tables:
    """Version 2 could say how activations lie around modules; that follows from how their parameters lie."""
    new = {**tables, "version": 3}
    if isinstance(layouts := new.get("layouts"), dict):
        new["layouts"] = {key: rules for key, rules in cast(Tables, layouts).items() if key != "activations"}
    return new


STEPS: Mapping[int, Callable[[Tables], Tables]] = MappingProxyType({1: one_to_two, 2: two_to_three})
"""From each version to the next: a file of any age walks all steps from its own. A step leaves alone what it does not
understand; the check that follows says what is wrong with it."""


# ----------------------------------------------------------------
# On which line of a TOML file a key stands: a second look at text that a parser has already accepted.
# Knows headers, arrays of tables, dotted and quoted keys; one inside an inline table is found on the line of the table.
# Text inside multi-line strings is not told from keys, so a line may be wrong there; plans have no such strings.


_PART = re.compile(r"""\s*("[^"]*"|'[^']*'|[^\s."'=]+)\s*(?:\.|$)""")


_HEADER = re.compile(r"\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(#.*)?$")


_ENTRY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=""")


def split_key(key: str) -> list[str]:
    """The parts of a dotted key: run.steps is run, steps; "a.b".c is a.b, c."""
    return [part.strip("\"'") for part in _PART.findall(key)] or [key]


def line_of(text: str, keys: list[str]) -> int | None:
    """The line on which a key stands, or its table when the key itself is not there; None when neither is.

    Items of arrays of tables count from 0, as in data, sources, 1, path.
    """
    found, depth = None, 0
    table: list[str] = []
    items: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _place(split_key(header[2]), header[1] == "[[", items)
            if table == keys[: len(table)] and len(table) > depth:
                found, depth = number, len(table)
        elif entry := _ENTRY.match(line):
            here = [*table, *split_key(entry[1])]
            if here == keys[: len(here)]:
                return number
    return found


def _place(parts: list[str], is_item: bool, items: dict[tuple[str, ...], int]) -> list[str]:
    """The keys of a header with the items of arrays that it stands in."""
    place: list[str] = []
    for at, part in enumerate(parts, start=1):
        place.append(part)
        path = tuple(place)
        if is_item and at == len(parts):
            items[path] = items.get(path, -1) + 1
        if path in items:
            place.append(str(items[path]))
    return place
