"""A run from its start to its end: launch, ranks, signals, folder, report."""
