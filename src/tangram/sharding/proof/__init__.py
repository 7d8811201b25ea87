"""Proof of op rules by numbers: cut real inputs, run the operator on each part, put together, compare."""
