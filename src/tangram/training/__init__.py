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
    "drawing",
    "eager",
    "load_state",
    "make_adamw",
    "make_optimiser",
    "make_world",
    "parallelize",
    "run_ranks",
]

if TYPE_CHECKING:
    from tangram.training.mesh.drawing import drawing
    from tangram.training.mesh.eager_marks import EagerModel, eager
    from tangram.training.mesh.tensor_parallel import DerivedModel
    from tangram.training.mesh.world import World, make_world
    from tangram.training.parallel.apply import apply as apply_plan
    from tangram.training.parallel.parallelized import parallelize
    from tangram.training.run.launch import Rank, RankError, run_ranks
    from tangram.training.state.checkpointer import Checkpointer
    from tangram.training.state.checkpointer import load as load_state
    from tangram.training.state.state import JobState, Progress
    from tangram.training.step.optimiser_step import make_adamw, make_optimiser
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.training.parallel.apply": ["apply as apply_plan"],
            "tangram.training.state.checkpointer": ["Checkpointer", "load as load_state"],
            "tangram.training.mesh.tensor_parallel": ["DerivedModel"],
            "tangram.training.mesh.drawing": ["drawing"],
            "tangram.training.mesh.eager_marks": ["EagerModel", "eager"],
            "tangram.training.run.launch": ["Rank", "RankError", "run_ranks"],
            "tangram.training.step.optimiser_step": ["make_adamw", "make_optimiser"],
            "tangram.training.parallel.parallelized": ["parallelize"],
            "tangram.training.state.state": ["JobState", "Progress"],
            "tangram.training.mesh.world": ["World", "make_world"],
        },
    )
