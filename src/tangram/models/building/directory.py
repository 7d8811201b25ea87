"""What is the matter with the directory of a model that cannot be used, in a sentence that says what to do.

    a name on the hub        nothing is downloaded here: the sentence has the command that does
    pointers of git-lfs      a clone without the large files, which are a few lines of text each
    another format           GGUF and others that are not read; pickles, which `checkpoint convert` reads
    weights in a sub-folder  of a step of a training

It imports nothing heavy, so every command can ask before it loads torch.
"""

import re
from pathlib import Path

from tangram.errors import UserError

POINTER = b"version https://git-lfs.github.com/spec/"
LONGEST_POINTER = 1024
READ = ".safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
UNREAD = (".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz", ".ot", ".nemo", ".tflite", ".pte", ".mlx")
"""How names of files with weights end that no command reads."""
TEXT = (".json", ".model", ".txt", ".tiktoken", ".spm", ".jinja", ".py")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def refuse_missing(name: str | Path, what: str = "model") -> None:
    """Raise UserError where there is nothing at a path: of a name on the hub, how to get what it names."""
    if not Path(name).exists():
        other = f": give a Hugging Face directory{' or a configuration file' if what == 'model' else ''}"
        raise UserError(f'the {what} "{name}" does not exist{hub_hint(name) or other}')


def hub_hint(name: str | Path) -> str:
    """How to get what a path that is not there names on the hub; "" where it is no such name.

    A path that was made absolute counts by its last two parts, where not even the folder around it is there.
    """
    path = Path(name)
    short = "/".join(path.parts[-2:]) if path.is_absolute() and not path.parent.exists() else str(name)
    there = len(path.parts) > 1 and path.parent.exists()
    if there or not _HUB.fullmatch(short) or Path(short).suffix in (READ, *PICKLED, *UNREAD, *TEXT, ".toml"):
        return ""
    own = short.partition("/")[2]
    return (
        f": if {short} is a name on the Hugging Face hub, download it with `hf download {short} --local-dir {own}` and "
        f"give {own}"
    )


def refuse_pointers(path: Path, ends: tuple[str, ...] = (READ, *PICKLED, *UNREAD, *TEXT)) -> None:
    """Raise UserError where a file (or one of a directory, whose name ends so) is a pointer of git-lfs."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [file for file in files if file.suffix in ends and is_pointer(file)]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(
            f'"{found[0]}"{more} is a pointer of git-lfs, not the file itself: run `git lfs pull` in '
            f'"{found[0].parent}", or download the repository with `hf download`'
        )


def is_pointer(file: Path) -> bool:
    """Whether a file only names another one, as git keeps large files."""
    if not file.is_file() or file.stat().st_size > LONGEST_POINTER:
        return False
    with file.open("rb") as stream:
        return stream.read(len(POINTER)) == POINTER


def unread_weights(folder: Path) -> str:
    """Which weights a directory has in a format that nothing here reads, and what to do about it; "" for none."""
    unread = sorted(file.name for file in folder.iterdir() if file.is_file() and file.suffix in UNREAD)
    if not unread:
        return ""
    return f"are in {unread[0]}, which is not read: get the repository with safetensors that it was made from"


def other_weights(folder: Path) -> str:
    """Which weights a directory has that are no safetensors, and what to do with them; "" for none."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    if any(file.suffix == READ for file in files):
        return ""
    pickles = [file.name for file in files if file.suffix in PICKLED and file.stem != "training_args"]
    if pickles:
        return (
            f"are in {pickles[0]}, a pickle: convert them to safetensors with `tangram checkpoint convert {folder} NEW "
            "--to hf`"
        )
    if unread := unread_weights(folder):
        return unread
    inside = sorted(folder.glob(f"*/*{READ}"))
    return f"are in its sub-folder {inside[0].parent.name}: give that" if inside else ""
