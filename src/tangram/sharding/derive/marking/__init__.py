"""Marks: which tensors lie how, by name, in code, or as published with a model."""
