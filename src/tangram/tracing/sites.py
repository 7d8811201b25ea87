"""What a call of a collective is for: the module, the tensors, the change of layout, the line that it comes from.

It is read out of the frames of the stack, which takes tens of microseconds and so happens once for each place in a
step and not in every step. Code that is known to call collectives for others (torch's FSDP and pipelines, and
Tangram's own) is told apart by its name, and asked for what it works on; nothing of it is imported or changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, cast

from torch import nn

DEEPEST = 120
"""Frames that are looked at."""
_INSIDE = (
    "torch.", "tangram.", "importlib", "contextlib", "functools", "threading", "multiprocessing", "typing_extensions",
    "warnings",
)  # fmt: skip
"""Whose frames are nobody's code: torch wraps what it calls deprecated by `typing_extensions`."""
Labels = Mapping[int, str]
"""The names of modules and parameters by the ids of the objects."""


@dataclass(frozen=True)
class Site:
    """Where a call comes from, in words."""

    what: str = ""
    """The tensors, or the change of layout."""
    layer: str = ""
    """The path of the module."""
    line: str = ""
    """File and line: of the user's code where there is some on the stack, else of Tangram's."""


def call_words(op: str, axes: str, site: Site) -> str:
    """A call in words: "all-reduce over dp for gradients of a.weight in layers.3 (train.py:88)"."""
    layer = f" in {site.layer}" if site.layer else ""
    what = f" for {site.what}" if site.what else ""
    return f"{op} over {axes}{what}{layer}{f' ({site.line})' if site.line else ''}"


def size_words(nbytes: int, dtype: object) -> str:
    """How much a call moves, in words; `nbytes` below 0: as much as the data has it."""
    size = f"{nbytes:,} bytes" if nbytes >= 0 else "sizes that follow the data"
    return f"{size} of {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Carrier:
    """The frame that knew the module, or else is the user's: later calls are told apart by looking there again."""

    depth: int
    code: CodeType
    owner: int = 0
    """The id of the module; 0: there is none."""
    line: int = 0

    def same(self, start: FrameType) -> bool:
        """Whether a call from `start` is of the same module or line; True where it cannot be seen."""
        frame: FrameType | None = start
        for _ in range(self.depth):
            frame = None if frame is None else frame.f_back
        if frame is None or frame.f_code is not self.code:
            return True
        return id(frame.f_locals.get("self")) == self.owner if self.owner else frame.f_lineno == self.line


@dataclass
class _Seen:
    """What has been read out of a stack so far, from the call outwards."""

    what: str = ""
    layer: str = ""
    outer: str = ""
    inner: str = ""
    carrier: Carrier | None = None
    user: Carrier | None = None


def site_of(labels: Labels, start: FrameType) -> tuple[Site, Carrier | None]:
    """The site of a call that was made from `start`."""
    seen, frame = _Seen(), cast("FrameType | None", start)
    for depth in range(DEEPEST):
        if frame is None or (seen.what and seen.layer and seen.outer):
            break
        _look(seen, labels, frame, depth)
        frame = frame.f_back
    return Site(seen.what, seen.layer, seen.outer or seen.inner), seen.carrier or seen.user


def _look(seen: _Seen, labels: Labels, frame: FrameType, depth: int) -> None:
    module = str(frame.f_globals.get("__name__", ""))
    code = frame.f_code
    # No file of anybody's, as a rank's first line, which started it, or what torch.compile has made up.
    nowhere = code.co_filename.startswith("<") or "codegen(" in code.co_filename
    inside = nowhere or module.startswith(_INSIDE) or module == "torch"
    if not inside and not seen.outer:
        seen.outer, seen.user = line_of(frame), Carrier(depth, code, line=frame.f_lineno)
    elif module.startswith("tangram.") and not module.startswith("tangram.tracing") and not seen.inner:
        seen.inner = line_of(frame)
    describe = None if seen.what else DESCRIBED.get((module, code.co_qualname))
    if describe is not None:
        seen.what = describe(frame.f_locals, labels)
    if seen.layer or "self" not in code.co_varnames[:1]:
        return
    owner = frame.f_locals.get("self")
    layer = labels.get(id(owner), "") if isinstance(owner, nn.Module) else _fsdp_path(owner)
    if layer:
        seen.layer, seen.carrier = layer, Carrier(depth, code, id(owner))


def line_of(frame: FrameType) -> str:
    """The last two parts of the file's path, and the line."""
    return "/".join(frame.f_code.co_filename.split("/")[-2:]) + f":{frame.f_lineno}"


def _fsdp_path(owner: object) -> str:
    """The path of the module whose parameters a part of torch's FSDP gathers."""
    if type(owner).__name__ != "FSDPParamGroup":
        return ""
    return str(getattr(owner, "_module_fqn", None) or "the root")


def _names(parameters: Any, labels: Labels) -> str:
    names = [labels.get(id(one), "") for one in parameters]
    if not all(names) or not names:
        return f"{len(names)} parameters"
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _of_bucket(values: Mapping[str, Any], labels: Labels) -> str:
    return f"gradients of {_names(values['self'].parameters, labels)}"


def _words(text: str) -> Callable[[Mapping[str, Any], Labels], str]:
    return lambda values, labels: text


PARAMETERS = "parameters"
"""What FSDP gathers."""
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
DESCRIBED: Mapping[tuple[str, str], Callable[[Mapping[str, Any], Labels], str]] = {
    (_FSDP, "FSDPParamGroup.unshard"): _words(PARAMETERS),
    (_FSDP, "FSDPParamGroup.wait_for_unshard"): _words(PARAMETERS),
    (_FSDP, "FSDPParamGroup.post_backward"): _words("gradients"),
    ("tangram.training.parallel.data_parallel", "Bucket.start"): _of_bucket,
    ("tangram.training.parallel.data_parallel", "Bucket.finish"): _of_bucket,
    ("tangram.training.mesh.groups", "add_up"): _words("gradients of parameters that TP ranks have in common"),
    ("tangram.training.step.evaluate", "sum_over"): _words("loss, gradient norm and wishes to stop"),
    ("tangram.relayout.collectives.one_collective", "_moved"): lambda v, labels: f"{v['source']} -> {v['target']}",
    ("tangram.relayout.collectives.run_sequence", "perform"): lambda v, labels: str(v["step"]),
    ("tangram.training.parallel.schedule_runtime", "run"): _words("activations or gradients between stages"),
    ("torch.distributed.pipelining.schedules", "_batch_p2p"): _words("activations or gradients between stages"),
}
"""By module and qualified name of a function: what the tensors are that it sends, from its local variables."""


def caller(depth: int) -> FrameType:
    """The frame so many calls above the one that asks."""
    return sys._getframe(depth + 1)  # pyright: ignore[reportPrivateUsage]
