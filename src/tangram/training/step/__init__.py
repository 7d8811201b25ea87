"""One step: forward, backward, update."""
