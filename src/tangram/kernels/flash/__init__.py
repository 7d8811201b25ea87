"""Attention in low precision, forward and backward, as Triton kernels: each is a recipe of the laboratory.

    modes      the recipes that a plan may name
    spans      who sees whom, and which tiles of a mask are visited
    operator   `tangram::flash`: one operator with a gradient, over two back ends
    emulated   a back end of torch's operators, for where no device is
    launch     the other: operands (`quantise`), tiles, and the kernels of `kernels.compiled` started

Whether a kernel is right is the laboratory's to say (`criterion` in bench/_numerics): its results are compared with
those of the same recipe in exact arithmetic. Trade-offs: the backward repeats bit by bit, for which it computes two
products more than one that adds atomically; tiles of heads whose width is no power of two are filled up with zeros.
"""
