"""Verify a checkpoint of any format: Tangram's own by its checksums, others by reading every element once."""

from pathlib import Path

from tangram.checkpoint.inspect.foreign import Reading, format_of, read_all, refuse_unknown
from tangram.checkpoint.inspect.verify import VerifyReport
from tangram.checkpoint.inspect.verify import verify as verify_own

__all__ = ["Reading", "VerifyReport", "verify"]


def verify(path: Path | str) -> VerifyReport | Reading:
    """Read every byte of the checkpoint `path` once; `.sound` says whether nothing is wrong, `.findings` what is.

    Of Tangram's own format that is proved by checksums and digests (`VerifyReport`). Other formats have none: there it
    is proved that every element is there once and can be read (`Reading`). Raises UserError where there is no
    checkpoint.
    """
    path = Path(path)
    if format_of(path) is not None:
        return read_all(path, _no_progress)
    refuse_unknown(path)
    return verify_own(path)


def _no_progress(_: int) -> None:
    """Nobody watches."""
