"""Which formats are written: a table. A new one is a function that takes a `WriteTask`, and a row here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tangram.checkpoint.formats import dcp, huggingface, own, torch_dist
from tangram.checkpoint.formats.common.outgoing import WriteTask
from tangram.checkpoint.formats.paddle import flex
from tangram.checkpoint.store.manifest import DTYPES
from tangram.checkpoint.store.safetensors_header import NAMES


@dataclass(frozen=True)
class WriteFormat:
    """How a format is written."""

    said: str
    write: Callable[[WriteTask], list[str]]
    """Writes everything into the task's folder; the names of the files."""
    states: bool
    """Whether it has a place for the states of an optimiser."""
    structure: str
    """Whose names and shapes its tensors have: transformers' (hf), Megatron-core's (core) or Paddle's; "" for any."""
    dtypes: frozenset[str] = frozenset(DTYPES)


TARGETS: Mapping[str, WriteFormat] = {
    "hf": WriteFormat("a Hugging Face directory", huggingface.write, False, "hf", frozenset(NAMES)),
    "torch_dist": WriteFormat("Megatron-core's distributed checkpoint", torch_dist.write, True, "core"),
    "dcp": WriteFormat("torch's distributed checkpoint", dcp.write, True, ""),
    "tangram": WriteFormat("a checkpoint of Tangram", own.write, True, "hf"),
    "paddle": WriteFormat("Paddle's flex checkpoint", flex.write, True, "paddle", frozenset(flex.WRITTEN)),
}
"""By name."""
