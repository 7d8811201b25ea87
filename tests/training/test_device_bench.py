"""The bench of one accelerator: that it says so where there is none, and that it works at all."""

import math

import pytest
import torch

from bench.device import SIZES, rows
from tangram.errors import UserError
from tangram.models.building.build import build_on_meta, make_config


def test_the_sizes_are_what_they_are_called() -> None:
    billions = {
        size.name: sum(p.numel() for p in build_on_meta(make_config("llama-3-8b", size.change)).parameters()) / 1e9
        for size in SIZES
    }
    assert billions == {"1B": pytest.approx(1.24, abs=0.01), "8B": pytest.approx(8.03, abs=0.01)}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_there_is_nothing_to_measure() -> None:
    with pytest.raises(UserError, match="torch sees none here: --quick runs it with tiny models on the CPU"):
        list(rows(quick=False))


@pytest.mark.slow
def test_every_figure_stands_beside_what_was_predicted() -> None:
    found = {row.figure: row for row in rows(quick=True)}
    assert list(found)[:2] == ["quickstart", "quickstart, held-out loss"]
    for size in SIZES:
        for what in ("", ", MFU", ", memory"):
            row = found[size.name + what]
            assert math.isfinite(row.ours)
            assert row.ours > 0 < row.peers["predicted"]
