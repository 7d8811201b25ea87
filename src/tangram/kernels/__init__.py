"""Fused operators that torch has not, or not so: the loss of tokens, attention of some keys, or in low precision.

    attention, cross_entropy    in torch's operators
    flash                       attention by recipes of low precision, by kernels
    fused                       norms and the rest of a model's operators, each in one pass
    compiled                    their kernels
    lab                         recipes of low precision, emulated value by value

They know nothing of ranks: what goes over all parts of a tensor is given to them.
"""
