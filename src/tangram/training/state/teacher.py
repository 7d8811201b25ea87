"""A student's teacher: read from its directory, checked against the student's tokens, cut over the student's mesh."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig

from tangram.checkpoint.formats.huggingface import has_weights, mapped_reader, read_index
from tangram.errors import UserError
from tangram.models.building.build import Source, build_on_meta, read_source
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.teacher import teacher_plan
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.data import Tokens
from tangram.training.data.tokens import load_tokens
from tangram.training.mesh.world import World
from tangram.training.parallel.apply import apply
from tangram.training.parallel.model import ParallelModel
from tangram.training.state.build_model import build, source_of
from tangram.training.state.export_hf import byte_tokenizer


def teacher_source(plan: Job, tokens: Tokens) -> Source | None:
    """The teacher of a plan or a job; None where it has none.

    Raises UserError for a directory without weights, and for a teacher that does not speak of the student's tokens.
    """
    if not plan.runs_teacher:
        return None
    own = plan.of_teacher()
    try:
        source = source_of(own, tokens)
        if source.weights is None:
            raise UserError(f'"{own.model.path}" has no weights to learn from: give a directory that has')
        theirs = load_tokens(own.data.model_copy(update={"tokenizer": "model"}), own.model.path)
        _refuse_other_tokens(tokens, theirs)
    except UserError as error:
        raise UserError(f"distill.teacher: {error}") from None
    return source


def _refuse_other_tokens(tokens: Tokens, theirs: Tokens) -> None:
    own, other = (_numbers(one) for one in (tokens, theirs))
    for text, number in own.items():
        if other.get(text) != number:
            has = "has no such token" if text not in other else f"has {other[text]} for it"
            raise UserError(
                f"the student's tokenizer ({tokens.name}) has the number {number} for the token {text!r}, and the "
                f"teacher's ({theirs.name}) {has}: take a teacher with the same tokenizer"
            )


def _numbers(tokens: Tokens) -> dict[str, int]:
    tokenizer = cast(Any, tokens)._tokenizer or byte_tokenizer()
    return cast("dict[str, int]", tokenizer.get_vocab())


def classes_of(config: PreTrainedConfig) -> int:
    """How many classes a model of a configuration has, rows of padding included."""
    return cast(int, cast(Any, config).get_text_config().vocab_size)


_LOOKED_AT = 4096
"""Bytes of a weight that are compared, at each of three places."""


def teacher_stamp(plan: Job) -> str | None:
    """Of the directory of a job's teacher: its configuration, and of each weight the name, type, shape and some bytes,
    so that hardly anything is read. None where no directory is given, or it is not here."""
    at = plan.distill and plan.distill.teacher
    if not at or not has_weights(folder := Path(at)):
        return None
    digest = hashlib.blake2b(digest_size=16)
    config = read_source(None, at, {}).config.to_dict()
    fields = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    read = mapped_reader(folder)
    for piece in sorted(read_index(folder).pieces, key=lambda piece: piece.tensor):
        x = read(piece.place, piece.tensor).contiguous()
        digest.update(f"{piece.tensor} {x.dtype} {[*x.shape]}".encode())
        data = x.reshape(-1).view(torch.uint8).numpy().data
        for begin in (0, len(data) // 2, max(0, len(data) - _LOOKED_AT)):
            digest.update(data[begin : begin + _LOOKED_AT])
    return digest.hexdigest()


def build_teacher(plan: Plan, tokens: Tokens, world: World) -> ParallelModel | None:
    """This rank's part of it, with its values. Collective. Raises UserError as `teacher_source`."""
    source = teacher_source(plan, tokens)
    return None if source is None else build(_planned(plan, source), source, world, values=True)


def bare_teacher(plan: Plan, tokens: Tokens, world: World) -> ParallelModel | None:
    """The same on meta, without values."""
    source = teacher_source(plan, tokens)
    return None if source is None else apply(build_on_meta(source.config), _planned(plan, source), world)


def _planned(plan: Plan, source: Source) -> Plan:
    return teacher_plan(plan, Counted(plan.of_teacher(), source.config))
