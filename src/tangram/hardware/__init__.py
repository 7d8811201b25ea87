"""Devices and what they can do: the machine at hand, helper processes, and honest measurement on it.

The modules are imported one by one (`tangram.hardware.measure`, ...): only `machine` and `workers` need torch.
"""
