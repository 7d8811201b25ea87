"""Checkpoints: how the state of a job lies on disk, in Tangram's own format and in those of others."""
