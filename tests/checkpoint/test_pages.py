"""Memory for requests past the page cache."""

import os
from pathlib import Path

import pytest

from tangram.checkpoint.loading.page_memory import HUGE, pages
from tangram.checkpoint.store.safetensors_header import PAGE


@pytest.mark.parametrize(
    ("size", "whole"), [(0, PAGE), (1, PAGE), (PAGE + 1, 2 * PAGE), (HUGE, HUGE), (3 * HUGE + 5, 3 * HUGE + PAGE)]
)
def test_it_begins_on_a_page_and_has_whole_ones_of_zeros(size: int, whole: int) -> None:
    memory = pages(size)
    address = memory.__array_interface__["data"][0]
    assert (len(memory), address % PAGE) == (whole, 0)
    assert address % HUGE == 0 or size < HUGE
    assert not memory.any()


def test_files_are_read_into_it_as_they_were_written_from_it(tmp_path: Path) -> None:
    memory, back = pages(3 * HUGE), pages(3 * HUGE)
    memory[:] = 250
    memory[::7] = 3
    flags = getattr(os, "O_DIRECT", 0)
    for some in (memory, memory[PAGE:]):
        file = tmp_path / str(len(some))
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | flags)
        except OSError:  # a file system that has no such mode
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        try:
            assert os.pwrite(descriptor, some.data, 0) == len(some)
            assert os.preadv(descriptor, [back.data], 0) == len(some)
        finally:
            os.close(descriptor)
        assert (back[: len(some)] == some).all()
