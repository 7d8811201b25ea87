"""Names typed for `tangram plan`, looked up before anything heavy is loaded: a misspelt one answers at once."""

from __future__ import annotations

from pathlib import Path

from tangram.cli.plan.options import Common
from tangram.models.outlines.catalogue import in_catalogue, no_model, presets_named


def check(common: Common) -> None:
    """Raise UserError for a model, cluster, framework, loss, task or way to train in less memory that is none."""
    if Path(common.model).suffix == ".toml":
        from tangram.schema.files import changes_of, load

        load(Path(common.model), changes_of(common.change or []))
    for model in filter(None, (common.model, common.teacher)):
        elsewhere = Path(model).exists() or Path(model).suffix == ".toml" or model in presets_named()
        if not elsewhere and in_catalogue(model) is None:
            raise no_model(model)
    from tangram.hardware.catalogue import cluster as clusters
    from tangram.planner.space.framework_profiles import framework, loss_of

    cluster = common.cluster
    for part in [cluster] if Path(cluster).exists() else filter(None, (one.strip() for one in cluster.split(","))):
        clusters.load(part)
    for name, known in ((common.framework, framework), (common.loss, loss_of)):
        if name:
            known(name)
    from tangram.planner.legality.exclusions import left_out  # loads numpy
    from tangram.planner.space import optimisers_and_offload as ways
    from tangram.planner.space.setting import precisions_of
    from tangram.planner.space.tasks import task_of

    rest = (
        (common.optimiser, ways.optimisers_of), (common.offload, ways.offloads_of), (common.base, ways.base_of),
        (common.precision, precisions_of), (common.without, left_out), (common.task, task_of),
    )  # fmt: skip
    for name, read in rest:
        if name:
            read(name)
