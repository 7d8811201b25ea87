"""A small model with AdamW's moments, and the ways in which strategies of training cut it over ranks."""

import fnmatch
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tangram.checkpoint.state.entries import LocalPart
from tangram.layout import Layout, Mesh, Region, region
from tangram.relayout.exchange.peers import Peers
from tests.checkpoint.stored import elements, random_tensor

PARAMETERS: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed": ((13, 8), torch.bfloat16),
    "layers.0.qkv": ((32, 8), torch.bfloat16),  # four groups of two query heads, a key and a value head, of two rows
    "layers.1.gate_up": ((10, 8), torch.bfloat16),  # five rows each
    "layers.2.experts": ((4, 6, 3), torch.bfloat16),
    "layers.3.down": ((8, 5), torch.bfloat16),
    "norm": ((7,), torch.float32),
}
OTHERS: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model.bias": ((1,), torch.float32),
    "model.none": ((0, 4), torch.float32),
    "model.positions": ((16,), torch.int64),
    "optim.embed.step": ((), torch.float32),
}


def whole() -> dict[str, Tensor]:
    """Every tensor of the state, whole; any bits at all."""
    shapes = dict(OTHERS)
    for name, (shape, dtype) in PARAMETERS.items():
        shapes[f"model.{name}"] = shape, dtype
        shapes[f"optim.{name}.exp_avg"] = shape, torch.float32
        if name in ("embed", "layers.2.experts"):  # all have one; more of them cost time and show nothing
            shapes[f"optim.{name}.exp_avg_sq"] = shape, torch.float32
    return {name: random_tensor(*made, seed) for seed, (name, made) in enumerate(sorted(shapes.items()))}


WHOLE = whole()


@dataclass(frozen=True)
class Strategy:
    """How the state lies over a mesh: the first pattern that a tensor's name fits says its layout."""

    mesh: str
    rules: Mapping[str, str]
    absent: bool = False
    """Whether a rank that holds nothing of a tensor does not know of it either, as a pipeline's stages do."""

    @property
    def ranks(self) -> int:
        """Of the mesh."""
        return Mesh.parse(self.mesh).size

    def layout(self, name: str) -> str:
        """Of a tensor."""
        own = next((text for pattern, text in self.rules.items() if fnmatch.fnmatchcase(name, pattern)), "...")
        return own if WHOLE[name].ndim or "@" in own else "..."

    def region(self, name: str, rank: int) -> Region:
        """What a rank holds of a tensor."""
        bound = Layout.parse(self.layout(name)).bind(tuple(WHOLE[name].shape))
        return region(bound, Mesh.parse(self.mesh), rank)

    def held(self, name: str, rank: int, *, empty: bool = False) -> LocalPart:
        """A rank's part, with its values or, `empty`, without."""
        part = elements(WHOLE[name], self.region(name, rank))
        local = torch.full_like(part, 0) if empty else part
        return LocalPart(local, tuple(WHOLE[name].shape), self.layout(name), self.mesh, rank)

    def state(self, rank: int, *, empty: bool = False) -> dict[str, dict[str, LocalPart]]:
        """What a rank has, as `save` and `load` take it."""
        found: dict[str, dict[str, LocalPart]] = {}
        for name in WHOLE:
            here = self.region(name, rank)
            if here or not self.absent or not math.prod(WHOLE[name].shape):
                section, _, rest = name.partition(".")
                found.setdefault(section, {})[rest] = self.held(name, rank, empty=empty)
        return found


ROWS = {"*": "_/dp ..."}
TENSOR = {
    "*.embed*": "v/tp h",
    "*.qkv*": "(g=4/tp (2 + 1 + 1) d) h",
    "*.gate_up*": "(2 f/tp) h",
    "*.experts*": "e f/tp h",
    "*.down*": "o i/tp",
}
FLAT = {"optim.*": "... //dp"}
INSIDE = {  # FSDP2 inside tensor parallelism: dp cuts the rows that tp has left
    "*.embed*": "v/tp/dp h",
    "*.qkv*": "(g=4/tp (2 + 1 + 1) d)/dp h",
    "*.gate_up*": "(2 f/tp)/dp h",
    "*.experts*": "e/dp f/tp h",
    "*.down*": "o/dp i/tp",
    "*": "_/dp ...",
}


def stages(*numbers: int, first: int = 0, last: int = -1, inside: Mapping[str, str] | None = None) -> dict[str, str]:
    """Rules of a pipeline: layer i on the stage `numbers[i]`; what is no layer on the first or on the last."""
    tables = {f"*layers.{i}.*": stage for i, stage in enumerate(numbers)}
    last = max(numbers) if last < 0 else last
    tables |= {"*.embed*": first, "*": last}
    found: dict[str, str] = {}
    for pattern, stage in tables.items():
        for name in WHOLE:
            if fnmatch.fnmatchcase(name, pattern) and name not in found:
                own = next((v for k, v in (inside or {}).items() if fnmatch.fnmatchcase(name, k)), "...")
                own = own if WHOLE[name].ndim else "..."
                found[name] = f"{own} @pp={stage}"
    return found


