"""A checkpoint of any format, opened: its tensors, the pieces that they lie in, and views of those.

The states that an optimiser keeps of a parameter are tensors like others, under the parameter's name with the state's
behind it: `w.exp_avg`. What a format calls them is that format's matter (`naming`), so mappings, layouts and writers
know one way only.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tangram.relayout import Piece, TensorSpec
from tangram.relayout.mapping.states import States

SETTINGS = ("lr", "betas", "eps", "weight_decay")
"""Of an optimiser, that formats with groups of parameters have, by torch's names."""


@dataclass(frozen=True)
class OpenCheckpoint:
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
    states: States = field(default_factory=dict[str, Any])
    """Of the optimiser states that are there how each is made of its parameter."""
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What is no tensor: `settings` of the optimiser, where the checkpoint says them."""
    beside: tuple[str, ...] = ()
    """Tensors that are there and are not the model's, nor states of it."""
    uncut: "OpenCheckpoint | None" = None
    """With what is in `beside`, by the names that are stored; None where nothing is."""
    several: tuple[str, ...] = ()
    """Keys of state dicts of which none is known to be the model that is meant."""
