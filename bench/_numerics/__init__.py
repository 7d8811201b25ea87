"""Numerics of low-precision attention: what recipes (`tangram.kernels.lab`) cost, and bugs told from that.

cases        inputs with their mask; `inputs`: laws that they are drawn from
attention    forward and backward by a recipe, in explicit formulas, in float64: exact, and slow
metrics      how far a result is off, tensor by tensor
criterion    the rule that tells wrong kernels
mutants      wrong kernels that it is tried on; `rivals` has the rules of others
"""
