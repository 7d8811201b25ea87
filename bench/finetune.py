"""Fine-tuning with adapters: speed beside TRL and peft, bytes kept, losses on any mesh, packing of conversations.

    speed     tokens a second of LoRA in float32 on one process, short conversations, batches of 4, in pairs
              with TRL's trainer in the same process, of the same rows: both without recompute, each pads as it does.
              TRL is no dependency: `pip install trl`, else ours stands alone
    meshes    LoRA on NF4: bytes kept of parameters, buffers and states beside those that are counted; losses over
              FSDP, tensor ranks, stages, and FSDP x TP beside one process
    packing   how full samples are, and whether conversations that share one are kept apart
    lines     of the job that fine-tunes a folder

`--only` takes one of these groups. `--quick`: a small model, fewer steps and meshes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bench._finetune import meshes, packing, speed
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row

EXAMPLE = Path(__file__).parents[1] / "examples" / "fine-tune" / "sft.toml"


def lines(quick: bool, folder: Path) -> Iterable[Row]:
    """What a user writes."""
    written = [one for one in EXAMPLE.read_text().splitlines() if one.strip()]
    yield Row("lines of the job that fine-tunes a folder", "", float(len(written)), target=6.0)


GROUPS: Mapping[str, Callable[[bool, Path], Iterable[Row]]] = {
    "speed": speed.rows,
    "meshes": meshes.rows,
    "packing": packing.rows,
    "lines": lines,
}


def rows(quick: bool, only: tuple[str, ...] | None = None) -> Iterable[Row]:
    """The figures of each group."""
    for name in only or tuple(GROUPS):
        if name not in GROUPS:
            raise UserError(f"the bench of fine-tuning has no group {name!r}: it has {', '.join(GROUPS)}")
        with tempfile.TemporaryDirectory() as folder:
            yield from GROUPS[name](quick, Path(folder))
