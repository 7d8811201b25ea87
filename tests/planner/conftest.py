"""What tests of the planner share."""

import pickle
from typing import Any

import pytest

from tangram.planner.search import by_precision


@pytest.fixture(scope="session")
def _searches() -> dict[bytes, Any]:
    return {}


@pytest.fixture
def one_search_each(_searches: dict[bytes, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been searched for is not searched for again: a command prints one answer as tables and as JSON.

    For tests of what is printed; that a second search gives the same is for those of the search.
    """
    search = by_precision.search

    def once(*arguments: Any) -> Any:
        key = pickle.dumps(arguments)
        if key not in _searches:
            _searches[key] = search(*arguments)
        return _searches[key]

    monkeypatch.setattr(by_precision, "search", once)
