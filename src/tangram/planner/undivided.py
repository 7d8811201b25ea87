"""What ranks do not divide, in the one sentence of it for plans: of whole models and of layouts that are derived."""

__all__ = ["undivided"]


def undivided(count: int, what: str, axes: str, size: int) -> str:
    """Why ranks of axes (their names, and how many ranks) cannot have an equal part each; "" where they can."""
    return f"the {count} {what} do not divide by {axes}={size}" if count % size else ""
