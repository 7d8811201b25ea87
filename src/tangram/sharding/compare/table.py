"""The cases: one row for each thing that DTensor is, or was, wrong about."""

from torch.distributed.tensor import Replicate, Shard

from tangram.sharding.compare import bodies
from tangram.sharding.compare.bodies import CompareCase

_KEPT_WHOLE = -1
"""The dim that a body's settings name for an input that is not cut."""


def _scan(operator: str) -> CompareCase:
    return CompareCase(
        name=f"{operator}-last-dim",
        wrong="Where the scanned dim is cut and named as -1, each rank scans its own part from the start.",
        operator=f"torch.{operator}(x, dim=-1)",
        inputs=(Shard(1),),
        body=bodies.scan,
        settings={"operator": operator},
    )


def _convolution(spatial: int, what: str, cut_x: int, cut_weight: int, wrong: str) -> CompareCase:
    return CompareCase(
        name=f"conv{spatial}d-{what}",
        wrong=wrong,
        operator=f"F.conv{spatial}d(x, weight, padding=1)",
        inputs=tuple(Replicate() if cut == _KEPT_WHOLE else Shard(cut) for cut in (cut_x, cut_weight)),
        body=bodies.convolution,
        settings={"operator": f"conv{spatial}d", "cut_x": cut_x, "cut_weight": cut_weight},
    )


def _gradient(operator: str) -> CompareCase:
    return CompareCase(
        name=f"{operator.replace('_', '-')}-gradient",
        wrong="The gradient of the mean is divided by a rank's own number of elements, not by all: too large by the"
        " number of ranks.",
        operator=f"F.{operator}(x, target)",
        inputs=(Shard(0), Shard(0)),
        body=bodies.loss_gradient,
        settings={"operator": operator, "rows": 4},
        direction="backward",
    )


def _uneven(operator: str) -> CompareCase:
    return CompareCase(
        name=f"{operator.replace('_', '-')}-uneven",
        wrong="Five rows on two ranks: the mean of the ranks' means, where three rows should weigh more than two.",
        operator=f"F.{operator}(x, target)",
        inputs=(Shard(0), Shard(0)),
        body=bodies.loss,
        settings={"operator": operator, "rows": 5},
    )


def _empty(operator: str) -> CompareCase:
    return CompareCase(
        name=f"{operator}-empty-shard",
        wrong="One row on two ranks: the rank without a row raises, and the other waits for it for ever.",
        operator=f"x.{operator}()",
        inputs=(Shard(0),),
        body=bodies.extreme_of_an_empty_shard,
        settings={"operator": operator},
        expected="hangs",
        limit=20,
    )


_CHANNELS = "Both are cut over the channels: a rank's own channels are taken for the whole sum, and no two ranks agree."
_OUTPUTS = "The weight is cut over the outputs: a rank's own outputs are taken for all of them."
_SPACE = "The input is cut over space: a rank's own stretch is taken for the whole."

