"""Memory policies, one after the other, of one model."""
