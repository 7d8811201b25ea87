"""Run a derivation: the model's own code on plain local tensors, with what moves at the borders of its modules."""
