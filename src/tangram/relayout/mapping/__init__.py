"""A mapping between the tensors of two structures, bound to their names and shapes as cells that are bijections."""
