"""The folder of a run: a new or empty one, so that no run overwrites another; or that of a run to go on with."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

from tangram.errors import UserError

PLAN_FILE = "plan.toml"  # what is run, complete; whoever writes it first has the folder
CHECKPOINTS = "checkpoint"
SUMMARY_FILE = "summary.json"  # written last, so it says that all proofs held
RUNS = Path("runs")


def near(path: Path) -> Path:
    """A path as a person here would type it: relative where it is below the folder one is in."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def run_name(plan_path: Path) -> str:
    """The name of a plan's runs: its file's, or for plan.toml and job.toml the one of their folder."""
    return plan_path.resolve().parent.name if plan_path.stem in ("plan", "job") else plan_path.stem


@contextlib.contextmanager
def run_folder(out: Path | None, name: str, plan_text: str) -> Generator[Path]:
    """Take the folder asked for, which must hold no file, or the first free one of `runs/NAME`, `runs/NAME-2` ...

    A folder is taken by writing the plan into it: of two runs that begin together only one gets it. A run that leaves
    nothing else gives it back. Raises UserError for a folder that holds files and for one that cannot be made.
    """
    try:
        folder = _take(out, name, plan_text)
    except OSError as error:
        raise UserError(f'the folder of the run cannot be made: "{error.filename}": {error.strerror}') from None
    try:
        with alone(folder):
            yield folder
    finally:
        if _files(folder) == [folder / PLAN_FILE]:
            (folder / PLAN_FILE).unlink()


@contextlib.contextmanager
def alone(folder: Path) -> Generator[Path]:
    """Keep other runs out of the folder of a run that begins or goes on; two would remove each other's checkpoints.

    The lock is on the folder itself and ends with this process, however that ends. A filesystem that locks no folders
    (some NFS) keeps nobody out. Raises UserError where another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f'another process is training in "{folder}": wait for its end, or stop it') from None
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                raise
        yield folder
    finally:
        os.close(descriptor)


def replace_plan(folder: Path, plan_text: str) -> None:
    """Make this the plan of a run that goes on; the one before, if it is another, is kept as plan-N.toml."""
    current = folder / PLAN_FILE
    try:
        if current.exists():
            if current.read_text(encoding="utf-8") == plan_text:
                return
            current.rename(next(path for n in itertools.count(1) if not (path := folder / f"plan-{n}.toml").exists()))
        current.write_text(plan_text, encoding="utf-8")
    except OSError as error:
        raise UserError(f'the run cannot go on in "{folder}": "{error.filename}": {error.strerror}') from None


def proved(folder: Path, checkpoint: Path) -> dict[str, Any] | None:
    """The summary of a run, where it is of this checkpoint; None where what comes after training is still to be done.

    A run that went on with more steps has the summary of fewer until it ends.
    """
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        return summary if Path(summary["checkpoint"]).name == checkpoint.name else None
    except (OSError, ValueError, TypeError, KeyError):  # none, or cut off by hand
        return None


def folder_to_resume(out: Path | None, name: str | None) -> Path | None:
    """The folder of the run to go on with: `out`, or the last of `runs/NAME`, `runs/NAME-2` ... that is there.

    None where there is none yet, or an empty one, so that one command begins a run and goes on with it. Raises
    UserError for a folder of something else, and where nothing says which run it is.
    """
    if out is not None:
        if out.is_dir() and any((out / own).exists() for own in (PLAN_FILE, CHECKPOINTS)):
            return out
        if out.exists() and (not out.is_dir() or _files(out)):
            what = "holds files, but no run of `tangram train`" if out.is_dir() else "is a file"
            raise UserError(f'there is no run to resume in "{out}": it {what}')
        return None
    if name is None:
        raise UserError("say what to resume: give the plan, or the folder of the run with --out")
    there = [folder for folder in itertools.takewhile(Path.is_dir, _numbered(name)) if (folder / PLAN_FILE).is_file()]
    return there[-1] if there else None


def _numbered(name: str) -> Generator[Path]:
    for number in itertools.count(1):
        yield RUNS / (name if number == 1 else f"{name}-{number}")


def refuse_in_use(out: Path) -> None:
    """Raise UserError for what cannot be the folder of a new run."""
    if out.exists() and (not out.is_dir() or _files(out)):
        _refuse(out)


def _refuse(out: Path) -> NoReturn:
    if out.is_dir():
        with alone(out):  # else that is why
            pass
    what = f'the folder "{out}" holds files already' if out.is_dir() else f'"{out}" is a file'
    raise UserError(f"{what}: give another folder with --out, go on in it with --resume, or remove it")


def _take(out: Path | None, name: str, plan_text: str) -> Path:
    if out is not None:
        if not _claimed(out, plan_text):
            _refuse(out)
        return out
    return next(folder for folder in _numbered(name) if _claimed(folder, plan_text))


def _claimed(folder: Path, plan_text: str) -> bool:
    """Take a folder in which nothing is but perhaps empty folders; False if it is taken."""
    if folder.exists() and (not folder.is_dir() or _files(folder)):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / PLAN_FILE).open("x", encoding="utf-8") as stream:
            stream.write(plan_text)
    except FileExistsError:
        return False
    return True


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
