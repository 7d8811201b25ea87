"""Fused operators that torch has not, or not so: the loss of tokens without logits in float32.

They know nothing of ranks: what goes over all parts of a tensor is given to them.
"""
