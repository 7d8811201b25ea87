"""Operators over a dim as others that need of a cut dim only small sums and maxima: a function each, on plain tensors.

Each is stable where torch's operator is, and has its gradient, also where that is not the formula's: a norm of zeros
has a gradient of zeros. Those that torch decomposes well are not here (`tangram.sharding.ops.decompose`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tangram.sharding.compositions import classes, norms, places
from tangram.sharding.compositions.places import UnfitModuleError

__all__ = ["OWN", "UnfitModuleError"]


def _detached(operator: Any) -> Callable[..., Any]:
    """The operator itself, where no gradient passes: its maximum may then stay pending."""

    def without_gradient(x: Tensor, *others: Any) -> Tensor:
        return operator(x.detach(), *others)

    return without_gradient


def _all_dims(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x, [*range(x.ndim)])


_aten = torch.ops.aten
OWN: Mapping[str, Callable[..., Any]] = {
    "_softmax": classes.softmax,
    "_log_softmax": classes.log_softmax,
    "_safe_softmax": classes.safe_softmax,
    "logsumexp": classes.logsumexp,
    "var.correction": norms.var,
    "std.correction": norms.std,
    "var_mean.correction": norms.var_mean,
    "std_mean.correction": norms.std_mean,
    "native_layer_norm": norms.layer_norm,
    "native_group_norm": norms.group_norm,
    "native_batch_norm": norms.batch_norm,
    "_native_batch_norm_legit": norms.batch_norm,
    "_native_batch_norm_legit.no_stats": norms.batch_norm_no_stats,
    "linalg_vector_norm": norms.vector_norm,
    "norm.Scalar": norms.norm,
    "norm.ScalarOpt_dim": norms.norm,
    "dist": norms.dist,
    "amax": places.amax,
    "amin": places.amin,
    "max": _all_dims(places.amax),
    "min": _all_dims(places.amin),
    "max.dim": places.max_dim,
    "min.dim": places.min_dim,
    "argmax": places.argmax,
    "argmin": places.argmin,
    "nll_loss_forward": classes.nll_loss,
    "nll_loss2d_forward": classes.nll_loss,
    "nll_loss_backward": classes.nll_loss_backward,
    "nll_loss2d_backward": classes.nll_loss_backward,
    "torch_nn._linear_cross_entropy_batch_chunked": classes.linear_cross_entropy,
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction": classes.linear_cross_entropies,
    "any": _detached(_aten.any.default),
    "all": _detached(_aten.all.default),
    "any.dim": _detached(_aten.any.dim),
    "all.dim": _detached(_aten.all.dim),
    "any.dims": _detached(_aten.any.dims),
    "all.dims": _detached(_aten.all.dims),
}
"""Of operators by their names, functions of what they are called with."""
