"""Numerics of low-precision attention, value-exact on the CPU: what recipes cost, and bugs told from that.

    formats      E4M3, E5M2, E2M1, E8M0, INT8 and wider: casts, by nearest-even or stochastic rounding
    quant        scales of tensors, heads, blocks, rows and groups (MX, NVFP4), smoothing, Hadamard
    recipes      a recipe of attention as data
    cases        inputs with their mask; `inputs`: laws that they are drawn from
    attention    forward and backward by a recipe, in explicit formulas
    metrics      how far a result is off, tensor by tensor
    criterion    the rule that tells wrong kernels; it is tried on some in `bench/_numerics`

Trade-off: everything is computed in float64 and rounded where a kernel would round, which is exact and slow; the
order of a kernel's additions is modelled (`accumulate`), not copied.
"""
