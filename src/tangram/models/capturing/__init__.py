"""Capture: a model's operators as a graph, with the modules and the user's own lines they are of."""
