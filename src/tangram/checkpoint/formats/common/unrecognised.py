"""What lies at a place that is in no format that is read, in a sentence that says what to give instead."""

from collections.abc import Callable, Mapping
from pathlib import Path

SAID = 3


def seen(path: Path, kinds: Mapping[str, Callable[[Path], bool]]) -> str:
    """What was seen there. `kinds`: the formats by what they are called, and whether a place is in one."""
    if path.is_file():
        return f'it is a file that ends in "{path.suffix}"' if path.suffix else "it is a file without an ending"
    there = sorted(path.iterdir())
    if not there:
        return "it is empty"
    below = [(one.name, kind) for one in there if one.is_dir() for kind, fits in kinds.items() if fits(one)]
    if below:
        named = dict(reversed(below))
        some = ", ".join(f"{name} is {kind}" for name, kind in sorted(named.items())[:SAID])
        return f"{some}{' and others are, too' if len(named) > SAID else ''}: give that"
    names = [one.name for one in there]
    for fits, sentence in SPECIAL:
        if any(fits(name) for name in names):
            return sentence
    shown = ", ".join(names[:SAID])
    return f"it has {shown}{f' and {len(names) - SAID:,} more' if len(names) > SAID else ''}"


SPECIAL: tuple[tuple[Callable[[str], bool], str], ...] = (
    (
        lambda name: name.startswith("consolidated") and name.endswith((".safetensors", ".pth")),
        "it has consolidated files, which have names of their publisher's own: give the directory of model.safetensors",
    ),
    (
        lambda name: name == "adapter_model.safetensors",
        "it is an adapter of peft's: give the model, and this as --adapter",
    ),
    (
        lambda name: name.endswith(".distcp"),
        "it has .distcp files without the .metadata that says what is in them: that save did not end",
    ),
)
