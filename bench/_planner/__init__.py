"""The parts of `tangram bench planner`."""
