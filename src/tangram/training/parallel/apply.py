"""Make any module parallel as a plan says: `apply(model, plan, world)`.

    freeze -> keep this rank's stages -> cut over the model axes (`training.mesh.tensor_parallel`) -> compile, recompute
    -> FSDP2 over the data axes, or sums of the gradients of whole copies (`training.parallel.fsdp`)

The module is changed in place and its own code stays as it is. A parameter that is cut ends as a DTensor.
"""

import difflib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,  # pyright: ignore[reportUnknownVariableType]  typed in part
    create_selective_checkpoint_contexts,  # pyright: ignore[reportUnknownVariableType]
)

from tangram.errors import UserError
from tangram.kernels.attention import ATTEND
from tangram.kernels.flash.operator import FLASH
from tangram.models.capturing.stages import Through, keep_stages
from tangram.models.lora.adapters import Adapters, add_adapters
from tangram.models.outlines.costs import block_names
from tangram.schema.job import Job
from tangram.schema.plan import Plan, matches
from tangram.training.mesh.buffers import refuse_counted_twice
from tangram.training.mesh.drawing import Drawer, counts_of_stages
from tangram.training.mesh.layout_to_torch import cuts_of, is_meta, named_modules
from tangram.training.mesh.local_parts import NO_PARTS, PlainParts
from tangram.training.mesh.mapped_tensors import mapped_like
from tangram.training.mesh.tensor_parallel import DerivedModel, install
from tangram.training.mesh.world import World, of_stage
from tangram.training.objective import expert_capacity, router_loss
from tangram.training.objective.expert_capacity import Capacity
from tangram.training.objective.packing import token_order
from tangram.training.objective.router_loss import Routers
from tangram.training.parallel.fsdp import map_padded, shard
from tangram.training.parallel.layer_stream import stream
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.pipeline import ModelPart, PipelineRun, own_results
from tangram.training.parallel.precision import keep_parameters
from tangram.training.parallel.quantised_base import quantise, to_quantise


def apply(model: nn.Module, plan: Plan, world: World) -> ParallelModel:
    """Make `model` parallel in place, as the plan's layouts say; it is the `module` of what this returns.

    A model on meta (shapes only) is cut before it has memory; give it values with `materialise`. One that has values
    must have the same on every rank, on the rank's device. Collective: all ranks of `world` call it. Raises UserError
    for layouts that do not fit the model, and where ranks have different values.
    """
    tokens = token_order(model, plan)
    freeze(model, plan)
    keep_parameters(model, plan)
    # Of all stages, so before other stages' layers are taken out.
    of_routers = router_loss.routers_with_loss(model, plan)
    of_experts = expert_capacity.routers_with_capacity(model, plan)
    numbers, drawn = plan.stages_at(world.stage), counts_of_stages(model, plan)
    stages = plan.pipeline
    parts = [model] if stages is None else keep_stages(model, stages.stages, numbers, stages.tied)
    cuts = cuts_of(model, plan)
    if not is_meta(model):
        _refuse_unlike_values(model, world)
    codes = [to_quantise(part, plan) for part in parts]
    derived: Sequence[DerivedModel | None] = [None for _ in parts]
    if world.model_size > 1:
        named = {name: cuts[p] for name, p in model.named_parameters()}
        derived = [install(part, plan, cuts, world) for part in parts]
        cuts = {p: named[name] for name, p in model.named_parameters()}  # those that stand in the model now
    plain = {name: part for one in derived if one is not None for name, part in one.plain.items()}
    # before a function of ours stands for a forward: a copy of the part would run this part
    draws = [own or Drawer(part, plan.run.compile) for part, own in zip(parts, derived, strict=True)]
    for number, part in zip(numbers, parts, strict=True):
        if number < len(plan.rank_of_stage) - 1:  # of the last the loss is made at once
            own_results(part)
    blocks = {part: [block for block in blocks_of(part) if not isinstance(block, Through)] for part in parts}
    if plan.run.compile:  # before recompute: what runs again in the backward is the compiled forward, too
        for block in itertools.chain(*blocks.values()):
            block.forward = torch.compile(block.forward)
    streams = [stream(part, blocks[part], plan, world.device) for part in parts]  # inside of what is recomputed
    recompute(blocks, plan)
    for part, weights, own in zip(parts, codes, derived, strict=True):
        plain |= quantise(part, plan, weights, cuts, world, own)
    data_parallel = [shard(part, blocks[part], plan, cuts, world) for part in parts]
    stage = world.group if of_routers is None and of_experts is None else of_stage(world)
    own = tuple(
        ModelPart(
            part,
            tokens,
            derived[at],
            draws[at],
            data_parallel[at],
            None if of_routers is None else Routers(part, derived[at], of_routers, plan.run.router_loss, world, stage),
            None if of_experts is None else Capacity(part, derived[at], of_experts, plan.run, world, stage),
        )
        for at, part in enumerate(parts)
    )
    if plan.pipeline is None:
        return ParallelModel(model, plan, world, own, plain=plain, stream=streams[0])
    pipeline = PipelineRun(model, dict(zip(numbers, own, strict=True)), plan, world, drawn)
    return ParallelModel(model, plan, world, own, pipeline, plain)


