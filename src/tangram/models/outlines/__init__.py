"""What a model is to the planner: per block what is multiplied, streamed, kept and communicated."""
