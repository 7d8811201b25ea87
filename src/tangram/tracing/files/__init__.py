"""The files of a trace: their bytes, and who writes them."""
