"""A case as a script that needs nothing but torch: save it, run it, send it to somebody.

The script is put together of the source of the case's function and a frame that is the same for all (`frame.txt`). Its
oracle is plain torch in the same process. The frame is a text and no module, since it does what only a program by
itself may do: it starts processes and a default process group, prints and exits. `pair.py` runs these very scripts, so
that what is reported is what the person who saves one will see.
"""

import inspect
import json
import re
import textwrap
from functools import cache
from importlib import resources

from tangram.sharding.compare.case import FOUND_WITH, CompareCase

_IMPORTS = {
    "sys": "import sys",
    "tempfile": "import tempfile",
    "time": "import time",
    "Callable": "from collections.abc import Callable",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "F": "import torch.nn.functional as F",
    "Tensor": "from torch import Tensor",
    "Store": "from torch.distributed import Store",
    "DeviceMesh": "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh",
    "DTensor": "from torch.distributed.tensor import DTensor, distribute_tensor",
    "local_map": "from torch.distributed.tensor.experimental import local_map",
    "register_sharding": "from torch.distributed.tensor.experimental import register_sharding",
}
"""What a name in the script needs; only what a script uses is in it."""

_PLACEMENTS = ("Placement", "Replicate", "Shard")

_HEAD = '''"""{title}

Operator: {operator}
Inputs placed as: {inputs}. What is compared: {compared}.
With torch {torch}: {found}.{issue}

Starts {ranks} processes that talk over gloo, and needs nothing but torch.
Exit code 0: DTensor gives what plain torch gives; 1: it gives something else; 2: it raises or hangs.
"""
'''


def script(case: CompareCase) -> str:
    """The text of a Python program that shows the case."""
    body = _without_remarks(textwrap.dedent(inspect.getsource(case.body)))
    settings = "".join(f", {key}={json.dumps(value)}" for key, value in case.settings.items())
    constants = (
        f"RANKS = {case.ranks}\nLIMIT = {case.limit:g}  # seconds\nPlace = Callable[[Tensor, Placement], Tensor]"
    )
    call = f"def case(place: Place) -> Tensor:\n    return {case.body.__name__}(place{settings})"
    code = "\n\n\n".join([constants, body.strip(), call, _frame()])
    return f"{_head(case)}\n{_imports(code)}\n\n{code}"


def _head(case: CompareCase) -> str:
    return _HEAD.format(
        title=textwrap.fill(f"{case.name}: {case.wrong}", 110),
        operator=case.operator,
        inputs=", ".join(map(short, case.inputs)),
        compared="the result" if case.direction == "forward" else "a gradient",
        torch=FOUND_WITH,
        found=case.expected,
        issue=f" Reported as {case.issue}." if case.issue else "",
        ranks=case.ranks,
    )


def short(placement: object) -> str:
    """A placement as one writes it: `Shard(1)`."""
    return re.sub(r"\bdim=", "", repr(placement))


def _imports(code: str) -> str:
    lines = [line for name, line in _IMPORTS.items() if re.search(rf"(?<![\w.\"']){name}\b", code)]
    placements = ", ".join(name for name in _PLACEMENTS if re.search(rf"\b{name}\b", code))
    lines.append(f"from torch.distributed.tensor.placement_types import {placements}")
    standard = [line for line in lines if "torch" not in line]
    return "\n".join([*standard, "", *(line for line in lines if "torch" in line)])


def _without_remarks(source: str) -> str:
    """Without what only our own linter and type checker read."""
    return re.sub(r"\s+# (noqa|pyright|type):.*", "", source)


@cache
def _frame() -> str:
    return resources.files("tangram.sharding.compare").joinpath("frame.txt").read_text()
