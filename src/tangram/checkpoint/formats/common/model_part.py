"""Which tensors of a training program's checkpoint are the model's: found by structure, under whatever keys they lie.

    app.model.layers.0.w, app.optim.state.layers.0.w.exp_avg     the model is what `app.model.` is before
    layers.0.w, state.layers.0.w.exp_avg, train_state.step       the model has no key of its own
    model.layers.0.w, epoch                                      `model.`, since beside it lies what is no model's

The optimiser's states tell most: the names that they have are the model's. Without any, keys that programs give to a
model are followed as long as what lies beside them is known to be none of a model. All else is left out, and listed.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import Naming, named, renamed
from tangram.errors import UserError
from tangram.relayout import TensorSpec

MODELS = frozenset(
    {"model", "module", "state_dict", "model_state", "model_state_dict", "network", "student", "actor", "policy"}
)
"""Keys under which programs keep a model."""
OTHERS = re.compile(r"(^|_)(ema|swa|shadow|averaged?|teacher|ref|reference|target|grads?|gradients|best|old|init)(_|$)")
"""What programs call what has the names of a model and is none that an optimiser trains: averages above all."""
HOLDERS = frozenset({"app", "state", "state_dict", "checkpoint", "ckpt", "trainer", "train_state"})
"""Keys under which they keep the model and what belongs to its training."""
NEVER = ("optim", "lr_sched", "dataloader", "train_state", "rng_state", "grad_scaler", "loss_scaler", "param_groups")
"""How keys begin that no model has."""
STARTS = (*NEVER, "opt_state", "scheduler", "rng", "random_state", "scaler", "ema_state", "sampler", "progress")
"""The same beside a key that is a model's."""
DEEPEST = 5
WRAPPED = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile, FSDP and activation checkpointing put into names; no module has it of its own."""


def model_part(source: OpenCheckpoint, naming: Naming, objects: Collection[str] = ()) -> OpenCheckpoint:
    """A checkpoint of its model and of the states of it that an optimiser keeps, by the names of the model.

    `objects`: entries that are no tensors, whose names say what lies beside what. What is left out is in `beside`.
    States without weights, as a folder of an optimiser's own has them, are all there is.
    """
    source = renamed(source, unwrapped(source.specs))
    states = {name: found for name in source.specs if (found := naming.read(name))}
    params = {name: spec for name, spec in source.specs.items() if name not in states}
    if states and all("param_groups." in name for name in params):
        return named(only(source, states), naming)
    found = _by_states(params, {param for param, _ in states.values()})
    likely = most_likely(found)
    prefix = likely[0] if len(likely) == 1 else _by_keys(params, [*objects, *states])
    twins = tuple(lead for lead in found if lead.startswith(prefix) and lead != prefix) if likely == [prefix] else ()
    own = {name for name in params if name.startswith(prefix) and not name.startswith(twins)}
    own = {name for name in own if not (prefix == "" and is_beside(name))} or {*params}
    plain = {name.removeprefix(prefix) for name in own}
    own |= {name for name, (param, _) in states.items() if param in plain}
    return named(only(source, own), naming, prefix)


def part_under(source: OpenCheckpoint, key: str) -> OpenCheckpoint:
    """The tensors under a key alone, as under `model_ema`, by their names after it. Raises UserError where none is."""
    every, lead = source.uncut or source, f"{key.strip('.')}."
    names = {name: name.removeprefix(lead) for name in every.specs if name.startswith(lead)}
    if not names and every is source and every.format == "torch":
        raise UserError(
            f'"{source.path}" has tensors beside its model that are not read: save {key} by itself with torch.save'
        )
    if not names:
        there = list(dict.fromkeys(name.partition(".")[0] for name in every.specs if "." in name))
        more = f", and {len(there) - 8} more" if len(there) > 8 else ""
        raise UserError(f'"{source.path}" has no tensor under {lead} but under {", ".join(there[:8])}{more}')
    return replace(renamed(only(every, names), names), states={})


def only(source: OpenCheckpoint, names: Collection[str]) -> OpenCheckpoint:
    """The same with some tensors alone; the names of the others in `beside`."""
    if len(names) == len(source.specs):
        return source
    return replace(
        source,
        specs={name: spec for name, spec in source.specs.items() if name in names},
        pieces=tuple(piece for piece in source.pieces if piece.tensor in names),
        beside=(*source.beside, *(name for name in source.specs if name not in names)),
        uncut=source.uncut or source,
    )


def is_beside(name: str) -> bool:
    """Whether a name is of what a training program keeps beside its model."""
    first = name.partition(".")[0]
    return first.startswith(NEVER) and name != first  # a tensor of the module may be called so itself


def leads(names: Collection[str]) -> list[str]:
    """What may stand before the names of a part, the shortest first: "", `app.`, `app.model.` and so on."""
    found: dict[str, None] = {"": None}
    for name in names:
        parts = name.split(".")[:-1][:DEEPEST]
        found.update(dict.fromkeys(f"{'.'.join(parts[: i + 1])}." for i in range(len(parts))))
    return sorted(found, key=lambda lead: lead.count("."))


def _by_states(params: Mapping[str, TensorSpec], trained: Collection[str]) -> list[str]:
    """All that stands before the names that states have, in those of the parameters."""
    first = next((one for one in trained if not one.isdigit()), None)
    if first is None:
        return []
    found = [name.removesuffix(first) for name in params if name == first or name.endswith(f".{first}")]
    return [lead for lead in found if all(f"{lead}{one}" in params for one in trained)]


def most_likely(found: Collection[str]) -> list[str]:
    """Of what stands before tensors of the same names, that which programs call a model, else that of no average."""

    def rank(lead: str) -> int:
        keys = lead.split(".")
        return 2 if any(map(OTHERS.search, keys)) else 1 - bool(MODELS.intersection(keys))

    best = min(map(rank, found), default=0)
    return sorted(lead for lead in found if rank(lead) == best)


def _by_keys(params: Mapping[str, TensorSpec], objects: Collection[str]) -> str:
    """Keys are followed where one of them is a model's, or holds one, and the others are of no model."""
    lead = ""
    for _ in range(DEEPEST):
        inside = [name.removeprefix(lead) for name in params if name.startswith(lead)]
        firsts = Counter(name.partition(".")[0] for name in inside)
        there = {name.removeprefix(lead) for name in objects if name.startswith(lead)}
        deep = {name.partition(".")[0] for name in inside if "." in name}
        keys = [key for key in firsts if key in deep and key in MODELS | HOLDERS and not _is_counter(key, lead, params)]
        others = {key for key in firsts if key not in keys}
        lone = all(key.startswith(STARTS) or (key not in deep and _is_scalar(params[lead + key])) for key in others)
        if len(keys) != 1 or not lone:
            return lead
        (key,) = keys
        known = {name.partition(".")[0] for name in there} - {key}
        is_known = bool(others) or any(one.startswith(STARTS) for one in known)
        twice = any(name.startswith(f"{key}.{key}.") for name in inside)
        if not (is_known or twice or key in HOLDERS or key == "module"):
            return lead
        lead += f"{key}."
    return lead


def _is_counter(key: str, lead: str, params: Mapping[str, TensorSpec]) -> bool:
    """Whether under a key there are numbers alone, as torchtitan's `train_state.step`."""
    return all(_is_scalar(spec) for name, spec in params.items() if name.startswith(f"{lead}{key}."))


def _is_scalar(spec: TensorSpec) -> bool:
    return spec.shape in ((), (1,))


def unwrapped(names: Iterable[str], leads: tuple[str, str] = ("", "")) -> dict[str, str]:
    """Names without what wrappers of single modules have put into them; `leads`: what goes before and after that.

    Raises UserError where two become one.
    """
    found: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name in names:
        plain = name.removeprefix(leads[0])
        for part in WRAPPED:
            plain = plain.replace(part, "")
        found[name] = plain = plain.removeprefix(leads[1])
        if owners.setdefault(plain, name) != name:
            raise UserError(f"{owners[plain]} and {name} are both {plain} without their wrappers")
    return found
