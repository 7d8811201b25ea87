"""A decoder that sees images: the tower before it as blocks that work on patches, so many for each token of a sample.

A tower cuts an image into patches, works on each image's alone (or on windows of it), brings several patches together
to one token and that to the decoder's size. What a token of the sequence costs there follows from the share of tokens
that are of images, which a model does not say: `with_images` takes it. Parameters do not depend on it.

The trade-off: a sample has its images evenly, so that no rank waits for another's; every image has as many patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tangram.errors import UserError
from tangram.models.outlines.blocks import Block, Group, Kept, Product
from tangram.models.outlines.outline import Dims, Outline, decoder_block, runs_of

USUAL_SEQUENCE = 8192
"""Tokens of a sample with one image, where nothing else is said."""
USUAL_IMAGE = 1024
"""Tokens of an image of a tower that takes all sizes: 896 x 896 pixels of patches of 14, four to a token."""
USUAL_IMAGES: Mapping[str, int] = {"gemma4_vision": 280}
"""The same of towers whose processors make other images by default."""


@dataclass(frozen=True)
class Tower:
    """Sizes of a vision tower and of what brings its results to the decoder."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    patch: int
    """Numbers of a patch: pixels x colours x frames."""
    gated: bool = False
    merged: int = 1
    """Patches of a token."""
    image: int = USUAL_IMAGE
    """Tokens of an image."""
    window: int = 0
    """Patches that see each other in a layer with windows."""
    windowed: int = 0
    """How many layers have windows."""
    projector: tuple[tuple[int, int], ...] = ()
    """Inputs and outputs of the linear maps of each token, in all."""
    further: int = 0
    """Parameters beside all these: positions, a pooling head, norms."""
    kv_heads: int = 0
    """Of keys and values; 0: as many as `heads`."""


def tower_of(row: Mapping[str, Any]) -> Tower:
    """As the catalogue has it."""
    sizes: dict[str, Any] = {**row, "projector": tuple((int(a), int(b)) for a, b in row.get("projector", ()))}
    return Tower(**sizes)


def tower_numbers(tower: Tower) -> int:
    """Parameters of it with its projector."""
    return sum(block.numbers.total * count for block, count in _runs(tower, 1.0, 1))


def with_tower(outline: Outline, tower: Tower) -> Outline:
    """A decoder behind a tower, with one image in each sample of `USUAL_SEQUENCE` tokens."""
    share = tower.image / USUAL_SEQUENCE
    runs = _runs(tower, share, outline.hidden)
    return replace(outline, runs=(*runs, *outline.runs), images=share, image=tower.image)


def _runs(tower: Tower, share: float, hidden: int) -> tuple[tuple[Block, int], ...]:
    """Its blocks in order; `share`: tokens of images for each token, `hidden`: the decoder's."""
    dims = Dims(1, tower.hidden, tower.heads, 1, ffn=tower.ffn, kv_heads=tower.kv_heads, gated=tower.gated, bias=True)
    block = replace(decoder_block(dims), name="image", hidden=tower.hidden, patches=share * tower.merged)
    whole, windows = (
        replace(block, scores=tuple(replace(one, chunk=chunk, causal=False) for one in block.scores))
        for chunk in (tower.image * tower.merged, tower.window)
    )
    embed = Block(
        "patches", (Product("patches", tower.patch, tower.hidden, "", Group.NONE, bias=True),), (), (),
        (Kept("patches", tower.patch, "", Group.NONE, role="input"),), tower.further,
        hidden=tower.hidden, patches=share * tower.merged,
    )  # fmt: skip
    maps = tuple(Product("projector", a, b, "", Group.NONE, bias=True) for a, b in tower.projector)
    kept = tuple(Kept("input of the projector", a, "", Group.NONE, role="input") for a, _ in tower.projector)
    join = Block("projector", maps, (), (), kept, 0, hidden=hidden, patches=share)
    return runs_of([embed, *[windows] * tower.windowed, *[whole] * (tower.layers - tower.windowed), join])


def with_images(outline: Outline, tokens: int, sequence: int) -> Outline:
    """With so many of each `sequence` tokens from images; 0: one image a sample. Raises UserError for a model that sees
    none, and for numbers that cannot be."""
    if not outline.images:
        if tokens:
            raise UserError(
                f"{outline.name} sees no images, as far as its configuration says: leave --image-tokens out"
            )
        return outline
    tokens = tokens or min(outline.image, sequence)
    if not 1 <= tokens <= sequence:
        raise UserError(f"--image-tokens is from 1 to the {sequence} tokens of a sample, not {tokens}")
    share = tokens / sequence
    runs = tuple((replace(one, patches=one.patches * share / outline.images), count) for one, count in outline.runs)
    return replace(outline, runs=runs, images=share)


def image_words(outline: Outline) -> tuple[str, ...]:
    """What is said of a model that sees images."""
    if not outline.images:
        return ()
    return (
        f"{100 * outline.images:.3g} % of the tokens are of images, of {outline.image} tokens each (--image-tokens), "
        "and the vision tower is trained, too; PP is not planned for such a model",
    )
