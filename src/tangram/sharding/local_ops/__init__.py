"""What a rank computes of an operator whose part is no plain call: random numbers, windows, grouped matmuls."""
