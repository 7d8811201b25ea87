"""Devices and clusters by their names or files, and the curves of what work takes on them."""
