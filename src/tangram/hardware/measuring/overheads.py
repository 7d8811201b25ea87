"""What torch's own layers cost before anything is computed, as multiples of one bare operator's overhead.

The overhead of an operator (`Rates.call_seconds`) is measured on every machine; what the interpreter does around it is
so many times that, on any machine. Those of modules, FSDP2's units and the optimiser are what `bench/overheads.py`
finds with models so small that nothing else takes time, on torch 2.13 and one core of an AMD EPYC 9004.
"""

MODULE_CALLS = 1.6
"""An operator inside a Hugging Face model: modules, hooks and arguments around it."""

FSDP_UNIT_CALLS = 220.0
"""One module that FSDP2 gathers: its hooks and copies, forward and backward of a micro-batch."""

COPY_BUCKET_BYTES = 25 * 2**20
"""Gradients of whole copies that are summed over ranks together, as many as in torch's DistributedDataParallel."""

TENSOR_MODULE_CALLS = 350.0
"""One module that computes on DTensors at its borders, forward and backward of a micro-batch.

Fitted to steps of the quickstart on two ranks of a machine that others used too; no bench isolates it yet.
"""

OPTIMISER_PARAMETER_CALLS = 35.0
"""One parameter in AdamW's step, as a DTensor."""

STEP_PARAMETER_CALLS = 15.0
"""One parameter in the rest of a step: its gradient set to zero, its norm, the clipping. Found once, as TENSOR's."""

OPTIMISER_PASSES = 12
"""How often AdamW and clipping go through memory, each time reading two and writing one number of a parameter."""

PROCESS_BYTES = 360e6
"""What a rank holds before there is a model: the highest resident memory of a process on Linux that has imported torch,
`tangram.training.step.loop` and a model of transformers, and has built that on meta."""
