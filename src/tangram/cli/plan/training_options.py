"""What is typed of ways to train that may be used or not, unlike experts and checkpoints, as part of what is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tangram.errors import UserError
from tangram.models.lora.outline import ALL, adapted
from tangram.models.outlines.images import with_images
from tangram.models.outlines.outline import Outline
from tangram.planner.search.strategy import Ask
from tangram.planner.space.losses import loss_of
from tangram.planner.space.optimisers_and_offload import (
    FULL,
    away_share_of,
    base_of,
    kept_base,
    offloads_of,
    optimisers_of,
)
from tangram.planner.space.setting import documents_of, packed


@dataclass(frozen=True)
class TrainingOptions:
    """Ways to train in less memory that may be taken, and what may not be used, how experts are used and how often is
    saved; as typed."""

    optimiser: str = ""
    """"": as the job has it, or adamw."""
    lora: int = 0
    base: str = ""
    """"": as the model's configuration says, beside adapters."""
    offload: str = ""
    imbalance: float = 0.0
    """Of experts' loads the standard deviation over the mean."""
    checkpoint_every: int = 0
    without: str = ""
    """Names of `planner.legality.exclusions`, with commas between."""
    loss: str = ""
    """Of `planner.space.losses`; "": the framework's."""
    documents: str = ""
    """Mean length and 99th percentile of what samples are packed of."""
    image_tokens: int = 0
    """Of a sample; 0: one image of the usual size."""
    train_embeddings: bool = False
    memory_share: float = 1.0
    """Of what a device has, where no GB are typed."""
    lora_targets: str = ""
    """Linear layers that have adapters, by the ends of their names, with commas between; "": all."""

    def outline(self, outline: Outline) -> Outline:
        """A model with its adapters. Raises UserError."""
        if self.train_embeddings and not self.lora:
            raise UserError("--train-embeddings is beside adapters: give --lora, their rank, or leave it out")
        targets = tuple(one.strip() for one in self.lora_targets.split(",") if one.strip())
        if targets and not self.lora:
            raise UserError("--lora-targets names layers that have adapters: give --lora, their rank, or leave it out")
        return replace(adapted(outline, self.lora, targets or ALL), trained_ends=self.train_embeddings)

    def samples(self, outline: Outline, sequence: int) -> Outline:
        """With what its samples are of, as typed. Raises UserError."""
        return packed(with_images(outline, self.image_tokens, sequence), documents_of(self.documents, sequence))

    def of(self, asked: Ask, outline: Outline, usual: str = "adamw") -> Ask:
        """With what is asked of a model. `usual`: the kind of optimiser where none is typed. Raises UserError."""
        base = base_of(self.base) if self.base else kept_base(outline)
        if base is not FULL and not outline.adapted:
            raise UserError(f"--base {self.base} is of frozen weights: give --lora, the rank of what is trained")
        if not 0 <= self.imbalance <= 10:
            raise UserError(
                "--imbalance is a number from 0 to 10: of experts' loads the standard deviation over the mean"
            )
        if self.checkpoint_every < 0:
            raise UserError("--checkpoint-every is a number of steps from 0, which is never")
        return replace(
            asked, optimisers=optimisers_of(self.optimiser or usual), offloads=offloads_of(self.offload), base=base,
            away_share=away_share_of(self.offload), loss=loss_of(self.loss) if self.loss else asked.loss,
            unlike=self.imbalance, save_every=self.checkpoint_every,
            documents=documents_of(self.documents, asked.sequence), memory_share=self.memory_share,
            without=tuple(one.strip() for one in self.without.split(",") if one.strip()),
        )  # fmt: skip
