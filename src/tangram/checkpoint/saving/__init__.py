"""Saving: every rank writes its share of a state, and one commit makes a checkpoint of them."""
