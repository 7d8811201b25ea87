"""What the relayout room raises: one sentence each, naming the tensor and where it helps the region."""

from __future__ import annotations

from tangram.errors import UserError
from tangram.layout import Region


class RelayoutError(UserError, ValueError):
    """A mapping, a set of pieces or a set of buffers that cannot be moved as asked."""


class NotInvertibleError(RelayoutError):
    """The way back of a mapping would have to invent bits that the way there lost."""


class PeerError(UserError):
    """Another rank ended while all of them moved tensors; what this one has in its target buffers is worth nothing."""


class CoverageError(RelayoutError):
    """Some wanted elements would be written never or twice. Raised before any byte moves."""

    def __init__(self, tensor: str, region: Region, sentence: str) -> None:
        self.tensor, self.region = tensor, region
        super().__init__(sentence)
