"""What `tangram bench faults` measures with."""
