"""Calls that torch's samples lack: operators that none of them reaches, and dims that none of theirs has.

One line a call; each is run once under the recorder of `samples`, before torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tangram.kernels.attention import ATTEND
from tangram.kernels.flash.operator import FLASH
from tangram.kernels.flash.spans import Spans, in_order
from tangram.kernels.fused.gated import GATED
from tangram.kernels.fused.norm import ADD_RMS_NORM, RMS_NORM
from tangram.kernels.fused.projected_loss import PROJECTED_LOSS
from tangram.kernels.fused.rotary import ROTARY
from tangram.models.capturing import called as noted


def _of_fused(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


FUSED: Sequence[tuple[Any, Callable[[], tuple[Any, ...]]]] = (
    (RMS_NORM.default, lambda: (_of_fused(5, 3, 4), _of_fused(4), 1e-6, 1.0)),
    (RMS_NORM.default, lambda: (_of_fused(5, 4), None, 1e-6)),
    (ADD_RMS_NORM.default, lambda: (_of_fused(3, 5, 4), _of_fused(3, 5, 4), _of_fused(4), 1e-6)),
    (GATED.default, lambda: (_of_fused(5, 3), _of_fused(5, 3))),
    (GATED.default, lambda: (_of_fused(2, 5, 3), _of_fused(2, 5, 3), "gelu_tanh")),
    (PROJECTED_LOSS.default, lambda: (_of_fused(7, 3), _of_fused(5, 3), torch.tensor([0, -100, 3, 4, 1, -100, 2]))),
    (PROJECTED_LOSS.default, lambda: (_of_fused(3, 4), _of_fused(6, 4), torch.tensor([5, 2, 2]), 2)),
    (ROTARY.default, lambda: (_of_fused(3, 4, 5, 6), _of_fused(3, 2, 5, 6), _of_fused(3, 5, 4), _of_fused(3, 5, 4))),
    (ROTARY.default, lambda: (_of_fused(3, 2, 5, 4), _of_fused(3, 2, 5, 4), _of_fused(1, 5, 4), _of_fused(1, 5, 4))),
)


aten = torch.ops.aten


def _some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _below(n: int, *shape: int) -> Tensor:
    return torch.randint(n, shape)


def _ends(*at: int) -> Tensor:
    """Where groups of rows end."""
    return torch.tensor(at, dtype=torch.int32)


def _positive(*shape: int) -> Tensor:
    """Symmetric matrices with positive eigenvalues."""
    root = _some(*shape, shape[-1])
    return root @ root.mT + torch.eye(shape[-1], dtype=torch.float64)


def _lower(rows: int, columns: int) -> Tensor:
    """A mask that hides what lies above the diagonal."""
    return torch.full((1, 1, rows, columns), -torch.inf, dtype=torch.float64).triu(1)


def _tokens(rows: int, *documents: int) -> Tensor:
    """Documents and places of the tokens of some rows, alike."""
    own = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    return torch.stack([own, torch.arange(len(own))], -1).repeat(rows, 1, 1)


def _spans(rows: int, queries: int, keys: int, window: int) -> Spans:
    """Of causal queries in order, which differ from row to row by their window."""
    found = in_order(queries, keys, window=window, batch=rows)
    return found._replace(since=(found.since + torch.arange(rows, dtype=torch.int32)[:, None]).clamp(max=found.reach))


attention = aten._scaled_dot_product_flash_attention_for_cpu.default
EXTRA: Sequence[tuple[Any, Callable[[], tuple[Any, ...]]]] = (
    *FUSED,
    (
        aten.avg_pool2d_backward.default,
        lambda: (_some(3, 5, 2, 3), _some(3, 5, 4, 6), [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    (
        aten.avg_pool2d_backward.default,
        lambda: (_some(3, 4, 6), _some(3, 4, 6), [3, 3], [1, 1], [1, 1], False, True, None),
    ),
    (
        aten.max_pool2d_with_indices_backward.default,
        lambda: (_some(2, 4, 6), _some(2, 4, 6), [3, 3], [1, 1], [1, 1], [1, 1], False, _below(24, 2, 4, 6)),
    ),
    (aten._adaptive_avg_pool2d_backward.default, lambda: (_some(3, 5, 2, 3), _some(3, 5, 4, 7))),
    (
        aten.convolution_backward.default,
        lambda: (_some(3, 4, 6), _some(3, 2, 6), _some(4, 2, 3), [4], [1], [1], [1], False, [0], 1, [True, True, True]),
    ),
    (aten.copy.default, lambda: (_some(5, 3), _some(5, 3))),
    (aten.cholesky.default, lambda: (_positive(3, 4),)),
    (aten.cholesky.default, lambda: (_positive(5, 3), True)),
    (partial(aten.linalg_solve_triangular.default, upper=True), lambda: (_positive(3, 4).triu(), _some(3, 4, 5))),
    (aten._linalg_det.default, lambda: (_some(3, 4, 4),)),
    (aten._linalg_slogdet.default, lambda: (_some(3, 4, 4),)),
    (aten.linalg_cholesky_ex.default, lambda: (_positive(3, 4),)),
    (aten.linalg_qr.default, lambda: (_some(3, 5, 4),)),
    (aten.geqrf.default, lambda: (_some(3, 5, 4),)),
    (aten.im2col.default, lambda: (_some(3, 2, 4, 5), [2, 2], [1, 1], [0, 0], [1, 1])),
    (aten.im2col.default, lambda: (_some(2, 3, 6, 7), [3, 2], [2, 1], [1, 0], [1, 2])),
    (aten.convolution.default, lambda: (_some(2, 4, 9), _some(6, 2, 3), _some(6), [2], [1], [2], False, [0], 2)),
    (aten.convolution.default, lambda: (_some(3, 2, 5), _some(4, 2, 3), _some(4), [1], [1], [1], False, [0], 1)),
    (
        aten.convolution.default,
        lambda: (_some(2, 2, 6, 7), _some(3, 2, 3, 2), _some(3), [1, 2], [1, 0], [2, 1], False, [0, 0], 1),
    ),
    (
        aten.convolution.default,
        lambda: (_some(2, 4, 5, 7), _some(4, 1, 3, 5), None, [1, 1], [1, 2], [1, 1], False, [0, 0], 4),
    ),
    (
        aten.convolution.default,
        lambda: (_some(1, 2, 5, 4, 6), _some(2, 2, 3, 1, 2), None, [1], [1], [1], False, [0], 1),
    ),
    (aten.convolution.default, lambda: (_some(2, 4, 4), _some(4, 1, 3), _some(2), [3], [1], [2], True, [2], 2)),
    (
        aten.convolution.default,
        lambda: (_some(2, 2, 4, 5), _some(2, 3, 2, 3), _some(3), [3, 1], [0, 1], [1, 2], True, [1, 0], 1),
    ),
    (aten.avg_pool2d.default, lambda: (_some(2, 5, 7), [3, 2], [2, 1], [1, 0], True, True)),
    (aten.avg_pool2d.default, lambda: (_some(2, 3, 6, 8), [2, 3], [2, 2], [1, 1], True, False)),
    (aten.avg_pool2d.default, lambda: (_some(2, 3, 6, 8), [3, 3], [1, 1], [1, 1], False, False, 5)),
    (aten.avg_pool3d.default, lambda: (_some(2, 5, 4, 6), [2, 3, 2], [1, 2, 2], [1, 1, 0], True, False)),
    (aten.max_pool2d_with_indices.default, lambda: (_some(2, 7, 8), [3, 2], [2, 1], [1, 0], [2, 1], True)),
    (aten.max_pool2d_with_indices.default, lambda: (-_some(2, 3, 8, 6).abs(), [3, 3], [1, 2], [1, 1], [1, 2], True)),
    (aten.max_pool3d_with_indices.default, lambda: (_some(2, 5, 6, 4), 3, [2, 1, 2], 1, [1, 2, 1], True)),
    (aten.upsample_nearest1d.default, lambda: (_some(2, 3, 5), [15])),
    (aten.upsample_nearest2d.default, lambda: (_some(2, 3, 5, 4), [10, 6], 2.0, None)),
    (aten.upsample_nearest2d.default, lambda: (_some(2, 3, 4, 3), [8, 9], 2.1, 3.0)),
    (aten._upsample_nearest_exact2d.default, lambda: (_some(2, 3, 3, 4), [9, 8])),
    (aten._upsample_bicubic2d_aa.default, lambda: (_some(2, 3, 6, 8), [3, 5], False)),
    (aten._upsample_bicubic2d_aa.default, lambda: (_some(2, 3, 3, 4), [7, 6], True)),
    (aten._upsample_lanczos2d_aa.default, lambda: (_some(2, 3, 6, 8), [3, 5], False)),
    (aten.upsample_nearest3d.default, lambda: (_some(1, 2, 2, 3, 4), [4, 9, 4])),
    (aten.constant_pad_nd.default, lambda: (_some(5, 6, 3), [0, 0, 2, -1, -2, 3], 0.5)),
    (aten.pixel_shuffle.default, lambda: (_some(3, 8, 2, 3), 2)),
    (aten.pixel_unshuffle.default, lambda: (_some(3, 2, 4, 6), 2)),
    (aten.ge.Scalar, lambda: (_some(5, 3), 0.5)),
    (aten.searchsorted.Tensor, lambda: (_some(3, 6).sort().values, _some(3, 5))),
    (aten.gather.default, lambda: (_some(5, 3), 0, _below(5, 4, 1))),  # fewer indices than elements beside the dim
    (aten.gather.default, lambda: (_some(5, 6, 3), 1, _below(6, 5, 7, 3))),
    (aten.scatter.src, lambda: (_some(5, 3), 0, _below(5, 4, 1), _some(4, 3))),
    (aten.scatter.value, lambda: (_some(4, 5), 1, _below(5, 4, 3), 0.5)),
    (aten.scatter_add.default, lambda: (_some(5, 3), 0, _below(5, 4, 3), _some(4, 3))),
    (aten.index.Tensor, lambda: (_some(5, 4, 6), [None, _below(4, 3)])),
    (aten.index.Tensor, lambda: (_some(5, 4, 6), [_below(5, 7), None, _below(6, 7)])),
    (aten.repeat.default, lambda: (_some(5, 4), [3, 1, 2])),
    (aten._grouped_mm.default, lambda: (_some(7, 8).float(), _some(3, 8, 12).float(), _ends(2, 2, 7))),
    (aten._grouped_mm.default, lambda: (_some(7, 8).float(), _some(5, 4, 8).float().mT, _ends(0, 1, 4, 4, 7))),
    (aten._grouped_mm.default, lambda: (_some(3, 4, 8).float(), _some(8, 8).float(), _ends(2, 2, 8))),
    (aten._grouped_mm.default, lambda: (_some(4, 8).float(), _some(8, 12).float(), _ends(3, 5, 8))),
    (aten._grouped_mm.default, lambda: (_some(3, 5, 8).float(), _some(3, 8, 4).float())),
    (aten.index.Tensor, lambda: (_some(7, 5), [_below(7, 4) - 7])),
    (aten.index.Tensor, lambda: (_some(7, 5, 6), [_below(7, 3, 1), _below(5, 1, 4)])),
    (aten.index.Tensor, lambda: (_some(7, 5), [torch.tensor(3)])),
    (aten.index_put.default, lambda: (_some(7, 5), [torch.tensor([6, 0, -3])], _some(3, 5))),
    (aten.index_put.default, lambda: (_some(7, 5, 6), [None, torch.tensor([3, 3, 0])], _some(3, 6), True)),
    (aten.index_put.default, lambda: (_some(7, 5), [torch.tensor([5, 0]), torch.tensor([4, 1])], _some(2))),
    (aten.select.int, lambda: (_some(5, 3), 0, 3)),
    (aten.select.int, lambda: (_some(5, 3), -1, -1)),
    (aten.tril.default, lambda: (_some(5, 7), 1)),
    (aten.triu.default, lambda: (_some(3, 6, 5), -1)),
    (aten.scatter_add.default, lambda: (_some(5, 3), 0, _below(5, 4, 1), _some(4, 1))),  # and no broadcast
    (attention, lambda: (_some(3, 6, 5, 4), _some(3, 2, 5, 4), _some(3, 2, 5, 4), 0.0, True)),
    (attention, lambda: (_some(3, 6, 5, 4), _some(3, 2, 7, 4), _some(3, 2, 7, 4))),
    (attention, lambda: (_some(3, 6, 5, 4), _some(3, 1, 5, 4), _some(3, 1, 5, 4), 0.0, True)),
    (partial(attention, attn_mask=_lower(5, 7)), lambda: (_some(3, 4, 5, 4), _some(3, 4, 7, 4), _some(3, 4, 7, 4))),
    (
        ATTEND.default,
        lambda: (
            *(_some(3, 6, 5, 4), _some(3, 2, 7, 4), _some(3, 2, 7, 8)),
            *(_tokens(3, 2, 5)[:, 2:], _tokens(3, 2, 5), _some(6), 0.5, 0),
        ),
    ),
    (
        ATTEND.default,
        lambda: (*(_some(3, 4, 7, 4), _some(3, 4, 7, 4), _some(3, 4, 7, 4)), *(_tokens(3, 4, 3),) * 2, None, 0.5, 2),
    ),
    (
        FLASH.default,
        lambda: (
            *(_some(3, 6, 5, 4).bfloat16(), _some(3, 2, 7, 4).bfloat16(), _some(3, 2, 7, 8).bfloat16()),
            *(*_spans(3, 5, 7, 3), _some(6).float(), 0.5, "bf16"),
        ),
    ),
    (
        FLASH.default,
        lambda: (*(_some(3, 4, 7, 4).bfloat16() for _ in "qkv"), *(*_spans(3, 7, 7, 0), None, 0.5, "bf16")),
    ),
    (aten.linalg__powsum.default, lambda: (_some(5, 3), 3, [0])),
    (aten.linalg__powsum.default, lambda: (_some(5, 3), 2, None, True)),
    (aten.isin.Scalar_Tensor, lambda: (2, torch.tensor([[0, 2, 5], [1, 1, 7], [3, 0, 9]]))),
    (partial(aten.isin.Scalar_Tensor, invert=True), lambda: (2, torch.tensor([0, 2, 5, 1, 7]))),
    (aten.poisson.default, lambda: (_some(5, 3).abs(),)),
    (aten.binomial.default, lambda: (_some(5, 3).abs().ceil(), _some(5, 3).sigmoid())),
    (aten.split.Tensor, lambda: (_some(3, 14), 7, -1)),
    (aten.split.Tensor, lambda: (_some(15, 4), 5)),
    (aten.split.Tensor, lambda: (_some(3, 13), 5, 1)),
    (aten.native_dropout.default, lambda: (_some(5, 3), 0.4, True)),
    (aten.native_dropout.default, lambda: (_some(4), 0.4, False)),
    (aten.rand_like.default, lambda: (_some(5, 3),)),
    (partial(aten.rand_like.generator, generator=None), lambda: (_some(5, 3),)),
    (partial(aten.randn_like.generator, generator=None), lambda: (_some(5, 3),)),
    (aten.random_.to, lambda: (_some(5, 3), 9)),
    (getattr(aten.random_, "from"), lambda: (_some(5, 3), -2, 9)),
    (aten.random_.default, lambda: (_some(5, 3),)),
    (aten._log_softmax_backward_data.default, lambda: (_some(5, 4), _some(5, 4).log_softmax(1), 1, torch.float64)),
    (aten._native_batch_norm_legit.no_stats, lambda: (_some(4, 3, 5), _some(3), _some(3), True, 0.1, 1e-5)),
    (aten.nll_loss2d_forward.default, lambda: (_some(3, 4, 2, 5), _below(4, 3, 2, 5), _some(4).abs(), 0, 1)),
    (aten.nll_loss2d_forward.default, lambda: (_some(3, 4, 2, 5), _below(4, 3, 2, 5), _some(4).abs(), 1, 1)),
    (aten.nll_loss2d_forward.default, lambda: (_some(3, 4, 2, 5), _below(4, 3, 2, 5), None, 2, -100)),
    (aten.nll_loss_backward.default, lambda: (_some(), _some(5, 4), _below(4, 5), None, 1, -100, _number(5))),
    (aten.nll_loss_backward.default, lambda: (_some(), _some(5, 4), _below(4, 5), _some(4), 2, 1, _some())),
    (aten.nll_loss_backward.default, lambda: (_some(5), _some(5, 4), _below(4, 5), _some(4), 0, 1, _some())),
    (
        aten.nll_loss2d_backward.default,
        lambda: (_some(), _some(3, 4, 2, 5), _below(4, 3, 2, 5), None, 1, -100, _number(30)),
    ),
    (
        aten.nll_loss2d_backward.default,
        lambda: (_some(3, 2, 5), _some(3, 4, 2, 5), _below(4, 3, 2, 5), _some(4), 0, 1, _some()),
    ),
    (
        aten.native_layer_norm_backward.default,
        lambda: (_some(5, 6), _some(5, 6), [6], _some(5, 1), _some(5, 1), _some(6), _some(6), [True, True, True]),
    ),
    (
        aten.native_group_norm_backward.default,
        lambda: (_some(3, 6, 5), _some(3, 6, 5), _some(3, 2), _some(3, 2), _some(6), 3, 6, 5, 2, [True, True, True]),
    ),
    (
        aten._embedding_bag.default,
        lambda: (_some(7, 5), _below(7, 6), _ends(0, 2, 2).long(), False, 0, False, _some(6)),
    ),
    (aten._embedding_bag.default, lambda: (_some(7, 5), _below(7, 6), _ends(0, 3).long(), False, 1)),
    (aten._embedding_bag.default, lambda: (_some(7, 5), _below(7, 6), _ends(0, 3).long(), True, 1, False, None, True)),
    (aten._embedding_bag.default, lambda: (_some(7, 5), _below(7, 6), _ends(0, 4).long(), False, 2)),
    (aten.linalg_lstsq.default, lambda: (_some(3, 5, 4), _some(3, 5, 2))),
    (partial(aten.linalg_lstsq.default, driver="gelsd"), lambda: (_some(3, 2, 4), _some(3, 2, 5))),
    (partial(aten.linalg_lstsq.default, driver="gels"), lambda: (_some(3, 4), _some(3, 5))),
    (partial(aten.linalg_lstsq.default, driver="gels"), lambda: (_some(5, 3), _some(5, 4))),
    (aten.norm.Scalar, lambda: (_some(5, 3), 3)),
    (noted.mark, lambda: (_some(5, 3), "a b")),
    (noted.relayout, lambda: (_some(5, 3), "a b")),
)  # fmt: skip
"""Operators and what they are called with."""


def run(recorder: AbstractContextManager[Any]) -> None:
    """Run each of them under a recorder."""
    torch.manual_seed(0)  # the same values each time
    for operator, arguments in EXTRA:
        given = arguments()
        with recorder:
            operator(*given)
