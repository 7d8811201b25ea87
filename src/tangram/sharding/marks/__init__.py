"""Marks for tensor and sequence parallelism over the axis `tp`, a file for each type of model: three lines at most."""
