"""Writing a checkpoint: the snapshot, the files of each rank, in the background."""