CASES: tuple[CompareCase, ...] = (
    *map(_scan, ("cumsum", "cumprod", "logcumsumexp")),
    _convolution(1, "channels", 1, 1, _CHANNELS),
    _convolution(2, "channels", 1, 1, _CHANNELS),
    _convolution(1, "outputs", _KEPT_WHOLE, 0, _OUTPUTS),
    _convolution(2, "outputs", _KEPT_WHOLE, 0, _OUTPUTS),
    _convolution(1, "space", 2, _KEPT_WHOLE, _SPACE),
    _convolution(2, "space", 2, _KEPT_WHOLE, _SPACE),
    CompareCase(
        name="conv1d-depthwise",
        wrong="Everything is cut over the channels, which do not mix: the local convolution is told all groups.",
        operator="F.conv1d(x, weight, padding=1, groups=4)",
        inputs=(Shard(1), Shard(0)),
        body=bodies.depthwise_convolution,
        expected="raises",
        issue="pytorch/pytorch#186129",
    ),
    CompareCase(
        name="conv2d-patches-gradient",
        wrong="The convolution is right, but the gradient of an input cut over space is said to be cut over the batch.",
        operator="F.conv2d(x, weight, stride=4)",
        inputs=(Shard(3), Replicate()),
        body=bodies.patches_gradient,
        direction="backward",
        issue="pytorch/pytorch#191926",
    ),
    *map(_gradient, ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")),
    *map(_uneven, ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")),
    *map(_uneven, ("binary_cross_entropy_with_logits", "soft_margin_loss")),
    CompareCase(
        name="fill-pending-sum",
        wrong="Each rank fills its part of a pending sum with the whole value: too large by the number of ranks.",
        operator="x.sum(0).fill_(1.0)",
        inputs=(Shard(0),),
        body=bodies.fill_a_pending_sum,
    ),
    CompareCase(
        name="cosine-embedding-cut-features",
        wrong="It adds a constant to a sum that is pending, once on each rank.",
        operator="F.cosine_embedding_loss(x, y, target)",
        inputs=(Shard(1), Shard(1), Replicate()),
        body=bodies.cosine_embedding,
    ),
    *(
        CompareCase(
            name=f"threshold-pending-{extreme[1:]}",
            wrong="The threshold is applied to each rank's own value, though the replacement may be the larger.",
            operator=f"F.threshold(x.{extreme}(0), 2.5, 10.0)",
            inputs=(Shard(0),),
            body=bodies.threshold_of_an_extreme,
            settings={"extreme": extreme},
        )
        for extreme in ("amax", "amin")
    ),
    CompareCase(
        name="any-as-a-number",
        wrong="any() over a cut dim is left as a pending sum of truths; as a number it counts the ranks that say true.",
        operator="x.any(0).float()",
        inputs=(Shard(0),),
        body=bodies.any_as_a_number,
    ),
    CompareCase(
        name="logsumexp-keepdim",
        wrong="With keepdim, the cut dim is counted as if the reduced one were gone: the result has a wrong shape.",
        operator="torch.logsumexp(x, 0, keepdim=True)",
        inputs=(Shard(1),),
        body=bodies.logsumexp_keepdim,
    ),
    CompareCase(
        name="masked-logsumexp-keepdim",
        wrong="With keepdim, the result has a wrong shape, as that of torch.logsumexp.",
        operator="torch.masked.logsumexp(x, 0, keepdim=True, mask=mask)",
        inputs=(Shard(1), Shard(1)),
        body=bodies.masked_logsumexp,
    ),
    CompareCase(
        name="select-last-dim-gradient",
        wrong="The gradient of x.select(-1, i) moves the cut to the next dim, where it meets a gradient cut otherwise.",
        operator="x.select(-1, 0)",
        inputs=(Shard(0),),
        body=bodies.select_gradient,
        settings={"rows": 4},
        direction="backward",
        expected="raises",
    ),
    CompareCase(
        name="pinv-tolerance",
        wrong="A tensor given by keyword is not redistributed: every rank uses its own part of it for everything.",
        operator="torch.linalg.pinv(x, rtol=rtol)",
        inputs=(Replicate(), Shard(0)),
        body=bodies.tolerance_of_pinv,
    ),
    CompareCase(
        name="adamw-overflow",
        wrong="found_inf is not reduced: the rank that saw the overflow skips the step, the others take it.",
        operator="torch.optim.AdamW([weight], fused=True).step()",
        inputs=(Shard(0),) * 3,
        body=bodies.overflow_in_adamw,
    ),
    CompareCase(
        name="view-in-place",
        wrong="A view across the cut is a copy: what is written to it in place is lost.",
        operator="x[0].mul_(2.0)",
        inputs=(Shard(0),),
        body=bodies.write_into_a_view,
    ),
    CompareCase(
        name="squeeze-in-place",
        wrong="Where no placement changes, the shape stays what it was, and the local tensor has another.",
        operator="x.squeeze_(0).shape",
        inputs=(Replicate(),),
        body=bodies.squeeze_in_place,
    ),
    CompareCase(
        name="register-sharding-dims",
        wrong="A rule of register_sharding that reads a list of dims is asked once and reused for other dims.",
        operator="a custom operator (x, int[] dims)",
        inputs=(Shard(0),),
        body=bodies.rule_with_a_list_of_dims,
    ),
    CompareCase(
        name="number-of-a-norm",
        wrong="What item() or float() gives of a pending norm, mean or maximum is a rank's own: no two ranks agree.",
        operator="x.norm().item()",
        inputs=(Shard(0),),
        body=bodies.number_of_a_norm,
    ),
    CompareCase(
        name="set-data",
        wrong="Setting .data, of a parameter or of a gradient, changes the wrapper: the parts stay what they were.",
        operator="x.data = x.data * 2",
        inputs=(Shard(0),),
        body=bodies.set_data,
    ),
    CompareCase(
        name="local-map-uneven",
        wrong="The shape of what local_map makes is a rank's own size times the ranks: five rows become six or four.",
        operator="local_map(f, [Shard(0)], ([Shard(0)],))(x).shape",
        inputs=(Shard(0),),
        body=bodies.mapped_locally,
        issue="pytorch/pytorch#172812",
    ),
    *map(_empty, ("max", "argmax")),
    # Reported upstream, and not seen any more with the torch above.
    CompareCase(
        name="view-other-factors",
        wrong="A view whose shape shares no factor with the cut gives wrong numbers.",
        operator="x.view(16, 6)",
        inputs=(Shard(1),),
        body=bodies.view,
        expected="right",
        issue="pytorch/pytorch#179502",
    ),
    CompareCase(
        name="linear-cut-sequence",
        wrong="A linear layer of a sequence that is cut fails in a view.",
        operator="F.linear(x, weight)",
        inputs=(Shard(1), Replicate()),
        body=bodies.linear_of_a_cut_sequence,
        expected="right",
        issue="pytorch/pytorch#172102",
    ),
    CompareCase(
        name="mean-uneven",
        wrong="The mean of the ranks' means, where three rows should weigh more than two.",
        operator="x.mean()",
        inputs=(Shard(0),),
        body=bodies.mean,
        expected="right",
        issue="pytorch/pytorch#162692",
    ),
    CompareCase(
        name="masked-fill",
        wrong="masked_fill_ has no rule.",
        operator="x.masked_fill_(mask, 1.0)",
        inputs=(Shard(0), Shard(0)),
        body=bodies.masked_fill,
        expected="right",
        issue="pytorch/pytorch#152249",
    ),
    CompareCase(
        name="select-cut-dim",
        wrong="select of the dim that is cut has no rule.",
        operator="x.select(0, 1)",
        inputs=(Shard(0),),
        body=bodies.select_the_cut_dim,
        expected="right",
        issue="pytorch/pytorch#147724",
    ),
)
