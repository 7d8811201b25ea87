"""The oracle: training in one process, written as one writes it without Tangram.

Only the text and the choice of samples come from Tangram. The model is transformers' own, with a mask of attention that
is written out; the whole global batch goes through it at once; the loss is the mean over the counted labels.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import contextlib
import copy
import hashlib
import math
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tangram.models.building.initial import initial_tensors
from tangram.schema.job import DataPlan
from tangram.schema.plan import Plan
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.training.data import BYTES, Batch, Corpus, open_corpus, sample_ids
from tangram.training.data.samples import collate
from tangram.training.state.build_model import source_of
from tests.training.oracle.cases import Case
from tests.training.oracle.dropping import dropping
from tests.training.oracle.own import own_model
from tests.training.oracle.trace import CAPTURED, Tensors, Trace

CPU = torch.device("cpu")


def plain_run(case: Case) -> Trace:
    """Train."""
    plan = case.plan
    model = plain_model(case).train()
    kept, low = getattr(torch, plan.precision.parameters), getattr(torch, plan.precision.compute)
    for parameter in model.parameters():  # of those that are kept in a low type these are the masters
        parameter.data = parameter.data.to(kept).float()
    trained = [(name, p) for name, p in model.named_parameters() if not _fits(plan.model.freeze, name)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not _fits(plan.model.freeze, name))
    # No bias decays, though an expert's has two dims.
    decayed = [p for n, p in trained if p.ndim > 1 and "norm" not in n and not n.endswith("bias")]
    others = [p for _, p in trained if not any(p is one for one in decayed)]
    groups = [{"params": decayed, "weight_decay": plan.optimiser.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=plan.optimiser.betas, eps=plan.optimiser.eps
    )
    losses: list[float] = []
    norms: list[float] = []
    routers: list[float] = []
    dropped: list[float] = []
    margins: list[float] = []
    gradients: dict[int, Tensors] = {}
    values: dict[int, Tensors] = {}
    for step in range(case.until):
        optimiser.zero_grad()
        if plan.run.router_loss or plan.run.expert_capacity:
            loss, of_routers, lost, margin = _of_experts(model, case, step)
            routers.append(of_routers)
            dropped.append(lost)
            margins.append(margin)
        elif plan.precision.compute != "float32":
            loss = _rounded(model, case, step, low)
        else:
            batch = whole_batch(plan, step)
            text = f"{plan.seed}:{step * plan.data.global_batch}".encode()
            torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()))
            with DrawMode():  # masks of the whole batch, once, as far as there are any
                logits_BSV = _logits(model, batch)
            loss = F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten())
            loss.backward()
        norm = nn.utils.clip_grad_norm_([p for _, p in trained], plan.optimiser.clip_norm)
        for group in optimiser.param_groups:
            group["lr"] = rate(plan, step)
        optimiser.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
        if step + 1 in CAPTURED:
            gradients[step + 1] = {name: _kept(p.grad) for name, p in trained}
            values[step + 1] = {name: _kept(p.to(kept).float()) for name, p in model.named_parameters()}
    told = {"routers": tuple(routers), "dropped": tuple(dropped), "margins": tuple(margins)}
    return Trace(tuple(losses), tuple(norms), gradients, values, **told)


def rate(plan: Plan, step: int) -> float:
    """The learning rate, written out: a linear warm-up, then half a cosine down to a tenth at the last step."""
    warm, last, high = plan.optimiser.warmup_steps, plan.run.steps - 1, plan.optimiser.lr
    if step < warm:
        return high * (step + 1) / warm
    return 0.1 * high + 0.9 * high * (1 + math.cos(math.pi * (step - warm) / (last - warm))) / 2


def plain_model(case: Case) -> nn.Module:
    """The model in this process, as its class makes it, with the initial values of the run."""
    if case.own:
        return own_model(case.plan.seed)
    own = case.plan.run.model_copy(update={"attention": "model"})  # whatever the ranks attend by
    config = source_of(case.plan.model_copy(update={"run": own}), BYTES).config
    model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, whole in initial_tensors(config, case.plan.seed):
            tensors.pop(name).copy_(whole)
    assert not tensors, f"without an initial value: {sorted(tensors)}"
    return model


def whole_batch(plan: Plan, step: int) -> Batch:
    """The global batch of a step."""
    return _collated(plan, _rows(plan, step))


def _rows(plan: Plan, step: int) -> list[Any]:
    corpus = corpus_of(plan.data)
    first, count = step * plan.data.global_batch, plan.data.global_batch
    return [
        (corpus.training[source], window) for source, window in sample_ids(corpus, plan.data, plan.seed, first, count)
    ]


def _collated(plan: Plan, rows: list[Any]) -> Batch:
    single = plan.data.packing == "single"
    return collate(rows, plan.data.sequence, corpus_of(plan.data).fill, CPU, single=single)


@lru_cache(maxsize=8)
def _open(data: str) -> Corpus:
    return open_corpus(DataPlan.model_validate_json(data), BYTES)


def corpus_of(data: DataPlan) -> Corpus:
    """The text, which is prepared already."""
    return _open(data.model_dump_json())


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    if not hasattr(model, "config"):
        return model(batch.inputs_BS)
    return model(
        input_ids=batch.inputs_BS,
        position_ids=batch.positions_BS,
        attention_mask=_masks(model, batch),
        use_cache=False,
    ).logits


def _masks(model: nn.Module, batch: Batch) -> Any:
    """What each token sees, written out: the documents are told apart here, not by what transformers makes of position
    ids. Where layers see a window of the tokens before, there is a mask for each kind of layer."""
    config: Any = model.config
    inputs_BS = batch.inputs_BS
    document_BS = torch.zeros_like(inputs_BS) if batch.positions_BS is None else (batch.positions_BS == 0).cumsum(1)
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    seen_BSS = same_BSS & torch.ones_like(same_BSS).tril()
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" not in kinds:
        return seen_BSS[:, None]
    windowed_BSS = seen_BSS & torch.ones_like(same_BSS).triu(1 - config.sliding_window)
    masks = {"full_attention": seen_BSS, "sliding_attention": windowed_BSS}
    # Added to the scores, as attention that is written out in operators takes it.
    return {kind: torch.where(mask, 0.0, torch.finfo(torch.float32).min)[:, None] for kind, mask in masks.items()}


def _of_experts(model: Any, case: Case, step: int) -> tuple[Tensor, float, float, float]:
    """What is defined of a global micro-batch, of what all DP ranks take at once: the loss of routers as transformers
    has it, and what experts have no room for.

    Gives the loss without it, what it adds, the share of choices that were dropped, the mean over what ran, and the
    smallest margin by which any was.
    """
    plan, rows = case.plan, _rows(case.plan, step)
    ranks, size = plan.data_ranks, plan.data.micro_batch
    ends = [len(rows) * rank // ranks for rank in range(ranks + 1)]
    shares = [rows[start:stop] for start, stop in pairwise(ends)]
    counted = int((whole_batch(plan, step).labels_BS >= 0).sum())
    total, added, lost, tokens, margin = torch.zeros(()), 0.0, 0.0, 0, math.inf
    for at in range(0, max(map(len, shares)), size):
        batch = _collated(plan, [row for share in shares for row in share[at : at + size]])
        told = {"position_ids": batch.positions_BS, "attention_mask": _masks(model, batch), "use_cache": False}
        room = dropping(model, plan.run.expert_capacity, plan.run.drop_by) if plan.run.expert_capacity else _nothing()
        with room as shares_of_layers:
            found = model.model(input_ids=batch.inputs_BS, output_router_logits=True, **told)
        loss = whole = _sum(model.lm_head(found.last_hidden_state), batch) / counted
        if plan.run.router_loss:
            balance = sys.modules[type(model).__module__].load_balancing_loss_func
            mask_BS = (batch.labels_BS >= 0).long()
            routers = balance(found.router_logits, model.num_experts, model.num_experts_per_tok, mask_BS)
            routers = plan.run.router_loss * mask_BS.sum() / counted * routers
            whole, added = loss + routers, added + routers.item()
        whole.backward()
        total, tokens = total + loss.detach(), tokens + batch.inputs_BS.numel()
        lost += batch.inputs_BS.numel() * sum(share for share, _ in shares_of_layers) / max(1, len(shares_of_layers))
        margin = min([margin, *(each for _, each in shares_of_layers)])
    return total, added, lost / tokens, margin


@contextlib.contextmanager
def _nothing() -> Iterator[list[tuple[float, float]]]:
    yield []


def _rounded(model: nn.Module, case: Case, step: int, dtype: torch.dtype) -> Tensor:
    """The model computes with parameters rounded to a low type; gradients are taken to the float32 ones."""
    batch = whole_batch(case.plan, step)
    low = copy.deepcopy(model)
    for parameter in low.parameters():
        parameter.data = parameter.data.to(dtype)
    loss = F.cross_entropy(_logits(low, batch).flatten(0, 1).float(), batch.labels_BS.flatten())
    scale = 1024 if dtype == torch.float16 else 1  # small gradients are nothing in float16
    (scale * loss).backward()
    for own, rounded in zip(model.parameters(), low.parameters(), strict=True):
        own.grad = None if rounded.grad is None else rounded.grad.float() / scale
    return loss


def _sum(logits_BSV: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten(), reduction="sum")


def _fits(patterns: Iterable[str], name: str) -> bool:
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) for pattern in patterns)


def _kept(tensor: Tensor | None) -> Any:
    assert tensor is not None
    return tensor.detach().clone().numpy()
