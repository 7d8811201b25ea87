"""The directory of a run's checkpoints: commits, manifests, digests, retention."""
