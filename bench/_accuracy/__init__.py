"""Parts of the bench of operators' accuracy."""