def freeze(model: nn.Module, plan: Job) -> None:
    """Put the plan's adapters in, and switch off the gradients of what it freezes. UserError for a pattern without any.

    What is already there stays. Beside adapters all else is frozen.
    """
    if plan.lora is not None:
        add_adapters(model, Adapters(**plan.lora.modules))
    names = [name for name, _ in model.named_parameters()]
    for pattern in plan.model.freeze:
        if not any(matches((pattern,), name) for name in names):
            raise UserError(f'model.freeze names "{pattern}", which fits no parameter: the first is "{names[0]}"')
    for name, parameter in model.named_parameters():
        if matches(plan.model.freeze, name):
            parameter.requires_grad_(False)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise UserError("model.freeze leaves no parameter to train")
    for pattern in plan.optimiser.lr_of:
        if not any(matches((pattern,), name) for name in trained):
            raise UserError(
                f'optimiser.lr_of names "{pattern}", which fits no parameter that is trained{_near(pattern, trained)}'
            )


def _near(pattern: str, names: Sequence[str]) -> str:
    """Of names the nearest to a pattern, whole or by a part, for a sentence."""
    parts = {part: name for name in reversed(names) for part in (name, *name.split("."))}
    found = difflib.get_close_matches(pattern.strip("*."), parts, n=1)
    return f': did you mean "{parts[found[0]]}"?' if found else f': the first is "{names[0]}"'


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks. FSDP gathers one of them at a time."""
    return [model.get_submodule(name) for name in block_names(model)]


def _refuse_unlike_values(model: nn.Module, world: World) -> None:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != world.device.type:
            raise UserError(
                f"{name} is on {tensor.device}, but this rank computes on {world.device}: move the model there"
            )
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, digest.hexdigest(), group=world.group)
    firsts: dict[int, int] = {}
    for rank in range(world.size):
        firsts.setdefault(world.stage_of(rank), rank)
    unlike = [rank for rank, other in enumerate(found) if other != found[firsts[world.stage_of(rank)]]]
    if unlike:
        first = firsts[world.stage_of(unlike[0])]
        raise UserError(
            f"rank {unlike[0]} has other initial values than rank {first}: use the same seed on every rank, or make "
            "the model on meta and give it values with materialise"
        )


def materialise(
    model: nn.Module,
    device: torch.device,
    values: Iterable[tuple[str, Tensor]],
    plain: PlainParts = NO_PARTS,
    *,
    in_files: bool = False,
) -> None:
    """Give a model on meta storage and the given whole tensors, of which each rank keeps its shard.

    `plain`: as of the `ParallelModel`; `in_files` as of `give_storage`.
    """
    give_storage(model, device, in_files=in_files)
    filled = fill(model, values, plain)
    waiting = {name for name, _ in (*model.named_parameters(), *model.named_buffers())} - filled
    if waiting:
        raise RuntimeError(f"these tensors got no value: {', '.join(sorted(waiting))}")


@torch.no_grad()
def fill(model: nn.Module, values: Iterable[tuple[str, Tensor]], plain: PlainParts = NO_PARTS) -> set[str]:
    """Copy whole tensors into a model that has storage; the names that were given."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    filled: set[str] = set()
    for name, whole in values:
        put(tensors[name], plain[name].of(whole) if name in plain else whole)
        filled.add(name)
    return filled


