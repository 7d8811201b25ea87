"""Looking at checkpoints: what is in one, whether it is sound, what two do not have in common."""
