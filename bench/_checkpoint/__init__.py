"""The parts of `bench/checkpoint.py`."""
