"""The capability matrix: every strategy under every model, each cell compared with one process."""
