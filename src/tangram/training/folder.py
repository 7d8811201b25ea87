"""The folder of a run: a new one, or one that holds nothing yet, so that no run overwrites another."""

import itertools
from pathlib import Path

from tangram.errors import UserError


def make_run_folder(out: Path | None, plan_path: Path) -> Path:
    """Make the folder asked for, which must hold no file, or the first free one of `runs/NAME`, `runs/NAME-2` ...

    NAME is the plan's file name, or for a file called plan.toml the name of its folder.
    """
    name = plan_path.resolve().parent.name if plan_path.stem == "plan" else plan_path.stem
    try:
        if out is None:
            numbered = (Path("runs", name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
            folder = next(folder for folder in numbered if _is_free(folder))
        elif _is_free(out):
            folder = out
        else:
            raise UserError(f'the folder "{out}" holds files already: give another one with --out, or remove it')
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
        probe = folder / "checkpoint" / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f'the folder of the run cannot be made: "{error.filename}": {error.strerror}') from None
    return folder


def _is_free(folder: Path) -> bool:
    """Whether nothing is there but perhaps empty folders, as a run leaves that was refused before it began."""
    if not folder.exists():
        return True
    return folder.is_dir() and not any(path.is_file() for path in folder.rglob("*"))
