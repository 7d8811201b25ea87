"""Tangram trains large models on PyTorch and keeps their state free of the layout it happens to have today.

Each room of this package is a library of its own: import the one you need (`tangram.layout`, `tangram.relayout`, ...).
This file imports none of them, so that a user of one room never pays for another.
"""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
