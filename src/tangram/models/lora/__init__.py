"""Low-rank adapters (LoRA) on frozen weights, and the codes of few bits that these may be kept as."""
