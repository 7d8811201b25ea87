"""Numerics of low-precision attention, value-exact on the CPU: casts, scales, and recipes as data.

    formats      E4M3, E5M2, E2M1, E8M0, INT8 and wider: casts, by nearest-even or stochastic rounding
    quant        scales of tensors, heads, blocks, rows and groups (MX, NVFP4), smoothing, Hadamard
    recipes      a recipe of attention as data

`kernels.flash` computes by them. What judges a kernel by its recipe, the laws that inputs are drawn from and the
exact reference, which no run needs, are in `bench/_numerics` of a checkout.
"""
