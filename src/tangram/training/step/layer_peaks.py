"""The largest activation and the largest attention logit of each layer in some steps, for what a trace says of them.

Layers are the model's repeated blocks. Of attention only calls of fused operators are seen: of the first sequence,
`QUERIES` queries spread over it against all keys. Nothing is read from the device before the step is over. Where blocks
are compiled nothing is looked at: a mode around them would have each compiled a second time.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tangram.tracing.trace import UNTRACED
from tangram.training.mesh.layout_to_torch import named_modules
from tangram.training.parallel.apply import KEPT, blocks_of
from tangram.training.parallel.model import ParallelModel

EVERY = 10
"""Steps from one look to the next. A look took 4.5 % of a step of 1.8 M parameters, most of it Python of the mode."""
QUERIES = 64
_FUSED = frozenset({F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention, *KEPT["attention"]})


class Calls(TorchFunctionMode):
    """Remembers what attention is called with; computes nothing, for within recompute each operator counts."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Mapping[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What a model compiles by itself is traced through here, and stays as it is.
        if not torch.compiler.is_compiling() and getattr(func, "overloadpacket", func) in _FUSED:
            q, k = args[:2] if len(args) > 1 else (kwargs.get("query"), kwargs.get("key"))
            if type(q) is type(k) is Tensor:
                self.seen.append((q.detach(), k.detach(), _options(func, args, kwargs)))
        return func(*args, **kwargs)


@contextmanager
def looking(model: ParallelModel, step: int, every: int = EVERY) -> Generator[None]:
    """Tell the model's trace of the layers' peaks in what is run here, if that is a step to look at."""
    if model.trace is UNTRACED or step % every or model.plan.run.compile:
        yield
        return
    look = _Look()
    with ExitStack() as stack:
        for part in model.parts:
            names = {id(module): name for name, module in named_modules(part.module)}
            for block in blocks_of(part.module):
                leave = partial(look.leave, names[id(block)])
                for handle in (
                    block.register_forward_pre_hook(look.enter),
                    block.register_forward_hook(leave, always_call=True),
                ):
                    stack.callback(handle.remove)
        yield
    model.trace.peaks(look.peaks())


class _Look:
    """At the forwards of a step: not at those without gradients, as of a reference."""

    def __init__(self) -> None:
        self._modes: list[Calls] = []
        self._found: dict[str, list[Tensor]] = {}

    def enter(self, module: nn.Module, _: Any) -> None:
        """A block's forward begins."""
        if module.training and torch.is_grad_enabled():
            self._modes.append(Calls())
            self._modes[-1].__enter__()

    def leave(self, name: str, module: nn.Module, _: Any, result: Any) -> None:
        """It has ended."""
        if not (self._modes and module.training and torch.is_grad_enabled()):
            return
        mode = self._modes.pop()
        mode.__exit__(None, None, None)
        x = cast(object, result[0] if isinstance(result, tuple) and result else result)
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            with torch.no_grad():
                most = torch.stack([largest_logit(*one) for one in mode.seen]).amax() if mode.seen else x.new_zeros(())
                largest = cast(Tensor, torch.linalg.vector_norm(x.detach(), math.inf))
                self._found.setdefault(name, []).append(torch.stack([largest.float(), most.float()]))

    def peaks(self) -> dict[str, tuple[float, float]]:
        """By layer the largest activation and logit (0: none was seen)."""
        if not self._found:
            return {}
        stacked = torch.stack([torch.stack(own).amax(0) for own in self._found.values()])
        flat = cast("list[list[float]]", stacked.tolist())
        return {name: (a, b) for name, (a, b) in zip(self._found, flat, strict=True)}


def largest_logit(q_BHSE: Tensor, k_BGTE: Tensor, options: Mapping[str, Any]) -> Tensor:
    """A float32 scalar, of some queries of the first sequence; 0 where the shapes are not those of heads."""
    none = torch.zeros((), device=q_BHSE.device)
    if q_BHSE.dim() != 4 or not (q_BHSE.numel() and k_BGTE.numel()) or q_BHSE.shape[1] % k_BGTE.shape[1]:
        return none
    (H, S, E), (G, T) = q_BHSE.shape[1:], k_BGTE.shape[1:3]
    rows_R = torch.linspace(0, S - 1, min(S, QUERIES), device=q_BHSE.device).long()
    R = len(rows_R)
    q_GRE = q_BHSE[0][:, rows_R].reshape(G, H // G * R, E)
    scale = options.get("scale") or E**-0.5
    logits_HRT = (q_GRE @ k_BGTE[0].mT).view(H, R, T).float() * scale
    if options.get("is_causal"):
        logits_HRT = logits_HRT.masked_fill(torch.arange(T, device=rows_R.device) > rows_R[:, None], -math.inf)
    mask = options.get("attn_mask")
    if isinstance(mask, Tensor):
        mask_RT = mask.expand((*mask.shape[:-2], S, T))[..., rows_R, :]
        mask_RT = mask_RT[0] if mask_RT.dim() == 4 else mask_RT
        hidden = ~mask_RT if mask.dtype == torch.bool else mask_RT == -math.inf
        logits_HRT = logits_HRT.masked_fill(hidden, -math.inf)
    return logits_HRT.amax().clamp(min=0)


def _options(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a call its mask, whether it is causal, and its scale, by their names."""
    names: Iterable[str] = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    if (schema := getattr(func, "_schema", None)) is not None:
        names = (one.name for one in schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)
