"""Names typed for `tangram plan`, looked up before anything heavy is loaded: a misspelt one answers at once."""

from __future__ import annotations

from pathlib import Path

from tangram.models.outlines.catalogue import in_catalogue, no_model, presets_named


def check(model: str, cluster: str, runs_it: str | None, loss: str | None) -> None:
    """Raise UserError for a model, cluster, framework or loss of which there is none."""
    elsewhere = Path(model).exists() or Path(model).suffix == ".toml" or model in presets_named()
    if not elsewhere and in_catalogue(model) is None:
        raise no_model(model)
    from tangram.hardware.catalogue import cluster as clusters  # loads numpy
    from tangram.planner.space.framework_profiles import framework
    from tangram.planner.space.losses import loss_of

    for part in [cluster] if Path(cluster).exists() else filter(None, (one.strip() for one in cluster.split(","))):
        clusters.load(part)
    if runs_it:
        framework(runs_it)
    if loss:
        loss_of(loss)
