"""Names that a package offers and imports when they are first used, so that nobody pays for what they do not use.

    __all__ = ["save"]
    if TYPE_CHECKING:
        from tangram.checkpoint.saving.save import save      # for type checkers and readers
    else:
        __getattr__, __dir__ = lazily(__name__, {"tangram.checkpoint.saving.save": ["save"]})

A test holds the two together (tests/house/test_front_door.py).
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping


def lazily(
    package: str, places: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package (PEP 562).

    `places`: what is offered, by the module that has it; "load as read_plan" is offered under another name.
    """
    modules: dict[str, tuple[str, str]] = {}
    for module, names in places.items():
        for text in names:
            own, _, public = text.partition(" as ")
            modules[public or own] = module, own

    def look_up(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own = modules[name]
        value: object = getattr(importlib.import_module(module), own)
        vars(sys.modules[package])[name] = value  # the next time, Python looks here and does not call
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return look_up, listed
