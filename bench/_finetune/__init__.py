"""What `bench.finetune` measures, one group to a module."""
