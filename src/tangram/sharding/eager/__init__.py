"""Layouts said in a model's own code: `mark`, `relayout`, `layout_of`; a session derives each operator as it runs."""

from tangram.sharding.eager.api import layout_of, mark, relayout

__all__ = ["layout_of", "mark", "relayout"]
