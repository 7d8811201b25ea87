"""Parts of the bench of attention's numerics; `mutants` has wrong kernels, `rivals` the rules of others."""
