"""Models: from a configuration to a module, on no device and with weights that any number of ranks agree on."""
