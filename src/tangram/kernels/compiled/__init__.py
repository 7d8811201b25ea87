"""What Triton compiles, and nothing else: kernels, and the functions they share (`device`).

Triton's language looks like Python and has no types, so the type check leaves these files out (pyproject.toml). What
they compute is checked on the CPU by Triton's interpreter, and that they compile for a device by its compiler, which
needs no device.
"""
