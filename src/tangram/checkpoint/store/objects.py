"""Objects of a store (`s3://`, `gs://`, `az://`, `http://`), by obstore: list, read in ranges, put in parts, delete.

What a store does not do is said in one sentence that names it.
"""

import contextlib
import datetime
import itertools
import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.errors import UserError

MISSING = "needs the extra `remote`: pip install 'tangram-train[remote]'"
PART = 8 << 20
"""Bytes of a part of a large object."""
AT_ONCE = 3
"""Parts on their way: with `PART` what bounds the memory of sending."""


def is_remote(place: str) -> bool:
    """Whether it is the address of an object store, and no path."""
    return "://" in place


class StoreError(UserError):
    """A store that refuses or does not answer: what is there may be as it should be."""


@dataclass(frozen=True)
class ObjectStore:
    """A prefix of an object store."""

    address: str
    store: Any

    def sizes(self) -> dict[str, int]:
        """The bytes of each object below, by name."""
        import obstore

        with self._as_user_error("looked at"):
            rows: list[Any] = [row for some in obstore.list(self.store) for row in some]
        return {str(row["path"]): int(row["size"]) for row in rows}

    def ranges(self, name: str, starts: Sequence[int], stops: Sequence[int]) -> list[Any]:
        """Bytes of an object, as buffers; several requests at once."""
        import obstore

        with self._as_user_error(f"read ({name})"):
            return list(obstore.get_ranges(self.store, name, starts=starts, ends=stops)) if starts else []

    def put(self, name: str, file: Path) -> None:
        """Send a file, in parts where it is large."""
        import obstore

        with self._as_user_error(f"written ({name})"), file.open("rb") as stream:
            obstore.put(self.store, name, stream)

    def get(self, name: str) -> bytes:
        """A small object."""
        import obstore

        with self._as_user_error(f"read ({name})"):
            return bytes(obstore.get(self.store, name).bytes())

    def create(self, name: str, data: bytes) -> bool:
        """Put a small object where there is none by that name; False where there is one.

        A store that cannot tell puts it: two that begin in the same moment are then not kept apart.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        with self._as_user_error(f"written ({name})"):
            try:
                obstore.put(self.store, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            except (NotSupportedError, NotImplementedError):
                obstore.put(self.store, name, data, use_multipart=False)
            return True

    def send(self, name: str, blocks: Iterable[bytes]) -> None:
        """Send what comes block by block, in parts, a few at once; it is there as a whole or not at all."""
        import obstore

        rest = iter(blocks)
        first, more = next(rest, b""), next(rest, None)
        with self._as_user_error(f"written ({name})"):
            if more is None:  # one request instead of three
                obstore.put(self.store, name, first, use_multipart=False)
                return
            obstore.put(
                self.store, name, itertools.chain((first, more), rest), chunk_size=PART, max_concurrency=AT_ONCE
            )

    def delete(self, names: Sequence[str]) -> None:
        import obstore

        if names:
            with self._as_user_error("cleaned up"):
                obstore.delete(self.store, list(names))

    @contextlib.contextmanager
    def _as_user_error(self, what: str) -> Generator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            words = f'"{self.address}" cannot be {what}: {_reason(error)}'
            raise (UserError if isinstance(error, FileNotFoundError) else StoreError)(words) from None


_REASONS = (
    (
        r"/latest/(api/token|meta-data)|metadata\.google\.internal",
        "no credentials were found: set those of the store in the environment, as AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY",
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|ExpiredToken|AccessDenied|\b40[13] (Forbidden|Unauth)",
        "it refuses the credentials of the environment, or these may not do it",
    ),
    (r"NoSuchBucket|ContainerNotFound|bucket does not exist", "there is no such bucket: make it, or give another"),
    (
        r"error sending request|[Cc]onnection refused|dns error|operation timed out|request or response body error",
        "it does not answer: look at its address (AWS_ENDPOINT_URL, say) and at the network",
    ),
    (r"SlowDown|\b(429|5\d\d) [A-Z]", "it has too much to do, or fails: try again later"),
)
"""By what stands in an error: where nobody gives credentials, the machine's own service for them is asked."""


def _reason(error: Exception) -> str:
    text = str(error).strip()
    for pattern, words in _REASONS:
        if re.search(pattern, text):
            return words
    return (text.splitlines() or [type(error).__name__])[0][:300]


def store_of(address: str, quick: bool = False) -> ObjectStore:
    """The store of an address, with the credentials of the environment. Raises UserError for one that is none.

    `quick`: give up on one that does not answer after seconds, not minutes.
    """
    try:
        from obstore.store import from_url
    except ImportError:
        raise UserError(f'"{address}" {MISSING}') from None
    try:
        more: dict[str, Any] = {}
        if quick:  # options of the client would take the place of the environment's
            more["retry_config"] = {"max_retries": 2, "retry_timeout": datetime.timedelta(seconds=10)}
        return ObjectStore(address, from_url(address.rstrip("/"), **more))
    except Exception as error:  # noqa: BLE001  each kind of store refuses in its own way
        raise UserError(f'"{address}" is no address of an object store that is known: {_reason(error)}') from None
