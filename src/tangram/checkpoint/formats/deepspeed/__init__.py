"""DeepSpeed's ZeRO checkpoints."""
