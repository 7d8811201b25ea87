"""Mistakes that one could make in a loss from logits in parts, planted one by one."""

# ruff: noqa: N803  a tensor carries its dims in its name

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tangram.training import derived, loop, loss
from tests.training.oracle.ranks import Setting, swapped

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
    real = loss._summed  # pyright: ignore[reportPrivateUsage]
    with swapped(loss, "_summed", lambda logits, labels, classes: real(logits, labels.clamp(min=0), classes)):
        yield


@contextlib.contextmanager
def labels_of_the_first_tokens(setting: Setting) -> Planted:
    """Every rank of the context axis takes the labels of the first part."""
    real = derived.Lies.part

    def first(self: derived.Lies, whole: Tensor, dims: Sequence[int]) -> Tensor:
        part = real(self, whole, dims)
        return whole[:, : part.shape[1]] if whole.ndim == 2 else part

    with swapped(derived.Lies, "part", first):
        yield


VOCABULARY_MISTAKES = (exponents_not_summed, labels_looked_up_one_class_off)
LOSS_MISTAKES = (ignored_labels_counted,)
CONTEXT_MISTAKES = (labels_of_the_first_tokens,)
