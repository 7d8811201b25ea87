"""Torch's database of operators with cut inputs, by our rules and by DTensor: what `sharding_rules` prints sums of."""
