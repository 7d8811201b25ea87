"""From the cuts of inputs to those of results, one operator after the other, over any number of mesh axes."""
