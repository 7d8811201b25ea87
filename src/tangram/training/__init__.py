"""Training: a plan made real on torch.distributed, from the file a person writes to a model that others can load."""
