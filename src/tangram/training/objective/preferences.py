"""What is learnt from a preference: one formula for each loss, of how likely both answers are.

    c, r     log-probability of the chosen and of the rejected answer under the policy, summed over their tokens, each
             less the same under the reference where the loss has one
    mean     the same over the number of tokens
    delta    c - r

    sigmoid       -log sigma(beta delta), with label smoothing    DPO; Rafailov et al. 2023, eq. 7; Mitchell 2023
    hinge         max(0, 1 - beta delta)                          SLiC; Zhao et al. 2023; Liu et al. 2024 (RSO)
    ipo           (delta of means - 1 / (2 beta))^2               IPO; Azar et al. 2024, eq. 17
    robust        sigmoid, unbiased where pairs are flipped       rDPO; Chowdhury et al. 2024
    sigmoid_norm  -log sigma(beta delta of means)
    apo_zero      1 - sigma(beta c) + sigma(beta r)               APO; D'Oosterlinck et al. 2024, eq. 7
    apo_down      sigma(beta c) + 1 - sigma(beta delta)           the same, eq. 8
    kto           as apo_zero, of an answer by itself: c or r   KTO; Ethayarajh et al. 2024, eq. 7-8
                  less the KL divergence of the batch
    simpo         -log sigma(beta delta of means - gamma)         SimPO; Meng et al. 2024, eq. 6; no reference
    orpo          -beta log sigma(log odds c - log odds r) of     ORPO; Hong et al. 2024, eq. 6-7; no reference; with
                  means, and the cross-entropy of the chosen      the prompt in the cross-entropy, as TRL has it

Rewards, by which a run is watched, are beta times c and r (times their means where the loss takes no sums).
"""

# ruff: noqa: N803, N806, N815  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tangram.schema.tuning import LossType, PreferencePlan

FIGURES = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
)  # fmt: skip
"""Means over pairs, by the names that TRL logs them under."""
LABELLED_FIGURES = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl",
)  # fmt: skip
"""The same of good answers, of bad ones, and of all."""
_HALF = -0.6931471805599453  # log(1/2)


class Scores(NamedTuple):
    """Of some pairs (P each): the sums over the tokens of answers, and how many these are, at least one."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def delta(self) -> Tensor:
        """By how much the chosen answers are ahead."""
        return self.chosen - self.rejected

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Over the tokens of an answer."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens

    @property
    def delta_of_means(self) -> Tensor:
        chosen, rejected = self.means
        return chosen - rejected


@dataclass(frozen=True)
class Formula:
    """A row of the table."""

    loss: Callable[[Scores, PreferencePlan], Tensor]
    """Of each pair (P)."""
    by_means: bool = False
    """Whether rewards are of means."""
    cross_entropy: bool = False
    """Whether that of the chosen conversations, prompts included, is added: the mean over their tokens."""


def _sigmoid(ahead: Tensor, plan: PreferencePlan) -> Tensor:
    smoothing = plan.label_smoothing
    loss = -logsigmoid(ahead)
    return loss * (1 - smoothing) - logsigmoid(-ahead) * smoothing if smoothing else loss


def _robust(s: Scores, plan: PreferencePlan) -> Tensor:
    ahead, smoothing = plan.beta * s.delta, plan.label_smoothing
    return (smoothing * logsigmoid(-ahead) - (1 - smoothing) * logsigmoid(ahead)) / (1 - 2 * smoothing)


def _orpo(s: Scores, plan: PreferencePlan) -> Tensor:
    chosen, rejected = s.means
    return -plan.beta * logsigmoid((chosen - rejected) - (_log_rest(chosen) - _log_rest(rejected)))


def _log_rest(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0, without loss of digits at either end."""
    near = x > _HALF
    small, large = x.where(near, _HALF), x.where(~near, _HALF)  # else the other branch's gradient is no number
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


FORMULAS: Mapping[LossType, Formula] = MappingProxyType(
    {
        "sigmoid": Formula(lambda s, plan: _sigmoid(plan.beta * s.delta, plan)),
        "hinge": Formula(lambda s, plan: torch.relu(1 - plan.beta * s.delta)),
        "ipo": Formula(lambda s, plan: (s.delta_of_means - 1 / (2 * plan.beta)) ** 2),
        "robust": Formula(_robust),
        "sigmoid_norm": Formula(lambda s, plan: -logsigmoid(plan.beta * s.delta_of_means)),
        "apo_zero": Formula(
            lambda s, plan: torch.sigmoid(-plan.beta * s.chosen) + torch.sigmoid(plan.beta * s.rejected)
        ),
        "apo_down": Formula(lambda s, plan: torch.sigmoid(plan.beta * s.chosen) + torch.sigmoid(-plan.beta * s.delta)),
        "kto": Formula(
            lambda s, plan: (
                plan.desirable_weight * torch.sigmoid(-plan.beta * s.chosen)
                + plan.undesirable_weight * torch.sigmoid(plan.beta * s.rejected)
            )
        ),
        "simpo": Formula(
            lambda s, plan: _sigmoid(plan.beta * s.delta_of_means - plan.simpo_gamma, plan), by_means=True
        ),
        "orpo": Formula(_orpo, by_means=True, cross_entropy=True),
    }
)


@torch.no_grad()
def figures_of(scores: Scores, logps_P2: tuple[Tensor, Tensor], counts_P: Tensor, plan: PreferencePlan) -> Tensor:
    """What `FIGURES` names, summed over the pairs that count (float64)."""
    chosen, rejected = scores.means if FORMULAS[plan.loss_type].by_means else (scores.chosen, scores.rejected)
    rewards = plan.beta * chosen, plan.beta * rejected
    each = (*rewards, rewards[0] > rewards[1], rewards[0] - rewards[1], *logps_P2)
    return torch.stack([one.double().where(counts_P, 0.0).sum() for one in each])


class Labelled(NamedTuple):
    """What answers with a label are compared with, for each row (B, float64)."""

    reference_B: Tensor
    """How likely the answer is under the reference."""
    kl_B: Tensor
    """By how much others' answers are likelier under the policy: of the global batch, at least 0."""
    of_good_B: Tensor
    """How many samples the global batch has for each good one; of what there is none, 0."""
    of_bad_B: Tensor


def labelled_scores(logps_B: Tensor, with_: Labelled, bad_B: Tensor, counts_B: Tensor) -> Scores:
    """Of each row one side; the other, and both of an empty row, are so far off that they cost nothing."""
    ahead_B, none_B = logps_B - with_.reference_B - with_.kl_B, torch.ones_like(bad_B, dtype=torch.int64)
    chosen_B, rejected_B = (counts_B & ~bad_B, torch.inf), (counts_B & bad_B, -torch.inf)
    return Scores(ahead_B.where(*chosen_B), ahead_B.where(*rejected_B), none_B, none_B)


@torch.no_grad()
def labelled_figures(logps_B: Tensor, with_: Labelled, bad_B: Tensor, counts_B: Tensor, beta: float) -> Tensor:
    """What `LABELLED_FIGURES` names, so that its mean over samples is the mean over those that it is of (float64)."""
    rewards_B = beta * (logps_B - with_.reference_B)
    good_B, bad_B = with_.of_good_B.where(counts_B & ~bad_B, 0.0), with_.of_bad_B.where(counts_B & bad_B, 0.0)
    each = (
        rewards_B * good_B, rewards_B * bad_B, rewards_B * (good_B - bad_B), logps_B * good_B, logps_B * bad_B,
        with_.kl_B.where(counts_B, 0.0),
    )  # fmt: skip
    return torch.stack([one.double().sum() for one in each])
