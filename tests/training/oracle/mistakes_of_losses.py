"""Mistakes that one could make in a loss from logits in parts, planted one by one."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tangram.training.mesh import local_parts
from tangram.training.objective import loss
from tangram.training.step import loop
from tests.training.oracle.ranks import Setting, swapped
from tests.training.oracle.vocabulary import VOCABULARY

Planted = Iterator[None]


@contextlib.contextmanager
def exponents_not_summed(setting: Setting) -> Planted:
    """Each rank divides by the sum of the exponents of its own classes; nobody compares gradients."""
    real = loss.summed

    def own(x: Tensor, group: Any) -> Tensor:
        return torch.stack([x[0], real(x, group)[1]])

    with swapped(loss, "summed", own), swapped(loop, "refuse_unlike_gradients", lambda *_: None):
        yield


@contextlib.contextmanager
def labels_looked_up_one_class_off(setting: Setting) -> Planted:
    """A rank takes its columns for the classes that begin one later."""
    real = loss._classes  # pyright: ignore[reportPrivateUsage]

    def off(logits_BSV: Tensor, lies: Any) -> Any:
        classes = real(logits_BSV, lies)
        return replace(classes, numbers=classes.numbers + 1)

    with swapped(loss, "_classes", off):
        yield


@contextlib.contextmanager
def ignored_labels_counted(setting: Setting) -> Planted:
    """Places without a label count as such of the first class."""
    real = loss._losses  # pyright: ignore[reportPrivateUsage]
    with swapped(loss, "_losses", lambda logits, labels, placement: real(logits, labels.clamp(min=0), placement)):
        yield


@contextlib.contextmanager
def labels_of_the_first_tokens(setting: Setting) -> Planted:
    """Every rank of the context axis takes the labels of the first part."""
    real = local_parts.ResultPlacement.part

    def first(self: local_parts.ResultPlacement, whole: Tensor, dims: Sequence[int]) -> Tensor:
        part = real(self, whole, dims)
        return whole[:, : part.shape[1]] if whole.ndim == 2 else part

    with swapped(local_parts.ResultPlacement, "part", first):
        yield


@contextlib.contextmanager
def vocabulary_offset_wrong(setting: Setting) -> Planted:
    """The second TP rank looks tokens up one row too low in its part of the vocabulary."""

    def shift(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids_BS = args[0]
        return (torch.where(ids_BS > VOCABULARY // setting.world.model_size, ids_BS - 1, ids_BS), *args[1:])

    def build(model: nn.Module) -> None:
        if setting.world.devices.get_local_rank("model tp") == 1:
            embedding = cast(Any, model).get_input_embeddings()
            embedding.register_forward_pre_hook(shift, prepend=True)

    setting.built.append(build)
    yield


VOCABULARY_MISTAKES = (exponents_not_summed, labels_looked_up_one_class_off, vocabulary_offset_wrong)
LOSS_MISTAKES = (ignored_labels_counted,)
CONTEXT_MISTAKES = (labels_of_the_first_tokens,)
