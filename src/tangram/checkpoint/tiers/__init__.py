"""Checkpoints in several places: host memory, a disk; the newest that is whole, wherever it lies."""
