"""Conversions of as many tensors as a mixture has, of one element each: what each tensor costs, whatever its bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tangram.checkpoint.conversion.convert import IDENTITY, restructure
from tangram.checkpoint.conversion.converting import rare_collections
from tangram.checkpoint.conversion.find_mapping import choose
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.inspect import diff_across_formats
from tangram.checkpoint.inspect.verify import verify
from tangram.hardware.measure import Row

TARGETS = {20_000: 10.0, 300_000: 60.0}
"""Seconds of each conversion that are the aim."""
WAYS = (("file.pt", "hf"), ("hf", "dcp"), ("dcp", "torch_dist"), ("torch_dist", "paddle"), ("paddle", "tangram"),
        ("tangram", "back"))  # fmt: skip


def rows(root: Path, counts: tuple[int, ...]) -> Iterator[Row]:
    """A way through all formats and back, then a comparison and a verification."""
    for n in counts:
        folder = root / str(n)
        folder.mkdir()
        tensors = {f"layers.{i // 10}.p{i % 10}.weight": torch.full((1,), float(i)) for i in range(n)}
        torch.save(tensors, folder / "file.pt")
        for source, to in WAYS:
            begin = time.monotonic()
            with rare_collections():
                opened = open_any(folder / source)
                kind = "hf" if to == "back" else to
                chosen = choose(opened, kind, None, text=IDENTITY)
                restructure(chosen.source, chosen.bound, folder / to, kind)
            yield Row(f"{n:,} tensors, {source} to {kind}", "s", time.monotonic() - begin, target=TARGETS.get(n))
        begin = time.monotonic()
        with rare_collections():
            a, b = open_any(folder / "hf"), open_any(folder / "back")
            if not diff_across_formats.compare(*diff_across_formats.seen_as(a, b, None)).same:
                raise RuntimeError("other tensors came back than went")
        yield Row(f"{n:,} tensors, diff", "s", time.monotonic() - begin, target=TARGETS.get(n))
        begin = time.monotonic()
        if not verify(folder / "tangram").sound:
            raise RuntimeError("what was written is damaged")
        yield Row(f"{n:,} tensors, verify", "s", time.monotonic() - begin, target=TARGETS.get(n))
