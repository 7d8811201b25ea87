"""Parts of the bench of attention's numerics."""
