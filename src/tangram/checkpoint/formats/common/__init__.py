"""What the modules of formats share: opened checkpoints, writers' tasks, names of optimiser states, side files."""
