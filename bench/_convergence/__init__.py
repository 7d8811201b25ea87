"""What `bench/convergence.py` stands on."""
