"""Tensors brought from one layout to another by collectives with gradients: even cuts, uneven ones, rings, windows."""
