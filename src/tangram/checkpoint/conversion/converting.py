"""Conversion from any format and structure that is read to any that is written: what is chosen, then what is written.

    convert("runs/step-100", "exported")                                  # to a Hugging Face directory
    convert("megatron/iter_0001000", "own", to="tangram", options=ConvertOptions(config=Path("hf-dir")))

`prepare` decides everything and reads no values, so that a dry run can show it; `PreparedConversion.write` moves the
bytes.
"""

import contextlib
import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tangram.checkpoint.conversion.adapter_config import made_beside
from tangram.checkpoint.conversion.adapter_files import WEIGHTS
from tangram.checkpoint.conversion.config_facts import contradictions
from tangram.checkpoint.conversion.configured import fitted
from tangram.checkpoint.conversion.convert import (
    ConvertOptions,
    Restructured,
    config_of,
    restructure,
    small_of,
    target_of,
)
from tangram.checkpoint.conversion.find_mapping import ChosenMapping, choose, model_of, structure_of
from tangram.checkpoint.conversion.lora_adapters import with_adapter, without_adapter
from tangram.checkpoint.conversion.new_tensors import NARROW, WIDE, NewTensor, cast_specs, kept_wide, steps_of
from tangram.checkpoint.conversion.object_store import opening
from tangram.checkpoint.conversion.quantised import prepared, quantisation_of
from tangram.checkpoint.formats.common.model_part import part_under
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import split
from tangram.checkpoint.formats.hf_export import Converted, to_hugging_face
from tangram.checkpoint.formats.own import is_own
from tangram.checkpoint.formats.paddle.step_count import betas_of, with_betas, with_steps
from tangram.checkpoint.store.objects import is_remote
from tangram.errors import UserError
from tangram.models.families import family_named
from tangram.relayout import TensorSpec
from tangram.relayout.mapping.states import States

__all__ = [
    "ConvertOptions",
    "PreparedConversion",
    "convert",
    "exported_as_it_is",
    "prepare",
    "rare_collections",
    "refuse_target",
]

FITTED = ("hf", "torchtitan")
"""Structures of which it is known what models compute, and old checkpoints store."""


@dataclass(frozen=True)
class PreparedConversion:
    """A conversion that is decided, and of which no value has been read."""

    source: OpenCheckpoint
    chosen: ChosenMapping
    small: Mapping[str, bytes]
    """The files beside the weights."""
    to: str
    options: ConvertOptions
    ways: Sequence[NewTensor]
    """Every new tensor, and what it is made of."""
    notes: tuple[str, ...]
    dequantised: Any
    """What was made of quantised weights; None where nothing is quantised."""

    @property
    def nbytes(self) -> int:
        """Of the tensors that will be written."""
        return sum(way.nbytes for way in self.ways)

    def write(self, target: Path | str, on_bytes: Callable[[int], None] | None = None) -> Restructured:
        """Write it as the new directory `target`, or at an address of an object store.

        `on_bytes` is called with how many more bytes are written. Raises UserError, and leaves nothing then.
        """
        return restructure(
            self.chosen.source, self.chosen.bound, target, self.to, self.options, small=self.small, on_bytes=on_bytes
        )


def convert(
    source: Path | str, target: Path | str, *, to: str = "hf", options: ConvertOptions | None = None
) -> Converted | Restructured:
    """Convert a checkpoint of any format that is read, and prove what is not cast.

    `source` and `target`: directories, or addresses of an object store as `s3://bucket/name`; the target must be new.
    `to`: "hf", "torch_dist" (Megatron-core), "dcp" (torch), "paddle" or "tangram". What was written comes back: its
    files, bytes and seconds. Raises UserError for what cannot be converted; nothing is left of the target then.
    """
    options = options or ConvertOptions()
    refuse_target(target, to)
    with rare_collections(), opening(str(source)) as opened:
        if exported_as_it_is(opened, source, target, to, options) is not None:
            return to_hugging_face(
                Path(source), Path(target), dtype=options.dtype, rounded=options.rounded, shard=options.shard,
                memory=options.memory, config=options.config,
            )  # fmt: skip
        return prepare(opened, to, options).write(target)


def refuse_target(target: Path | str, to: str) -> None:
    """Raise UserError for a format that is not written, and for a target that is there already."""
    target_of(to)
    if not is_remote(str(target)) and (Path(target).exists() or Path(target).is_symlink()):
        raise UserError(f'"{target}" is there already: give the name of a new directory')


def exported_as_it_is(
    opened: OpenCheckpoint, source: Path | str, target: Path | str, to: str, options: ConvertOptions
) -> tuple[str, ...] | None:
    """What to say where the model of one of Tangram's own checkpoints is exported with no tensor changed, proved by
    digests; None where it is not."""
    local = not is_remote(str(source)) and not is_remote(str(target))
    changed = options.mapping is not None or options.adapters or options.dequantise or options.part is not None
    as_it_is = local and to == "hf" and is_own(Path(source)) and not changed and quantisation_of(opened) is None
    small = small_of(options.config) if options.config else opened.small
    as_it_is = as_it_is and kept_wide(small.get("config.json"), options.dtype) is None
    return _if_named_as_configured(opened, options) if as_it_is else None


