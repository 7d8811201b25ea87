"""A training loop of your own, with your own module and loss: Tangram cuts it, deals out the text, saves and resumes.

torchrun --nproc-per-node 2 examples/own_loop.py runs/own      (start it again: it goes on where it was)
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tangram.checkpoint import newest
from tangram.planner import Plan, read_plan
from tangram.training import (
    Checkpointer,
    JobState,
    Progress,
    apply_plan,
    drawing,
    load_state,
    make_adamw,
    make_world,
)
from tangram.training.data import BYTES, Stream, open_corpus, prepare


class Model(nn.Module):
    """Any module will do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES.vocabulary, 48)
        self.memory = nn.GRU(48, 96, batch_first=True)
        self.head = nn.Linear(96, BYTES.vocabulary)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.head(self.memory(self.embed(tokens_BS))[0])


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    plan = read_plan(Path(__file__).with_suffix(".toml"))
    assert isinstance(plan, Plan)
    assert group is not None
    world = make_world(plan, dist.get_rank(), torch.device("cpu"), group)

    torch.manual_seed(plan.seed)  # the same values on every rank; a large model is made on meta instead
    parallel = apply_plan(Model(), plan, world)
    model = parallel.module
    optimiser = make_adamw(model, plan.optimiser)
    state = JobState(model, optimiser)
    checkpoints = Checkpointer(folder, plan, world)
    if last := newest(folder):
        state.progress = load_state(last, state, plan, world)
    prepare(plan.data, BYTES, print)
    stream = Stream(open_corpus(plan.data, BYTES), plan.data, index=world.data_index, size=world.data_size)
    stream.position = state.progress.samples

    for step in range(state.progress.step, plan.run.steps):
        batches = next(stream)
        optimiser.zero_grad()
        total = torch.zeros(())
        with drawing(parallel.draw_sources, plan.seed, batches) as draws:  # dropout as of one process
            for micro, batch in enumerate(batches.micro):
                draws.begin(micro)
                logits_BSV = model(batch.inputs_BS)
                loss = F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten(), reduction="sum")
                (loss / batches.counted).backward()  # all ranks over one number: the tokens of the global batch
                total += loss.detach() / batches.counted
        optimiser.step()
        state.progress = Progress(step + 1, stream.position)
        dist.all_reduce(total)
        if (step + 1) % 20 == 0:
            checkpoints.save(state)  # goes on while the next steps are trained
            if world.index == 0:
                print(f"step {step + 1}: loss {total:.4f}")
    checkpoints.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
