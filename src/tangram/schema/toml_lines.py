"""On which line of a TOML file a key stands: a second look at text that a parser has already accepted.

Knows headers, arrays of tables, dotted and quoted keys; a key inside an inline table is found on the line of the table.
Text inside multi-line strings is not told from keys, so a line may be wrong there; plans have no such strings.
"""

import re

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
