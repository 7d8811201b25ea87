"""Copy plans: who has which pieces, what is copied from where to where, and the copying within one process."""
