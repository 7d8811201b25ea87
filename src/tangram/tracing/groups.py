"""Process groups that tell a recorder of every call: torch's own back ends, behind a name of ours.

torch lets a back end be a process group written in Python (`Backend.register_backend`); every group that is made of it,
by whomever, is one. All that such a group does is to pass calls on to a plain group over the back end that the device
has anyway, and to tell when they begin and when somebody waits for their end. So FSDP, DTensor, pipelines, functional
collectives and Tangram's own calls are all seen, and none of them is changed.

Trade-off: groups of accelerators are left as they are, for want of a machine to try them on: there only steps and
phases are recorded.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.layout import Mesh
from tangram.tracing.files.format import OPS
from tangram.tracing.recorder import Recorder

(
    _ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, _BROADCAST, _REDUCE, _GATHER, _SCATTER, _SEND, _RECV,
    _BARRIER,
) = range(len(OPS))  # fmt: skip

METHODS: dict[str, tuple[int, int]] = {
    "allreduce": (_ALL_REDUCE, 0),
    "allreduce_coalesced": (_ALL_REDUCE, 0),
    "allgather": (_ALL_GATHER, 1),
    "_allgather_base": (_ALL_GATHER, 1),
    "all_gather_single": (_ALL_GATHER, 1),
    "allgather_coalesced": (_ALL_GATHER, 1),
    "allgather_into_tensor_coalesced": (_ALL_GATHER, 1),
    "all_gather_single_coalesced": (_ALL_GATHER, 1),
    "reduce_scatter": (_REDUCE_SCATTER, 1),
    "_reduce_scatter_base": (_REDUCE_SCATTER, 1),
    "reduce_scatter_single": (_REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced": (_REDUCE_SCATTER, 1),
    "reduce_scatter_single_coalesced": (_REDUCE_SCATTER, 1),
    "alltoall": (_ALL_TO_ALL, 1),
    "alltoall_base": (_ALL_TO_ALL, 1),
    "all_to_all_single": (_ALL_TO_ALL, 1),
    "broadcast": (_BROADCAST, 0),
    "reduce": (_REDUCE, 0),
    "gather": (_GATHER, 1),
    "scatter": (_SCATTER, 0),
    "send": (_SEND, 0),
    "recv": (_RECV, 0),
    "recv_anysource": (_RECV, 0),
    "barrier": (_BARRIER, -1),
}
"""The calls of a process group: what they are, and which argument is what this rank gives (or, of what it only takes,
takes); -1: none."""
_GIVEN = (_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, _SEND)
"""Calls to which each rank gives numbers of its own."""
_DATA_DEPENDENT = {"alltoall_base", "all_to_all_single", "alltoall"}
"""Calls whose sizes may be of the data, where sizes are given."""


class RecordedWork(dist.Work):
    """A call that is under way; waiting for it is told."""

    def __init__(self, work: dist.Work, recorder: Recorder, call: tuple[int, int, int]) -> None:
        super().__init__()
        self._work, self._recorder, self._call = work, recorder, call

    def wait(self, timeout: timedelta | None = None) -> bool:
        number, group, op = self._call
        since = self._recorder.waits(number)
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        self._recorder.waited(number, group, op, since)
        return done

    def get_future(self) -> Any:
        """As of the call itself. Who asks for it, as torch's DDP, waits without a word: its end is told."""
        future, (number, group, op) = self._work.get_future(), self._call
        recorder = self._recorder

        def done(over: Any) -> None:
            with suppress(RuntimeError):  # of a call that failed: it has not ended, and others are asked why
                over.value()
                recorder.ended(number, group, op)

        recorder.follows(number, group)
        future.add_done_callback(done)
        return future


def _passed_on(name: str) -> Callable[[RecordedWork], Any]:
    """The method of recorded work that asks the call itself."""

    def method(self: RecordedWork) -> Any:
        return getattr(self._work, name)()

    method.__name__ = name
    return method


for _name in ("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank", "synchronize"):
    setattr(RecordedWork, _name, _passed_on(_name))


class RecordedGroup(dist.ProcessGroup):
    """A process group whose calls a recorder is told of, and which another group does."""

    def __init__(
        self, inner: dist.ProcessGroup, back: Any, recorder: Recorder, name: str, ranks: Sequence[int], axes: str
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # pyright: ignore[reportCallIssue]  not in torch's own stub
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)
        self._register_backend(torch.device("cpu"), kind, back)
        self._set_group_name(cast(Any, name))
        self.inner, self.recorder = inner, recorder
        self.number = recorder.group(name, axes, ranks)

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "gloo"


