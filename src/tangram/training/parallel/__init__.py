"""DDP, FSDP, pipelines, recompute and precision, applied to a model."""
