"""A checkpoint of any format, opened: its tensors, the pieces that they lie in, and views of those."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from tangram.relayout import Piece, TensorSpec


@dataclass(frozen=True)
class Opened:
    """What a format's module gives of a directory or file."""

    format: str
    path: Path
    specs: Mapping[str, TensorSpec]
    pieces: tuple[Piece, ...]
    read: Callable[[Hashable, str], Tensor]
    """The elements of a piece by its place and name: a view of a mapped file."""
    release: Callable[[], None]
    """Let go of what was read."""
    skipped: tuple[str, ...] = ()
    """Entries that are no tensors."""
    small: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Configuration and tokenizer files by name."""