STRATEGIES: Mapping[str, Strategy] = {
    "one": Strategy("dp=1", {}),
    "copies of 2": Strategy("dp=2", {}),
    "fsdp of 2": Strategy("dp=2", ROWS),
    "fsdp of 3": Strategy("dp=3", ROWS),
    "fsdp of 4": Strategy("dp=4", ROWS),
    "fsdp of 8": Strategy("dp=8", ROWS),
    "columns": Strategy("dp=3", {"*": "... _/dp"}),
    "hsdp": Strategy("rep=2 dp=2", ROWS),
    "hsdp, copies inside": Strategy("dp=2 rep=2", ROWS),
    "tp of 2": Strategy("tp=2", TENSOR),
    "tp of 4": Strategy("tp=4", TENSOR),
    "tp of 3, uneven": Strategy("tp=3", TENSOR),
    "columns over tp, whatever they are": Strategy("tp=4", {"*": "... _/tp"}),
    "two views of a mesh": Strategy("tp=4 | kv=2 rep=2", {"*.qkv*": "(g=4/kv (2 + 1 + 1) d) h", "*.embed*": "v/tp h"}),
    "key heads fewer than tp": Strategy(
        "tp=4 | kv=2 rep=2", {"*.qkv*": "(g=2/kv (r=2/rep + 1 + 1) d) h", "*.embed*": "v/tp h"}
    ),
    "the same, flat inside": Strategy("kv=2 rep=2 dp=2", {"*.qkv*": "(g=2/kv (r=2/rep + 1 + 1) d) h //dp"}),
    "pp of 2": Strategy("pp=2", stages(0, 0, 1, 1)),
    "pp of 2, interleaved": Strategy("pp=2", stages(0, 1, 0, 1), absent=True),
    "pp of 4": Strategy("pp=4", stages(0, 1, 2, 3), absent=True),
    "pp of 4, embeddings on both ends": Strategy("pp=4", stages(3, 2, 1, 0, first=0, last=2)),
    "ep of 2": Strategy("ep=2", {"*.experts*": "e/ep f h"}),
    "ep of 4": Strategy("ep=4", {"*.experts*": "e/ep f h"}),
    "ep of 3, uneven": Strategy("ep=3", {"*.experts*": "e/ep f h"}),
    "cp, which also cuts parameters": Strategy("dp=2 cp=2", {"*.positions": "s/cp:zigzag", "*": "_/dp/cp ..."}),
    "cp by turns": Strategy("cp=3", {"*.positions": "s/cp:cyclic[2]"}),
    "fsdp inside tp": Strategy("dp=2 tp=2", INSIDE),
    "tp inside fsdp": Strategy("dp=2 tp=2", {"*.down*": "o i/dp/tp", "*": "_/dp/tp ..."}),
    "strided": Strategy("dp=2 tp=2", {"*": "_/dp:strided[2]/tp ..."}),
    "zero 1": Strategy("dp=4", FLAT),
    "zero 3, flat": Strategy("dp=3", {"*": "... //dp"}),
    "zero 1 and tp": Strategy("dp=2 tp=2", {f"optim{k}": f"{v} //dp" for k, v in TENSOR.items()} | TENSOR),
    "sizes said": Strategy("dp=3", {"*.embed*": "v/dp:[8 0 5] h", "*.down*": "o/dp:[1 6 1] i"}),
    "dealt out": Strategy("dp=4", {"*": "_/dp:cyclic[3] ..."}),
    "pp and tp": Strategy("pp=2 tp=2", stages(0, 1, 0, 1, inside=TENSOR), absent=True),
    "pp and fsdp": Strategy("dp=2 pp=2", stages(0, 0, 1, 1, inside=ROWS), absent=True),
    "ep and tp": Strategy("tp=2 ep=2", TENSOR | {"*.experts*": "e/ep f/tp h"}),
    "ep and fsdp": Strategy("dp=2 ep=2", {"*.experts*": "e/ep f/dp h"} | ROWS),
    "all at once": Strategy("dp=2 pp=2 tp=2", stages(0, 1, 0, 1, inside=INSIDE), absent=True),
    "axes of one rank": Strategy(
        "dp=3 tp=1 pp=1 cp=1 ep=1", INSIDE | {"*.embed*": "v/tp h/dp", "*.experts*": "e/ep f/dp/cp h"}
    ),
}

RARER = """
    copies of 2; fsdp of 3; fsdp of 4; hsdp, copies inside; columns over tp, whatever they are; tp of 4; ep of 4;
    pp of 4, embeddings on both ends; cp by turns; sizes said; pp and fsdp; ep and tp; ep and fsdp
"""
CORE = tuple(name for name in STRATEGIES if name not in [one.strip() for one in RARER.split(";")])
"""Strategies of which every pair is tried each time; of all, when there is time."""


class Threads:
    """Ranks as threads of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.words: list[Any] = [None] * size

    def run(self, act: Any) -> list[Any]:
        """`act(peers)` on every rank, together; what each returns."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def rank(index: int) -> None:
            try:
                results[index] = act(ThreadPeers(self, index))
            except BaseException as error:  # noqa: BLE001  it is raised again below
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(index,)) for index in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class ThreadPeers(Peers):
    """One of them, and the words that pass between them."""

    def __init__(self, together: Threads, index: int) -> None:
        object.__setattr__(self, "group", None)
        object.__setattr__(self, "_together", together)
        object.__setattr__(self, "_index", index)

    _together: Threads
    _index: int

    @property
    def index(self) -> int:
        return self._index

    @property
    def size(self) -> int:
        return self._together.size

    def all_words(self, word: Any) -> list[Any]:
        self._together.words[self._index] = word
        self._together.barrier.wait()
        found = list(self._together.words)
        self._together.barrier.wait()
        return found

    def from_first(self, word: Any) -> Any:
        return self.all_words(word)[0]

    def wait(self) -> None:
        self._together.barrier.wait()
