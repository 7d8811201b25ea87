"""How many tokens went to each expert of each layer, counted on the devices while a run trains.

A module of experts is one that is told each token's experts (`_INDEX`) and has `num_experts`, as those of transformers.
Counts stay on the device and are added up; now and then (`run.count_experts`) the ranks put them together, which is the
only time the host waits. A layer that several ranks compute alike, or that is computed
again in the backward, is counted as often by all of them: it is divided out, for how many there are is known.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.models.capturing.called import unseen
from tangram.models.lora.bases import BASE
from tangram.training.data import Batch
from tangram.training.mesh.world import World
from tangram.training.observe.events import EXPERTS, ExpertLoads, read_lines

_INDEX = ("top_k_index", "router_indices")
"""What the argument is called that has each token's experts."""


@dataclass
class _Counted:
    counts: Tensor
    per_token: int = 0


class Loads:
    """Counts what the experts of a model's parts are given, until `close`, says so every some steps (0: never)."""

    def __init__(
        self, parts: Iterable[nn.Module], device: torch.device, every: int, before: Mapping[str, Any] | None = None
    ) -> None:
        """`before`: what a run that goes on had counted and not told yet, as `carried` gave it."""
        self._every = every
        self._before = _counted({"step": 0, "tokens": 0, "layers": {}, **(before or {})})
        self._counted: dict[str, _Counted] = {}
        self._handles: list[Any] = []
        self._tokens = 0
        for part in parts if every else ():
            for name, module in cast("Iterable[tuple[str, nn.Module]]", part.named_modules()):
                place = _place(module)
                if place is not None:
                    own = _Counted(torch.zeros(int(cast(Any, module).num_experts), dtype=torch.int64, device=device))
                    self._counted[name.removesuffix(BASE)] = own
                    self._handles.append(module.register_forward_pre_hook(_hook(own, *place), with_kwargs=True))

    def after(self, step: int, micro: Sequence[Batch], world: World) -> ExpertLoads | None:
        """A step on these batches is done. Collective where it is time to say what was counted."""
        if not self._every:
            return None
        self._tokens += sum(batch.inputs_BS.numel() for batch in micro)
        return None if step % self._every else self.counted(step, world)

    def counted(self, step: int, world: World) -> ExpertLoads:
        """What was counted since the last time, over the global batches. Collective over all ranks."""
        found = self._summed(step, world)
        for own in self._counted.values():
            own.counts.zero_()
        self._tokens, self._before = 0, ExpertLoads(0, 0, {})
        return found

    def carried(self, world: World) -> dict[str, Any]:
        """The same so far, and counted on: what a checkpoint has of it, alike on all ranks. Collective where there is
        something."""
        return vars(self._summed(0, world)) if self._tokens or self._before.tokens else {}

    def _summed(self, step: int, world: World) -> ExpertLoads:
        mine = {name: (cast("list[int]", own.counts.tolist()), own.per_token) for name, own in self._counted.items()}
        every: list[Any] = [None] * world.size
        dist.all_gather_object(every, (mine, self._tokens), group=world.group)
        # ranks that share a part of the data have all been given it
        tokens = sum(one[1] for one in every) * world.data_size // world.size
        layers: dict[str, tuple[int, ...]] = {}
        for name in dict.fromkeys(name for one in every for name in one[0]):
            found = [one[0][name] for one in every if name in one[0]]
            summed = [sum(column) for column in zip(*(counts for counts, _ in found), strict=True)]
            layers[name] = _once(summed, tokens * max(per_token for _, per_token in found))
        return ExpertLoads(step, tokens + self._before.tokens, together((self._before, ExpertLoads(step, 0, layers))))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _once(counts: list[int], rows: int) -> tuple[int, ...]:
    """What was counted several times alike, once: together there are as many as rows."""
    times = sum(counts) // rows if rows else 1
    if not times or any(n % times for n in counts) or sum(counts) != times * rows:
        return tuple(counts)  # as ranks have counted it
    return tuple(n // times for n in counts)


def _place(module: nn.Module) -> tuple[str, int] | None:
    """The argument of each token's experts, by name and by position."""
    # The class says it: what stands around a module's own forward takes anything.
    names = [*inspect.signature(type(module).forward).parameters][1:] if hasattr(module, "num_experts") else []
    return next(((name, names.index(name)) for name in _INDEX if name in names), None)


def _hook(own: _Counted, name: str, place: int) -> Any:
    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = kwargs[name] if name in kwargs else args[place]
        if module.training and torch.is_grad_enabled():
            with unseen():
                flat = index.detach().flatten()
                own.counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
            own.per_token = index.shape[-1]

    return count


# ---------------------------------------------------------------- files


def read(path: Path) -> list[ExpertLoads]:
    """The counts of a run's folder, or of a file of such lines; of a step that was done twice the last. Raises
    UserError."""
    file = path / EXPERTS if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f'"{file}": {error.strerror}; run.count_experts says how often a run counts') from None
    except UnicodeDecodeError:
        raise UserError(f'"{file}" is not UTF-8 text: give the folder of a run that counted experts') from None
    found = {one.step: one for one in read_lines(file, lines, _counted, "count of experts")}
    if not found:
        raise UserError(f'"{file}" has no count of experts: run.count_experts says how often a run counts')
    return [found[step] for step in sorted(found)]


def _counted(one: dict[str, Any]) -> ExpertLoads:
    layers = {str(name): tuple(map(int, counts)) for name, counts in one["layers"].items()}
    return ExpertLoads(int(one["step"]), int(one["tokens"]), layers)


def together(counts: Iterable[ExpertLoads]) -> Mapping[str, tuple[int, ...]]:
    """By layer, the sums of several counts."""
    found: dict[str, tuple[int, ...]] = {}
    for one in counts:
        for name, own in one.layers.items():
            before = found.get(name, (0,) * len(own))
            found[name] = tuple(a + b for a, b in zip(before, own, strict=True))
    return found