def _recorded(name: str, op: int, given: int) -> Callable[..., Any]:
    """The method of a recorded group that passes a call on."""
    real: Callable[..., Any] = getattr(dist.ProcessGroup, name)
    to_one, gives = op in (_SEND, _RECV), op in _GIVEN

    def call(self: RecordedGroup, *args: Any, **kwargs: Any) -> Any:
        nbytes, dtype = (0, None) if given < 0 or given >= len(args) else _size(args[given])
        if name in _DATA_DEPENDENT and (given == 1 and _uneven(args)):
            nbytes = -1
        peer = int(args[1]) if to_one and len(args) > 1 and name != "recv_anysource" else -1
        recorder, group = self.recorder, self.number
        number = recorder.enter(group, op, nbytes, dtype, peer)
        if recorder.looks and gives:
            recorder.gives(number, group, args[given])
        work = real(self.inner, *args, **kwargs)
        return work if work is None else RecordedWork(work, recorder, (number, group, op))

    call.__name__ = name
    return call


for _name, (_op, _given) in METHODS.items():
    if hasattr(dist.ProcessGroup, _name):  # some are of newer versions of torch
        setattr(RecordedGroup, _name, _recorded(_name, _op, _given))


def _never_compiled(*kinds: type) -> None:
    """Have torch.compile run the methods of these classes as they are, where C++ calls them within compiled code.

    That is what `torch.compiler.disable` does, without the seconds that its import takes.
    """
    frames = cast(Any, torch)._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):  # an older torch: who compiles there is told by torch itself
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for kind in kinds:
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                frames.set_code_exec_strategy(method.__code__, skip)


_never_compiled(RecordedGroup, RecordedWork)


def _size(given: Any) -> tuple[int, torch.dtype | None]:
    if isinstance(given, Tensor):
        return given.nbytes, given.dtype
    sizes = [_size(one) for one in cast("Iterable[Any]", given)]
    return sum(n for n, _ in sizes), sizes[0][1] if sizes else None


def _uneven(args: Sequence[Any]) -> bool:
    """Whether an all-to-all is given sizes that are not all equal, or tensors of sizes of their own."""
    if len(args) < 4 or isinstance(args[0], list):
        return isinstance(args[0], list)
    return any(len(set(cast("list[int]", sizes))) > 1 for sizes in args[2:4] if isinstance(sizes, list))


def axes_of_ranks(mesh: str, ranks: Sequence[int]) -> str:
    """The axes of a mesh over which these ranks are all that differ, "dp" or "dp tp"; "" where it is no such set."""
    if not mesh:
        return ""
    whole = Mesh.parse(mesh)
    names = [axis for axis, size in whole.views[0] if size > 1]
    if not ranks or max(ranks) >= whole.size:
        return ""
    places = [whole.coords(rank) for rank in ranks]
    over = [axis for axis in names if len({place[axis] for place in places}) > 1]
    count = 1
    for axis in over:
        count *= dict(whole.views[0])[axis]
    return " ".join(over) if count == len(ranks) else ""


def group_words(ranks: Sequence[int], world: int) -> str:
    """What groups are called that are no axes of a mesh: alike on ranks that are in groups side by side."""
    if len(ranks) == world > 1:
        return "all ranks"
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    apart = "" if steps <= {1} else f" in steps of {min(steps)}" if len(steps) == 1 else " of their own"
    return f"{len(ranks)} rank{'s' * (len(ranks) > 1)}{apart}"


def back_end(recorder: Recorder, mesh: str, world: int) -> str:
    """The name of a back end for `init_process_group` on the CPU, of whose groups the recorder is told."""
    name = f"tangram{len(dist.Backend.backend_list)}"  # torch forgets none, and knows each name once

    def make(options: Any, _: Any) -> RecordedGroup:
        ranks = [*options.global_ranks_in_group] or [*range(world)]
        inner = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        back = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        back._set_sequence_number_for_group()
        inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, back)
        inner._set_group_name(options.group_id)
        axes = axes_of_ranks(mesh, ranks) or group_words(ranks, world)
        return RecordedGroup(inner, back, recorder, str(options.group_id), ranks, axes)

    dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])
    return name
