"""Op rules: how an operator's tensors may be cut, and what becomes of the result."""
