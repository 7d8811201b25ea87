"""The search for the best strategy of a cluster, and the questions that can be asked of it."""
