"""Training: a plan made real on torch.distributed, from the file a person writes to a model that others can load.

    parallelize     a model of one's own, for a loop of one's own, as marks say
    apply_plan      a model as a plan's file says: FSDP, DDP, tensor and sequence parallelism
    run_ranks       processes of this machine that run a function as ranks

Text and its order are in `tangram.training.data`. Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from tangram.lazy import lazily

__all__ = [
    "Checkpointer",
    "DerivedModel",
    "EagerModel",
    "JobState",
    "Progress",
    "Rank",
    "RankError",
    "World",
    "apply_plan",
    "eager",
    "load_state",
    "make_adamw",
    "make_world",
    "parallelize",
    "run_ranks",
]

if TYPE_CHECKING:
    from tangram.training.apply import apply as apply_plan
    from tangram.training.checkpoints import Checkpointer
    from tangram.training.checkpoints import load as load_state
    from tangram.training.derived import DerivedModel
    from tangram.training.incode import EagerModel, eager
    from tangram.training.launch import Rank, RankError, run_ranks
    from tangram.training.optimise import make_adamw
    from tangram.training.parallelized import parallelize
    from tangram.training.state import JobState, Progress
    from tangram.training.world import World, make_world
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.training.apply": ["apply as apply_plan"],
            "tangram.training.checkpoints": ["Checkpointer", "load as load_state"],
            "tangram.training.derived": ["DerivedModel"],
            "tangram.training.incode": ["EagerModel", "eager"],
            "tangram.training.launch": ["Rank", "RankError", "run_ranks"],
            "tangram.training.optimise": ["make_adamw"],
            "tangram.training.parallelized": ["parallelize"],
            "tangram.training.state": ["JobState", "Progress"],
            "tangram.training.world": ["World", "make_world"],
        },
    )