def give_storage(model: nn.Module, device: torch.device, *, in_files: bool = False) -> None:
    """Memory for every tensor of a model on meta, without values; tied parameters stay one. `in_files`: parameters lie
    in files that are mapped."""
    tied = _tied(model)
    model.to_empty(device=device)  # which gives each place a parameter of its own
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            path, _, key = name.rpartition(".")
            model.get_submodule(path).register_parameter(key, parameter)
    if in_files:
        model._apply(mapped_like)  # pyright: ignore[reportPrivateUsage]  FSDP looks where its parts lie then
        map_padded(model)


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that stands in several places."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def put(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter or buffer, or this rank's part of it into a shard."""
    if target.shape != full.shape:
        raise RuntimeError(f"a tensor of shape {tuple(full.shape)} does not fit one of {tuple(target.shape)}")
    if isinstance(target, DTensor):
        # Every rank has the same whole tensor, so nothing needs to be sent.
        part = distribute_tensor(full.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(full)


_aten = torch.ops.aten
KEPT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "matmuls": (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._grouped_mm, _aten._scaled_mm),
        "attention": (
            _aten._scaled_dot_product_flash_attention,
            _aten._scaled_dot_product_flash_attention_for_cpu,
            _aten._scaled_dot_product_efficient_attention,
            _aten._scaled_dot_product_cudnn_attention,
            _aten._scaled_dot_product_fused_attention_overrideable,
            ATTEND,
            FLASH,
        ),
    }
)
"""The operators of each kind."""


def recompute(parts: Mapping[nn.Module, Sequence[nn.Module]], plan: Plan) -> None:
    """Keep no activations of the modules that the plan names: their forward runs again in the backward.

    By operator, `run.recompute_keep` names kinds whose results are kept all the same: both are most of the time and not
    most of the memory. What moves between ranks in a module is moved again with it, in the same order on every rank:
    which operators are kept does not depend on the rank.
    What is inside of one that is named is recomputed with it, whether or not a pattern names it, too. `parts`: what
    runs on this rank, and its blocks. Raises UserError for patterns that fit nothing, and for what cannot be computed
    again in parts.
    """
    if not plan.run.recompute:
        return
    found = [_recompute_of(part, plan, blocks) for part, blocks in parts.items()]
    if not any(found):
        raise UserError(
            f"run.recompute = {list(plan.run.recompute)} fits no module of the model, or one that has all layers "
            'inside, of which nothing would be saved: name the layers, as "full" does'
        )


def _recompute_of(part: nn.Module, plan: Plan, blocks: Sequence[nn.Module]) -> bool:
    """Whether the plan names anything of it but what has blocks inside: "*" is each block, and what is beside them."""
    chosen: dict[str, nn.Module] = {}
    named = named_modules(part)[1:]
    inside = [name for name, module in named if any(module is block for block in blocks)]
    for name, module in named:
        around = any(one.startswith(f"{name}.") for one in inside)
        within = any(name.startswith(f"{outer}.") for outer in chosen)
        if matches(plan.run.recompute, name) and not around and not within:
            chosen[name] = module
    for name, module in chosen.items():
        if plan.run.compile and plan.model_axes and any(module is not b and module in b.modules() for b in blocks):
            raise UserError(
                f"run.recompute names {name}, a part of a compiled block: over a tensor axis, compute whole blocks "
                "again or compile nothing (run.compile = false)"
            )
        refuse_counted_twice(name, module)
        module.forward = _checkpointed(module.forward, plan.run.recompute_keep)
    return bool(chosen)


def _checkpointed(forward: Callable[..., Any], keep: Sequence[str]) -> Callable[..., Any]:
    told: dict[str, Any] = {}
    if keep:
        kept = {operator for kind in keep for operator in KEPT[kind]}
        told["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))

    def run(*args: Any, **kwargs: Any) -> Any:
        return cast(Any, checkpoint(forward, *args, use_reentrant=False, **told, **kwargs))

    return run


def _policy(kept: set[Any], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    found = getattr(operator, "overloadpacket", None) in kept
    return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE
