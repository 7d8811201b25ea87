"""A derivation as one page for a browser."""
