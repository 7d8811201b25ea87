"""The strategies of the matrix: one line each, from which the planner makes a plan for any model.

A line names the axes of a mesh with their sizes, what stands outermost first:

    pp      stages of a pipeline, by the schedule behind the colon
    dp      copies of the parameters                    fsdp    parts of the parameters; dp and fsdp together are HSDP
    cp      the sequence, keys and values gathered      heads   the sequence, inside of attention the heads (all-to-all)
    ring    the sequence in a balanced order, keys and values go round
    ep      a mixture's experts, and the sequence between them
    tp      weights of attention and MLPs               sp      the same, and the sequence between them
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tangram.planner.local.derived_layouts import ModelAxis
from tangram.planner.local.strategies import PIPELINE, Strategy
from tangram.schema.schedules import MAKERS

MODEL_AXES: Mapping[str, ModelAxis] = {
    "cp": ModelAxis("cp", "context", "gathered"),
    "ring": ModelAxis("cp", "context", "ring"),
    "heads": ModelAxis("heads", "context", "heads"),
    "ep": ModelAxis("ep", "expert", "sequence"),
    "tp": ModelAxis("tp", "tensor", "weights"),
    "sp": ModelAxis("tp", "tensor"),
}
"""By the word of a line; the sequence over a tensor axis is a way of tensor parallelism, so its axis is tp."""

LINES = """
dp=2
dp=8
fsdp=2
fsdp=8
dp=2 fsdp=2
dp=2 fsdp=4
tp=2
tp=4
sp=2
sp=4
cp=2
cp=4
heads=2
heads=4
ring=2
ring=4
ep=2
ep=4
pp=2:1F1B
pp=4:1F1B
pp=2:GPipe
pp=2:Interleaved1F1B
pp=2:LoopedBFS
pp=2:InterleavedZeroBubble
pp=2:ZBVZeroBubble
pp=2:DualPipeV

dp=2 tp=2
dp=2 sp=2
dp=2 cp=2
dp=2 heads=2
dp=2 ep=2
dp=2 ring=2
fsdp=2 tp=2
fsdp=2 sp=2
fsdp=2 cp=2
fsdp=2 heads=2
fsdp=2 ep=2
fsdp=2 ring=2
ring=2 tp=2
ring=2 sp=2
ring=2 ep=2
pp=2:1F1B ring=2
fsdp=4 ep=2
fsdp=2 sp=4
cp=2 tp=2
cp=2 sp=2
heads=2 tp=2
heads=2 sp=2
cp=2 ep=2
heads=2 ep=2
ep=2 tp=2
ep=2 sp=2
pp=2:1F1B dp=2
pp=2:1F1B fsdp=2
pp=2:GPipe fsdp=2
pp=2:Interleaved1F1B fsdp=2
pp=2:LoopedBFS fsdp=2
pp=2:InterleavedZeroBubble fsdp=2
pp=2:ZBVZeroBubble fsdp=2
pp=2:DualPipeV fsdp=2
pp=4:1F1B fsdp=2
pp=2:1F1B tp=2
pp=2:1F1B sp=2
pp=2:1F1B cp=2
pp=2:1F1B heads=2
pp=2:1F1B ep=2
pp=2:ZBVZeroBubble sp=2

dp=2 fsdp=2 sp=2
dp=2 fsdp=2 cp=2
dp=2 fsdp=2 ep=2
fsdp=2 cp=2 sp=2
fsdp=2 heads=2 sp=2
fsdp=2 cp=2 ep=2
fsdp=2 ep=2 sp=2
pp=2:1F1B dp=2 fsdp=2
pp=2:1F1B fsdp=2 tp=2
pp=2:1F1B fsdp=2 sp=2
pp=2:1F1B fsdp=2 cp=2
pp=2:1F1B fsdp=2 ep=2
pp=2:ZBVZeroBubble fsdp=2 sp=2
pp=2:1F1B cp=2 sp=2
fsdp=2 ring=2 sp=2
pp=2:1F1B fsdp=2 ring=2
pp=2:1F1B ep=2 sp=2
"""


def strategy(line: str) -> Strategy:
    """The strategy that a line says."""
    schedule, stages = PIPELINE, 1
    mesh: list[str] = []
    data: list[str] = []
    model: list[ModelAxis] = []
    for word in line.split():
        axis, _, said = word.partition("=")
        size, _, named = said.partition(":")
        if axis == "pp":
            schedule = named
            stages = int(size) * (MAKERS[named].own or 2)
        elif axis in MODEL_AXES:
            model.append(MODEL_AXES[axis])
            axis = MODEL_AXES[axis].name
        else:
            data.append(axis)
        mesh.append(f"{axis}={size}")
    shard = "fsdp" if "fsdp" in data else None
    return Strategy(line, " ".join(mesh), tuple(data), tuple(model), shard, stages, schedule)


STRATEGIES: Mapping[str, Strategy] = {line: strategy(line) for line in LINES.splitlines() if line}


def combined(line: str) -> int:
    """How many strategies a line puts together: HSDP is one, a tensor axis with its sequence two."""
    words = [word.partition("=")[0] for word in line.split()]
    return len(words) + words.count("sp") - ({"dp", "fsdp"} <= {*words})


def ranks_of(line: str) -> int:
    """How many ranks it takes."""
    return prod(int(word.partition("=")[2].partition(":")[0]) for word in line.split())
