"""Operators that a trainer's models are made of, each in one pass over its tensors, forward and backward.

    norm              RMSNorm, with what is added to the residuals first
    gated             act(gate) * up: SwiGLU, GELU
    rotary            positions of queries and keys
    projected_loss    the last projection and the loss of its classes, without logits
    quantisers        block FP8 and packed NVFP4, turned by Hadamard where asked for

Each is an operator of torch (`tangram::NAME`) with a gradient and a shape without values, over two back ends: Triton
kernels (`kernels.compiled`) on a device, torch's operators elsewhere. Both compute in float32 whatever is stored and
round once; nothing is added atomically, so a run repeats bit by bit. Trade-off: what is saved for a backward is what
an operator was given and a number a row, so a backward computes some of the forward again.
"""
