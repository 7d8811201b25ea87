"""Work without torch's helper threads."""

import threading

import pytest
import torch

from tangram.checkpoint.store.digest import one_thread


@pytest.fixture
def three() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def others() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="this torch has threads of its own")
def test_only_this_thread_is_alone_and_only_meanwhile(three: object) -> None:
    with one_thread():
        assert (torch.get_num_threads(), others()) == (1, 3)
        with one_thread():
            pass
        assert torch.get_num_threads() == 1
    assert (torch.get_num_threads(), others()) == (3, 3)


def test_it_ends_with_an_error_too(three: object) -> None:
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == 3