def _if_named_as_configured(opened: OpenCheckpoint, options: ConvertOptions) -> tuple[str, ...] | None:
    """The sentences of `fitted` where `prepare` would take all tensors, by their names; else None: that tells why."""
    model = model_of(opened)[0]
    try:
        config = config_of(small_of(options.config) if options.config else opened.small)
        fit = fitted(model, config, True, folder=options.config)
    except UserError:
        return None
    return fit.notes if fit.source.specs.keys() == model.specs.keys() else None


def prepare(source: OpenCheckpoint, to: str, options: ConvertOptions) -> PreparedConversion:
    """Decide what becomes of every tensor. Raises UserError where no mapping fits."""
    if source.states and all(name.endswith(tuple(f".{state}" for state in source.states)) for name in source.specs):
        raise UserError(f'"{source.path}" has states of an optimiser and no weights: give the checkpoint of the model')
    small = small_of(options.config) if options.config else dict(source.small)
    if options.part is None and source.several and not small:
        keys = " and ".join(source.several)
        raise UserError(f'"{source.path}" has several state dicts, {keys}: say which with --part {source.several[0]}')
    source = source if options.part is None else part_under(source, options.part)
    left, inner = (), None
    if options.adapters:
        source, left = model_of(source)
        (first, _), *more = options.adapters
        inner = without_adapter(source, read=not more and not (first / WEIGHTS).is_file())
        source = inner.source
    also = [word for word, on in (("an adapter", options.adapters), ("a mapping", options.mapping)) if on]
    source, small, rounding = prepared(source, small, to, dequantise=options.dequantise, dtype=options.dtype, also=also)
    notes: tuple[str, ...] = ()
    if options.mapping is None and (names := structure_of(source)) in FITTED:
        own = source.format == "hf" and options.config is None
        fit = fitted(
            source, config_of(small) if names == "hf" else None, names == "hf" and to == "hf", own, options.config
        )
        source, notes = fit.source, fit.notes
    for folder, weight in options.adapters:
        tensors = inner.tensors if inner else None
        source = with_adapter(replace(source, small=small), folder, tensors, weight=weight)
        small = dict(source.small)
        notes += tuple(filter(None, [made_beside(folder, source.path)]))
    source = _with_settings(source, options)
    chosen = _chosen(source, to, config_of(small), options)
    if options.adapters:
        counts = [one["tensors"] for one in source.objects.get("adapters") or [source.objects["adapter"]]]
        each = (
            f'"{folder}" merged into {n:,} tensor{"" if n == 1 else "s"}'
            for (folder, _), n in zip(options.adapters, counts, strict=True)
        )
        merged = f"with {', '.join(each)}"
        chosen = replace(chosen, description=f"{chosen.description}, {merged}", left=left)
    made = cast_specs(chosen.bound, options.dtype, chosen.source.states, options.rounded, small.get("config.json"))
    notes += _kept_wide(made, options.dtype, chosen.source.states)
    return PreparedConversion(source, chosen, small, to, options, steps_of(chosen.bound, made), notes, rounding)


def _kept_wide(made: Mapping[str, TensorSpec], dtype: str | None, states: States) -> tuple[str, ...]:
    owners = split(made, states)
    kept = [name for name, spec in made.items() if spec.dtype == WIDE and dtype in NARROW and not owners[name][1]]
    return (f"{len(kept):,} not cast to {dtype}, as the model's class keeps them in {WIDE}: {kept[0]}",) if kept else ()


def _chosen(
    source: OpenCheckpoint, to: str, config: Mapping[str, Any] | None, options: ConvertOptions
) -> ChosenMapping:
    try:
        return choose(
            source, to, config, text=options.mapping, sizes=options.sizes or {},
            family=family_named(options.family) if options.family else None, local=options.local_layers,
            divisor=options.pad_vocabulary, states=options.states,
        )  # fmt: skip
    except UserError as error:
        wrong = [] if config is None or options.mapping else contradictions(source.specs, config)
        if not wrong:
            raise
        raise UserError(f"{'; '.join(wrong)}: give the configuration of these weights with --config") from error


def _with_settings(source: OpenCheckpoint, options: ConvertOptions) -> OpenCheckpoint:
    """With what a target needs to know of the optimiser beside its tensors."""
    if options.settings:
        source = replace(source, objects={**source.objects, "settings": dict(options.settings)})
    if options.betas is not None:
        return with_betas(source, options.betas)
    betas = betas_of(source.objects)
    return source if betas is None else with_steps(source, betas)


@contextlib.contextmanager
def rare_collections() -> Generator[None]:
    """Look for cycles of objects seldom: a checkpoint of many tensors makes millions that are in none."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
