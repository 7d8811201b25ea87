"""All ranks hear of what goes wrong on one: no rank goes on alone, or waits for one that gave up."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout.exchange.peers import Peers
from tangram.relayout.mapping.errors import CoverageError, PeerError, RelayoutError

T = TypeVar("T")


def tried(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What it gives, or what it raised. PeerError passes: there is nobody left to agree with."""
    try:
        return act(), None
    except PeerError:
        raise
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        return None, error


def agreed(peers: Peers, fault: Exception | None, word: Any = None) -> list[Any]:
    """The words of all ranks, where none has a fault; else the first one's, raised on all. Collective."""
    with noticed():
        found = peers.all_words([None if fault is None else _fault_words(fault), word])
    for rank, (said, _) in enumerate(found):
        if said is not None:
            raise _error(rank, *said) from fault
    return [words for _, words in found]


def _fault_words(fault: Exception) -> list[str]:
    if isinstance(fault, CoverageError):
        return [str(fault), fault.tensor, str(fault.region)]
    return [str(fault) if isinstance(fault, UserError) else f"{type(fault).__name__}: {fault}"]


def _error(rank: int, text: str, tensor: str | None = None, region: str = "") -> RelayoutError:
    sentence = f"rank {rank}: {text}"
    return RelayoutError(sentence) if tensor is None else CoverageError(tensor, Region.parse(region), sentence)


@contextmanager
def noticed() -> Generator[None]:
    """PeerError where a collective ends because a rank is gone."""
    try:
        yield
    except RuntimeError as error:  # as the backend says it when a connection closes
        raise PeerError(f"another rank ended while all of them moved tensors: {error}") from None
