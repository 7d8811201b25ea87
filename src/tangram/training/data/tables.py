"""Text in tables: parquet files and `datasets` directories, some rows at a time.

Their libraries are an extra, and have no types: what they return is checked here, where it enters.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from tangram.errors import UserError
from tangram.training.data.rows import Row, no_field, text_of, unreadable

_ROWS = 1000  # of a table that are in memory at once


def parquet_rows(path: Path, field: str, first: int) -> Generator[Row]:
    """The documents of a parquet file from row `first` on; row groups before that are not read."""
    try:
        import pyarrow as arrow_  # pyright: ignore[reportMissingTypeStubs]
        import pyarrow.parquet as parquet_  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise _needs_extra("parquet files", "pyarrow") from None
    arrow, parquet = cast(Any, arrow_), cast(Any, parquet_)
    try:
        with parquet.ParquetFile(path) as file:
            names = cast("list[str]", file.schema_arrow.names)
            if field not in names:
                raise no_field(field, names, f'"{path}"')
            rows, number = max(1, int(file.metadata.num_rows)), 0
            for group in range(int(file.num_row_groups)):
                size = int(file.metadata.row_group(group).num_rows)
                if number + size <= first:
                    number += size
                    continue
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[field]):
                    values = cast("list[object]", batch.column(0).to_pylist())
                    for row, value in enumerate(values, number):
                        if row >= first and (text := text_of(value, field, f'row {row + 1} of "{path}"')):
                            yield Row(row, text, (row + 1) / rows)
                    number += len(values)
    except cast("type[Exception]", arrow.ArrowException) as error:
        raise unreadable(path, error) from None


def dataset_rows(root: Path, field: str, first: int) -> Generator[Row]:
    """The documents of a directory that `save_to_disk` has written, from row `first` on; of splits, the one "train"."""
    try:
        import datasets as datasets_  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise _needs_extra("`datasets` directories", "datasets") from None
    datasets = cast(Any, datasets_)
    hidden = bool(datasets.are_progress_bars_disabled())
    datasets.disable_progress_bars()
    try:
        found = datasets.load_from_disk(str(root))
    except Exception as error:  # noqa: BLE001  arrow's, datasets' and json's errors all mean the same to the user
        raise unreadable(root, error) from None
    finally:
        if not hidden:
            datasets.enable_progress_bars()
    if isinstance(found, datasets.DatasetDict):
        splits = cast("dict[str, Any]", found)
        if "train" not in splits:
            raise UserError(
                f'the `datasets` directory "{root}" has no split "train" but {", ".join(splits)}: give the '
                "directory of one of them"
            )
        found = splits["train"]
    names = cast("list[str]", found.column_names)
    if field not in names:
        raise no_field(field, names, f'"{root}"')
    column, rows = found.select_columns([field]), len(found)
    for start in range(first, rows, _ROWS):
        values = cast("list[object]", column[start : start + _ROWS][field])
        for row, value in enumerate(values, start):
            if text := text_of(value, field, f'row {row + 1} of "{root}"'):
                yield Row(row, text, (row + 1) / rows)


def _needs_extra(what: str, package: str) -> UserError:
    return UserError(f'{what} are read with {package}, which is not installed: pip install "tangram-train[data]"')
