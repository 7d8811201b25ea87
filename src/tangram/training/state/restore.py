"""Load the state of a job from a checkpoint, into any layout on any number of ranks.

The plan gives the regions that a rank holds; `tangram.checkpoint` proves that the checkpoint has them and reads each
block of it once. Everything that can be known beforehand is checked before the first byte of the model changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from tangram.checkpoint.loading.read import DamagedError, Want, read_wants
from tangram.checkpoint.store.commits import MANIFEST, older, read_manifest
from tangram.checkpoint.store.manifest import Manifest
from tangram.errors import UserError
from tangram.relayout import TensorSpec
from tangram.schema.plan import Plan
from tangram.training.mesh.world import World
from tangram.training.objective.step_guard import Judged
from tangram.training.state.state import JobState, Progress, TensorPlaces, entries, frozen


def load(path: str | Path, state: JobState, plan: Plan, world: World | None) -> Progress:
    """Fill a job's state from a checkpoint of any layout and any number of ranks; how far it was.

    `plan` and `world` are of the job that goes on; without a world everything is whole in this process. Collective over
    the world: the ranks of a node read each byte that they need once. Raises UserError for a checkpoint that is not
    whole, is damaged, or is of another model.
    """
    path = Path(path)
    manifest = read_manifest(path)
    progress = _progress(path, manifest)
    targets = entries(state, TensorPlaces(plan, world))
    specs = {entry.name: entry.spec for entry in targets}
    stored = {name: tensor.spec for name, tensor in manifest.tensors.items() if _is_here(name, plan, world)}
    if state.optimiser is None:
        stored = {name: spec for name, spec in stored.items() if name in specs}
    else:
        here = {name for name, _ in state.model.named_parameters()}
        _refuse_other_frozen(path, tuple(name for name in _frozen(manifest) if name in here), frozen(state))
    _refuse_other_model(path, stored, specs)
    wants = [Want(entry.name, entry.region, entry.local) for entry in targets if entry.region]
    try:
        read_wants(path, manifest, wants, peers=world.peers if world is not None else None)
    except DamagedError as damaged:
        raise DamagedError(f"{damaged}{older(path)}") from None
    state.progress = progress
    state.metrics.update(_table(manifest, "metrics"))
    state.experts = partial(dict, _table(manifest, "experts"))
    return progress


def _is_here(name: str, plan: Plan, world: World | None) -> bool:
    """Whether a tensor of a state is of this rank's stages; what is of none is another model's, which is told."""
    if world is None or plan.pipeline is None:
        return True
    kind, _, rest = name.partition(".")
    return kind not in ("model", "optim") or world.stage in plan.places_of(rest)


@dataclass(frozen=True)
class Description:
    """What a checkpoint says of itself, without its tensors."""

    progress: Progress
    about: Mapping[str, Any]


def describe(path: Path) -> Description:
    """What the checkpoint in the folder `path` is of. Raises UserError for one that is not whole."""
    manifest = read_manifest(path)
    about = manifest.objects.get("about")
    if not isinstance(about, dict):
        raise UserError(f'the checkpoint "{path}" is of no `tangram train`: its {MANIFEST} does not say of what run')
    return Description(_progress(path, manifest), cast("dict[str, Any]", about))


def _progress(path: Path, manifest: Manifest) -> Progress:
    found: Any = manifest.objects.get("progress")
    try:
        counted = int(found["step"]), int(found["samples"]), int(found["tokens"])
        guarded = float(found.get("scale", 0)), int(found.get("good", 0)), int(found.get("skipped", 0))
        judged: Any = found.get("judged", {})
        losses = tuple(map(float, judged.get("losses", ())))
        before = Judged(int(judged.get("astray", 0)), int(judged.get("high", 0)), losses)
        return Progress(*counted, float(found["seconds"]), *guarded, before, int(found.get("measured", found["step"])))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f'the checkpoint "{path}" is of no `tangram train`: its {MANIFEST} does not say how far it was ({error!r})'
        ) from None


def _table(manifest: Manifest, name: str) -> dict[str, Any]:
    found = manifest.objects.get(name)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _frozen(manifest: Manifest) -> tuple[str, ...]:
    """The parameters without optimiser states, and the buffers; nothing where no tensor has such states."""
    trained = {name.removeprefix("optim.").rpartition(".")[0] for name in manifest.tensors if name.startswith("optim.")}
    if not trained:
        return ()
    names = (name.removeprefix("model.") for name in manifest.tensors if name.startswith("model."))
    return tuple(name for name in names if name not in trained)


def _refuse_other_frozen(path: Path, before: tuple[str, ...], now: tuple[str, ...]) -> None:
    then = set(before)
    newly, freed = sorted(set(now) - then), sorted(then - set(now))
    if newly or freed:
        what, name = ("trained", newly[0]) if newly else ("frozen", freed[0])
        raise UserError(
            f'the checkpoint "{path}" was written with {name} {what} ({len(newly) + len(freed)} parameter(s) differ): '
            "resume with the same model.freeze"
        )


def _refuse_other_model(path: Path, found: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]) -> None:
    differences = [f"it lacks {name}" for name in target if name not in found]
    differences += [f"it has {name}" for name in found if name not in target]
    for name in (name for name in target if name in found):
        a, b = found[name], target[name]
        if a != b:
            differences.append(f"its {name} is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}")
    others = [name for name in sorted(found.keys() ^ target.keys()) if name.startswith("optim.")]
    if differences and len(others) == len(differences):
        raise UserError(
            f'the checkpoint "{path}" has the states of another optimiser, as {others[0]}: resume with the one that it '
            "was trained with"
        )
    if differences:
        more = f" ({len(differences)} differences in all)" if len(differences) > 1 else ""
        raise UserError(f'the checkpoint "{path}" is of another model than the plan\'s: {differences[0]}{more}')
