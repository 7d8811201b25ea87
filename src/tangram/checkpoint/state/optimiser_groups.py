"""Groups of parameters of an optimiser as a checkpoint stores them: their settings, and the names of their members."""

from collections.abc import Mapping
from typing import Any, cast

from tangram.errors import UserError


def merged_groups(first: Any, other: Any) -> Any:
    """What two ranks have under one name: the first's, but of groups of parameters (stages of a pipeline) all members.

    Groups are the same that have the same settings, the first with the first where several do.
    """
    if first == other or not (_are_groups(first) and _are_groups(other)):
        return first
    found: list[dict[str, Any]] = [dict(group) for group in first]
    free = list(range(len(found)))
    for group in other:
        same = next((i for i in free if settings_of(found[i]) == settings_of(group)), None)
        if same is None:
            found.append(dict(group))
        else:
            free.remove(same)
            found[same]["params"] = list(dict.fromkeys([*found[same]["params"], *group["params"]]))
    return found


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of parameters without its members."""
    return {key: value for key, value in group.items() if key != "params"}


def matched_groups(section: str, own: list[dict[str, Any]], stored: Any) -> list[dict[str, Any]]:
    """The stored group of each own one: that of the same parameters.

    A stage of a pipeline may have only some of the groups. One whose names are all unknown is found by its place, if
    there are as many groups on both sides.
    """
    groups = cast("list[dict[str, Any]]", stored) if _are_groups(stored) else []
    where = {name: i for i, group in enumerate(groups) for name in group["params"]}
    found: list[int] = []
    for at, group in enumerate(own):
        inside = {where[name] for name in group["params"] if name in where}
        if len(inside) > 1:
            name = next(n for n in group["params"] if n in where and where[n] != min(inside))
            raise UserError(f"{section} has {name} in another group of parameters here than in the checkpoint")
        if not inside and len(groups) != len(own):
            raise UserError(
                f"{section} has {len(own)} groups of parameters here and {len(groups)} in the checkpoint: "
                "make them alike"
            )
        found.append(inside.pop() if inside else at)
    if len(set(found)) != len(found):
        raise UserError(f"{section} has its parameters in other groups here than in the checkpoint: make them alike")
    return [groups[i] for i in found]


def _are_groups(stored: Any) -> bool:
    return isinstance(stored, list) and all(
        isinstance(group, dict) and isinstance(cast("dict[str, Any]", group).get("params"), list)
        for group in cast("list[Any]", stored)
    )
