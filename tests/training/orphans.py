"""A program whose ranks wait for ever; the test kills it and looks for what is left."""

from tangram.training.run.launch import run_ranks
from tests.training.launch_tasks import wait_for_ever

if __name__ == "__main__":
    run_ranks(wait_for_ever, None, world=2, on_event=lambda event: print(event, flush=True), device="cpu")
