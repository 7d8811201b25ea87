"""Every operator on every case with the torch at hand.

Run by itself it writes a sheet into a folder, and needs no library but torch and numpy, so that it runs with any torch:

    PYTHONPATH=src python -m bench._accuracy.sweep FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bench._accuracy.attention import ATTENTION
from bench._accuracy.copies import CASTS, MOVES, ORDER, moved, ordered
from bench._accuracy.judge import Outcome, judge
from bench._accuracy.operator import Case, Inputs, Operator, inputs
from bench._accuracy.pointwise import POINTWISE
from bench._accuracy.products import PRODUCTS
from bench._accuracy.reductions import REDUCTIONS
from bench._accuracy.sheet import Key, Sheet, write

OPERATORS: tuple[Operator, ...] = (*POINTWISE, *REDUCTIONS, *PRODUCTS, *ATTENTION, *CASTS)
GROUPS = (*dict.fromkeys(one.group for one in OPERATORS), "moves")
SETTINGS = ("", "2 threads", "no oneDNN", "compiled")
"""How torch is told to compute; what it may use of the processor, the environment says."""
GENERATED = frozenset({
    "sum", "mean", "softmax", "log_softmax", "logsumexp", "softmax_backward", "log_softmax_backward", "layer_norm",
    "rms_norm", "native_layer_norm_backward, weight", "native_layer_norm_backward, bias",
})  # fmt: skip
"""Beside the pointwise ones, operators for which a compiler writes code of its own."""
Tried = tuple[Operator, Case, Inputs, Inputs]


def sheet(
    groups: Sequence[str] = GROUPS, device: str = "cpu", setting: str = "", quick: bool = False,
    operators: Sequence[Operator] = OPERATORS,
) -> Sheet:  # fmt: skip
    """All outcomes. `quick`: three cases for each operator and type."""
    some = [one for one in operators if one.group in groups]
    outcomes: dict[Key, Outcome] = {}
    missing: dict[tuple[str, str], str] = {}
    with _set(setting):
        if setting == "compiled":
            return Sheet(about(device, setting), _compiled(some, device), {}, {})
        for one in some:
            for dtype in one.dtypes:
                try:
                    outcomes |= _outcomes(one, dtype, device, quick)
                except (RuntimeError, AttributeError) as error:  # what torch raises for what it has not
                    missing[one.name, kind_of(dtype)] = str(error).strip().split("\n")[0][:120]
        moves = _moves(device) if "moves" in groups else {}
    return Sheet(about(device, setting), outcomes, moves, missing)


def kind_of(dtype: torch.dtype) -> str:
    """Its name, without torch's."""
    return str(dtype).removeprefix("torch.")


def about(device: str, setting: str = "") -> Mapping[str, str]:
    """What a sheet is of."""
    if device == "cpu":
        can = torch.backends.cpu.get_cpu_capability().lower().replace("default", "plain")
        return {"torch": torch.__version__, "device": f"cpu {can}", "setting": setting}
    name = torch.get_device_module(device).get_device_name()
    return {"torch": torch.__version__, "device": name, "setting": setting}


def _outcomes(one: Operator, dtype: torch.dtype, device: str, quick: bool) -> dict[Key, Outcome]:
    found: dict[Key, Outcome] = {}
    cases = [*one.cases(dtype)]
    for case in [*cases[:2], cases[-1]] if quick else cases:
        exact, given = inputs(one, case, dtype)
        got = one.call(*(given if device == "cpu" else _on(given, device)))
        found[one.name, kind_of(dtype), str(case)] = judge(got, one.truth(*exact))
    return found


def _on(given: Inputs, device: str) -> list[Tensor]:
    return [x.to(device) for x in given]


def _moves(device: str) -> dict[tuple[str, str], str]:
    kinds = (torch.bfloat16, torch.float16)
    found = {(one.name, kind_of(dtype)): moved(one, dtype, device) for one in MOVES for dtype in kinds}
    return found | {(name, kind_of(dtype)): ordered(name, dtype, device) for name in ORDER for dtype in kinds}


def _compiled(some: Sequence[Operator], device: str) -> dict[Key, Outcome]:
    """All operators as one function, so that a compiler is started once for each type; one or two cases of each."""
    found: dict[Key, Outcome] = {}
    some = [one for one in some if one.group == "pointwise" or one.name in GENERATED]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tried: list[Tried] = [
            (one, case, *inputs(one, case, dtype)) for one in some for case in _for_compiler(one, dtype)
        ]

        def everything(given: Sequence[Sequence[Tensor]], tried: Sequence[Tried] = tried) -> list[Tensor]:
            return [one.call(*x) for (one, *_), x in zip(tried, given, strict=True)]

        compiled = cast(Any, torch).compile(everything, fullgraph=True, dynamic=False)
        results = compiled([_on(given, device) for *_, given in tried])
        for (one, case, exact, _), got in zip(tried, results, strict=True):
            found[one.name, kind_of(dtype), str(case)] = judge(got, one.truth(*exact))
    return found


def _for_compiler(one: Operator, dtype: torch.dtype) -> list[Case]:
    cases = [case for case in one.cases(dtype) if case.shape[0] and not case.apart]
    wanted = [case for case in cases if case.law in ("every", "wide")][:1]
    plain = [case for case in cases if case.law == "normal" and case.shape[-1] in (4099, 1000)][:1]
    return wanted + plain


@contextmanager
def _set(setting: str) -> Generator[None]:
    if setting not in SETTINGS:
        raise ValueError(f"there is no setting {setting!r}")
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(2 if setting == "2 threads" else 1)
        if setting == "no oneDNN":
            stack.enter_context(cast(Any, torch.backends).mkldnn.flags(enabled=False))
        yield


def written(folder: str, setting: str = "", groups: Sequence[str] = GROUPS) -> str:
    """Writes the sheet of this process's torch, in a helper's process; the name of its file."""
    found = sheet(groups, setting=setting)
    path = Path(folder) / f"{found.name}.json"
    write(found, path)
    return path.name


if __name__ == "__main__":
    print(written(sys.argv[1]))
