"""Benches: every number in the documentation comes from a script here; `tangram bench` lists and runs them."""
