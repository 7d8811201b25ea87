"""What the layout room raises: one sentence each, for a person."""

from __future__ import annotations

from tangram.errors import UserError


class LayoutError(UserError, ValueError):
    """A layout, mesh, region or size that cannot be what its text says."""


class NotationError(LayoutError):
    """Text that is not in the notation; points at the character.

    `position` is the 0-based offset of the offending character in `text`.
    """

    def __init__(self, text: str, position: int, reason: str) -> None:
        self.text, self.position, self.reason = text, position, reason
        start = text.rfind("\n", 0, position) + 1
        line = text[start:].split("\n", 1)[0]
        super().__init__(f"{reason}\n  {line}\n  {' ' * (position - start)}^")
