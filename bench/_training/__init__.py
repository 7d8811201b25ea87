"""The parts of `tangram bench training`."""
