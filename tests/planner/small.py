"""A small job and a small plan as files, for the tests of the planner."""

JOB = """\
version = 3
seed = 1

[model]
preset = "qwen3-1m"

[data]
sequence = 16
global_batch = 8
micro_batch = 2

[[data.sources]]
path = "stdlib"

[[data.sources]]
path = "text"          # a folder
weight = 2.0

[optimiser]
lr = 2e-3
warmup_steps = 20

[run]
steps = 300
"""

PLAN = (
    JOB.replace("seed = 1", 'seed = 1\nmesh = "dp=2 tp=2"')
    + """
[axes]
data = ["dp"]
tensor = ["tp"]

[layouts.parameters]
"*.q_proj.weight" = "(heads/tp head_dim)/dp h"
"*" = "_/dp ..."

[layouts.sizes]
head_dim = 32
"""
)
