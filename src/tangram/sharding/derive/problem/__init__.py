"""The problem that a derivation solves: the folded graph, the states of tensors, rates."""
