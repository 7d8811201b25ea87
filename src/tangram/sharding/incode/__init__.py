"""Layouts said in a model's own code: `mark`, `relayout`, `layout_of`; each operator derived as it runs."""
