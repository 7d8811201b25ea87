"""Strategies drawn at random, and models for them: what tests of exports and imports share."""

from hypothesis import strategies as st

from tangram.hardware.catalogue.cluster import Cluster, builtin
from tangram.models.outlines.outline import Dims, Group, Outline, decoder
from tangram.planner.exports.numbers import Numbers
from tangram.planner.exports.targets import EXPORTS
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.layers_per_stage import fewer, sizes
from tangram.planner.space.recompute import ALL_BLOCKS, NOTHING, SETS, SOME, again_name
from tangram.planner.space.schedule_formulas import SCHEDULES

CLUSTER: Cluster = builtin("h100-8x8")
DENSE = decoder(Dims(12, 1024, 16, 32000, ffn=4096, kv_heads=4), "dense")
MIXED = decoder(Dims(8, 512, 8, 32000, ffn=2048, experts=16, per_token=2, expert_ffn=512), "mixed")
PARTS = st.sampled_from([1, 2, 4, 8])


@st.composite
def drawn(draw: st.DrawFn, name: str) -> tuple[Outline, Numbers]:
    """A model and a strategy whose numbers go together, mostly of a project's abilities; not all can be written."""
    outline = draw(st.sampled_from([DENSE, MIXED]))
    able, rarely = EXPORTS[name].able(outline), draw(st.integers(0, 9)) == 7
    pipeline, tensor, context, data, micro, micros = (draw(PARTS) for _ in range(6))
    pipeline, tensor = min(pipeline, able.pipeline or 8), min(tensor, able.tensor or 4)
    context = min(context, able.context or 4)
    ulysses = draw(st.sampled_from([n for n in (1, 2, 4) if context % n == 0])) if rarely or able.ulysses != 1 else 1
    few = framework(EXPORTS[name].framework).schedules
    row = draw(st.sampled_from([one for one in SCHEDULES if rarely or one.name in few]))
    virtual = (row.chunks or draw(st.integers(2, 4))) if pipeline > 1 else 1
    together = data * context
    ahead, behind = (draw(st.sampled_from([0, 0, 0, 1, 2])) if pipeline > 1 else 0 for _ in range(2))
    if (blocks := sizes(outline.layers, pipeline * virtual, ahead, behind)) and min(blocks) > 0:
        ahead, behind = fewer(blocks) or (0, 0)
    names = (NOTHING, SOME, ALL_BLOCKS, *SETS) if rarely else able.again
    again = draw(st.sampled_from(names))
    if again == SOME:
        each = max(sizes(outline.layers, pipeline * virtual, ahead, behind), default=1)
        shares = able.shares or [count / each for count in range(1, each)] or [0.5]
        again = again_name(int(Group.BLOCK), draw(st.sampled_from(shares)))
    expert = min(draw(st.sampled_from([1, 2, 4])), able.expert or 4) if outline is MIXED else 1
    return outline, Numbers(
        pipeline=pipeline,
        virtual=virtual,
        schedule=row.name if pipeline > 1 else "",
        tensor=tensor,
        sequence_parallel=tensor > 1 and not rarely,
        context=context,
        ulysses=ulysses,
        expert=expert,
        expert_tensor=draw(st.sampled_from([1, tensor])) if outline is MIXED else tensor,
        data=data,
        zero=draw(st.sampled_from((0, 1, 2, 3) if rarely else able.staged if pipeline > 1 else able.zero))
        if together > 1
        else 0,
        shard=draw(st.sampled_from([n for n in (together, together, together // 2, context) if n > 1] or [1])),
        micro=micro,
        batch=data * micro * micros,
        sequence=draw(st.sampled_from([2048, 8192])),
        again=again,
        precision=draw(st.sampled_from(["fp16", "fp4", "fp8"] if rarely else ["bf16", "bf16", "fp32"])),
        ahead=ahead,
        behind=behind,
        inner=pipeline > 1 and (rarely or able.inner) and draw(st.booleans()),
    )
