"""The folder of a run: a new one, or one that holds nothing yet, so that no run overwrites another."""

import contextlib
import itertools
from collections.abc import Generator
from pathlib import Path

from tangram.errors import UserError

PLAN_FILE = "plan.toml"  # what was asked for, as it was read; whoever writes it first has the folder


@contextlib.contextmanager
def run_folder(out: Path | None, plan_path: Path) -> Generator[Path]:
    """Take the folder asked for, which must hold no file, or the first free one of `runs/NAME`, `runs/NAME-2` ...

    NAME is the plan's file name, or for a file called plan.toml the name of its folder. A folder is taken by writing
    the plan into it: of two runs that begin together only one gets it. A run that leaves nothing else gives it back.
    """
    try:
        folder = _take(out, plan_path)
        (folder / "checkpoint").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f'the folder of the run cannot be made: "{error.filename}": {error.strerror}') from None
    try:
        yield folder
    finally:
        if _files(folder) == [folder / PLAN_FILE]:
            (folder / PLAN_FILE).unlink()


def _take(out: Path | None, plan_path: Path) -> Path:
    text = plan_path.read_bytes()
    if out is not None:
        if not _claimed(out, text):
            what = f'the folder "{out}" holds files already' if out.is_dir() else f'"{out}" is a file'
            raise UserError(f"{what}: give another folder with --out, or remove it")
        return out
    name = plan_path.resolve().parent.name if plan_path.stem == "plan" else plan_path.stem
    numbered = (Path("runs", name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in numbered if _claimed(folder, text))


def _claimed(folder: Path, text: bytes) -> bool:
    """Take a folder in which nothing is but perhaps empty folders; False if it is taken."""
    if folder.exists() and (not folder.is_dir() or _files(folder)):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / PLAN_FILE).open("xb") as stream:
            stream.write(text)
    except FileExistsError:
        return False
    return True


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
