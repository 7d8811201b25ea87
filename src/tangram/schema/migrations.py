"""Plan files of older versions, brought up to the version of today before they are checked.

One step a version, as a table, so that a file of any age walks all steps from its own. A step works on the bare tables
of the file and leaves alone what it does not understand: the check that follows says what is wrong with it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from tangram.errors import UserError
from tangram.schema.job import VERSION

Tables = dict[str, Any]


def migrate(tables: Tables) -> Tables:
    """The tables of a plan file as those of version `VERSION`. Raises UserError for a version that is not known yet."""
    version = tables.get("version")
    if isinstance(version, bool) or not isinstance(version, int):
        return tables
    if version > VERSION:
        raise UserError(
            f"version = {version}: this Tangram reads plans of version {VERSION} and older; update Tangram, or write "
            "the plan anew"
        )
    while version in STEPS:
        tables = STEPS[version](tables)
        version = tables["version"]
    return tables


def one_to_two(tables: Tables) -> Tables:
    """Version 1 had the one mesh axis dp, one source of text, and layouts of parameters only."""
    new = {**tables, "version": 2}
    if isinstance(layouts := new.get("layouts"), dict):
        new["layouts"] = {"parameters": cast(Tables, layouts)}
    if "mesh" in new:
        new["axes"] = {"data": ["dp"]}
    if isinstance(found := new.get("data"), dict):
        data = dict(cast(Tables, found))
        if "root" in data:
            data["sources"] = [{"path": data.pop("root"), "pattern": data.pop("pattern", "**/*.py")}]
        new["data"] = data
    return new


def two_to_three(tables: Tables) -> Tables:
    """Version 2 could say how activations lie around modules; that follows from how their parameters lie."""
    new = {**tables, "version": 3}
    if isinstance(layouts := new.get("layouts"), dict):
        new["layouts"] = {key: rules for key, rules in cast(Tables, layouts).items() if key != "activations"}
    return new


STEPS: Mapping[int, Callable[[Tables], Tables]] = MappingProxyType({1: one_to_two, 2: two_to_three})
