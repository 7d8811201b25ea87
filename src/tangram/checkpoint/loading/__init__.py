"""Loading: a checkpoint of any layout into a state of any other."""
