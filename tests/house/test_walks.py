"""The ways through the house are as short as they are said to be, and a climb that is planted is seen."""

from functools import partial

import pytest

from tangram.checkpoint.formats.hf_export import bytes_of
from tangram.checkpoint.saving import save
from tangram.cli.output import size
from tests.house.walks import WALKS, walk


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_as_short_as_it_may_be(name: str) -> None:
    found = walk(WALKS[name].call)
    assert len(found.files) <= WALKS[name].files, found.files
    assert len(found.climbs) <= WALKS[name].climbs, found.climbs


def test_a_walk_has_the_files_of_other_threads_too() -> None:
    found = walk(WALKS["a state to its file"].call)
    assert {"checkpoint/saving/file_writer.py", "checkpoint/store/digest.py"} <= {*found.files}


def test_a_call_into_a_higher_room_and_one_into_a_higher_package_are_climbs() -> None:
    attempt = getattr(save, "_try")  # noqa: B009  which calls whatever it is given
    assert walk(partial(attempt, partial(size, 5))).climbs == ("checkpoint/saving/save.py -> cli/output.py",)
    climbed = ("checkpoint/saving/save.py -> checkpoint/formats/hf_export.py",)
    assert walk(partial(attempt, partial(bytes_of, "5GB"))).climbs == climbed


def test_a_call_that_goes_down_or_stays_in_its_package_is_none() -> None:
    assert walk(partial(bytes_of, "5GB")).climbs == ()
