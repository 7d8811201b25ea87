"""From a name, directory or configuration to a module without memory, and its tensors to their names."""
