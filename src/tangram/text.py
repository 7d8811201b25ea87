"""Tables as plain text, for what `str` gives of a result and for commands whose output is no terminal."""

from collections.abc import Sequence


def plain(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in aligned columns, its title first."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (headers, *rows)]
    return [title, *(line.rstrip() for line in lines)]
