"""The state of a run: the model built, weights loaded, checkpoints, exports."""
