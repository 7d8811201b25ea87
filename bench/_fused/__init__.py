"""Parts of the bench of fused operators."""
