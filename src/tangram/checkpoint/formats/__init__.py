"""One module per foreign checkpoint format: its index as pieces, and a reader of one piece."""
