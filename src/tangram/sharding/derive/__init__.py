"""Derivation: from a few marks the layout of every tensor of a captured model, and what has to move."""
