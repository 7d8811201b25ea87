"""Memory that two processes share has no name, is there ahead of use, and is refused where there is not so much."""

import os
from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.hardware.host.hostmemory import Shared, available, mapped


def test_who_has_the_open_file_sees_the_same_bytes():
    memory = Shared(3 * 4096)
    there = mapped(os.dup(memory.descriptor), memory.nbytes)
    memory.bytes[5000] = 77
    assert there[5000] == 77
    memory.close()
    assert there[5000] == 77, "the other one still holds it"
    memory.close()


def test_it_has_no_name():
    before = set(Path("/dev/shm").iterdir())
    memory = Shared(4096)
    assert set(Path("/dev/shm").iterdir()) == before
    memory.close()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux says what is there")
def test_every_page_is_there_at_once():
    memory = Shared(1 << 25)
    blocks = os.fstat(memory.descriptor).st_blocks * 512
    memory.close()
    assert blocks >= 1 << 25


def test_too_much_is_refused_in_a_sentence():
    files = Path("/proc/self/fd")
    before = len(list(files.iterdir())) if files.exists() else 0
    with pytest.raises(UserError, match=r"are needed for a copy of the state, but of the machine's memory .* are left"):
        Shared((available() or 1 << 60) * 2)
    if before:
        assert len(list(files.iterdir())) == before
