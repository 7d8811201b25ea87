"""Thousands of random relayouts against plain numpy, bit for bit. HYPOTHESIS_PROFILE makes them many more."""

import numpy as np
import pytest
from hypothesis import given, settings

from tangram.layout import Region
from tangram.relayout import CoverageError, Piece, TensorSpec, bind, execute, plan
from tests.relayout.generate import Case, cases
from tests.relayout.moving import (
    counted,
    local_shape,
    mask_of,
    move,
    numbered,
    opposite,
    same_bits,
)
from tests.relayout.scatter import Scattered, scattered

EXAMPLES = settings.default.max_examples if settings.default else 50


@settings(max_examples=20 * EXAMPLES)
@given(cases())
def test_mappings_and_layouts(case: Case) -> None:
    """Fused, split, transposed, stacked over names, padded, sliced, tied; over any two meshes; there and back."""
    move(case.mapping, case.source, case.target, lossy=True, ways=case.ways, **case.sizes)


@settings(max_examples=20 * EXAMPLES)
@given(scattered())
def test_pieces_with_overlaps_and_holes(case: Scattered) -> None:
    """What is covered arrives, each element written once; what is not is refused, and the error names it."""
    a, b = case.source, case.target
    x = numbered(*a.shape)
    y = b.join(a.split(x))
    bound = bind(f"a: {a.text} -> b: {b.text}", {"a": TensorSpec(x.shape)}, **a.sizes)
    held = {place: mask_of(region, x.shape) for place, region in enumerate(case.held)}
    covered = np.any(list(held.values()), axis=0)
    sources = {(place, "a"): shaped(x[mask], case.held[place]) for place, mask in held.items()}
    pieces = [Piece(place, "a", region) for place, region in enumerate(case.held)]
    for place, region in enumerate(case.wanted):
        mask = mask_of(region, y.shape)
        needed = a.join(b.split(mask))
        want = Piece(place, "b", region)
        if (needed & ~covered).any():
            with pytest.raises(CoverageError, match=r"no source holds .* of a") as error:
                plan(bound, pieces, [want])
            found = mask_of(error.value.region, x.shape)
            assert found.any()
            assert not (found & ~(needed & ~covered)).any()
            assert error.value.tensor == "a"
            continue
        copies = plan(bound, pieces, [want])
        expected = shaped(y[mask], region)
        got = opposite(expected)
        with counted(expected.size):
            execute(copies, sources, {(place, "b"): got})
        assert same_bits(got, expected)
        if place in held and not (needed & ~held[place]).any():
            assert {c.source.place for c in copies.copies if c.source} <= {place}  # what lies here is read here


def shaped(values: np.ndarray, region: Region) -> np.ndarray:
    shape = local_shape(region)
    return values if shape is None else values.reshape(shape)
