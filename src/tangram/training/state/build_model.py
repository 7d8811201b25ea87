"""Build the model that a plan asks for: cut over the ranks, or whole in one process; with values or waiting for them.

Values come from the weights of a Hugging Face directory, from the model class's own initialisation (see
`tangram.models.building.build`), or later from a checkpoint; then only what no checkpoint holds is filled here.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tangram.errors import UserError
from tangram.models.building.build import Source, build_on_meta, read_source
from tangram.models.building.fields import by_layer
from tangram.models.building.initial import initial_tensors
from tangram.models.capturing.attention import by_tokens, by_torch
from tangram.models.capturing.fold import kinds_of, run_once
from tangram.models.outlines.costs import block_names
from tangram.planner.local.own_rules import define_operators
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.data import Tokens
from tangram.training.mesh.local_parts import NO_PARTS, PlainParts
from tangram.training.mesh.world import World
from tangram.training.objective.packing import token_order
from tangram.training.parallel.apply import apply, fill, freeze, give_storage, materialise
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.precision import keep_parameters
from tangram.training.parallel.quantised_base import quantise, to_quantise
from tangram.training.state.load_weights import begin_adapters, load_pretrained


def source_of(plan: Job, tokens: Tokens) -> Source:
    """The plan's model, fitted to its tokens. Raises UserError where they do not fit.

    A preset has the vocabulary of the tokens, unless the plan says otherwise; a model at a path keeps its own.
    """
    define_operators(plan)
    changes = dict(plan.model.change)
    if plan.model.preset is not None:
        begin = tokens.end if tokens.begin is None else tokens.begin
        changes = {"vocab_size": tokens.vocabulary, "bos_token_id": begin, "eos_token_id": tokens.end, **changes}
        asked = changes["vocab_size"]
        if isinstance(asked, int) and asked < tokens.vocabulary:  # before transformers warns of what follows from it
            _refuse_vocabulary(asked, tokens, weights=False)
    source = read_source(plan.model.preset, plan.model.path, changes)
    if plan.lora is not None and source.weights is None:
        raise UserError(f'"{plan.model.path}" has no weights for adapters to stand beside: give a directory that has')
    if plan.run.by_tokens:
        source = replace(source, config=by_tokens(source.config, plan.run.attention))
    elif plan.run.attention == "sdpa":
        source = replace(source, config=by_torch(source.config))
    text = source.config.get_text_config()
    if text.vocab_size < tokens.vocabulary:
        named = text is source.config
        _refuse_vocabulary(text.vocab_size, tokens, weights=source.weights is not None, named=named)
    for layer in by_layer(text):
        heads, kv_heads = (getattr(layer, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
            raise UserError(
                f"the model has {heads} query heads (num_attention_heads) for {kv_heads} key-value heads "
                "(num_key_value_heads): give a divisor"
            )
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < plan.data.sequence:  # XLNet's -1 means any number
        raise UserError(
            f"data.sequence is {plan.data.sequence}, but the model has {positions} positions: shorten it, or set "
            "model.change.max_position_embeddings"
        )
    return source


def _refuse_vocabulary(size: int, tokens: Tokens, *, weights: bool, named: bool = True) -> None:
    """`weights`: whether rows are stored; `named`: whether the configuration itself has the number."""
    rows = ", where rows of new tokens begin as the mean of the stored ones" if weights else ""
    more = f", or set model.change.vocab_size = {tokens.vocabulary} (or more){rows}" if named else ""
    raise UserError(
        f"the model has a vocabulary of {size}, but the tokenizer makes {tokens.vocabulary} tokens: take the model's "
        f"own tokenizer{more}"
    )


def has_dropout(config: PreTrainedConfig) -> bool:
    """Whether training draws masks, which depend on how the batch is cut over ranks."""
    fields = config.get_text_config().to_dict()
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in fields.items())


def build(plan: Plan, source: Source, world: World, *, values: bool) -> ParallelModel:
    """This rank's part of the model. Without `values` only what no checkpoint holds has any."""
    module = build_on_meta(source.config)
    model = apply(module, plan, world)
    _fill(module, plan, source, world, world.device, values=values, plain=model.plain)
    return model


def build_unsharded(plan: Plan, source: Source, device: torch.device, *, values: bool = False) -> PreTrainedModel:
    """The whole model in this process, its parameters in the type that the plan keeps them in."""
    model = build_on_meta(source.config)
    token_order(model, plan)  # raises where it does not attend as the plan says
    freeze(model, plan)
    keep_parameters(model, plan)
    quantise(model, plan, to_quantise(model, plan), {})
    _fill(model, plan, source, None, device, values=values)
    return model


def shallow(plan: Job, source: Source, most: float = math.inf) -> PreTrainedModel:
    """A model of the plan's type with one block of each kind, with initial values, in this process on the CPU.

    Raises UserError where it has more than `most` parameters.
    """
    model = build_on_meta(source.config)
    blocks = block_names(model)
    run_once(model, blocks, kinds_of(model, blocks))
    if (size := sum(parameter.numel() for parameter in model.parameters())) > most:
        raise UserError(f"one block of each kind has {size:,} parameters, too many to be tried here")
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    materialise(model, torch.device("cpu"), initial_tensors(source.config, plan.seed, only=own.__contains__))
    return model


def _fill(
    model: PreTrainedModel,
    plan: Plan,
    source: Source,
    world: World | None,
    device: torch.device,
    *,
    values: bool,
    plain: PlainParts = NO_PARTS,
) -> None:
    in_files = plan.run.stream_layers
    own = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    if values and source.weights is None:
        materialise(
            model, device, initial_tensors(source.config, plan.seed, only=own.__contains__), plain, in_files=in_files
        )
        return
    give_storage(model, device, in_files=in_files)
    lasting = model.state_dict(keep_vars=True).keys()
    fill(model, initial_tensors(source.config, plan.seed, only=lambda name: name in own and name not in lasting))
    if values:
        load_pretrained(Path(source.weights or ""), model, plan, world, plain)
        if plan.lora is not None:
            begin_adapters(model, plan, world, plain)
