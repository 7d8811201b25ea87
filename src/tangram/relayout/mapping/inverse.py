"""The way back: a mapping written once, read from right to left."""

from __future__ import annotations

from collections.abc import Mapping

from tangram.layout.notation import Mapping as MappingText
from tangram.layout.syntax import Option, Side, Statement
from tangram.relayout.mapping.bind import BoundMapping, bind
from tangram.relayout.mapping.codecs import CODECS, FILL, ROUNDED, Codec
from tangram.relayout.mapping.errors import NotInvertibleError, RelayoutError


def inverse(mapping: str | MappingText, *, lossy: bool = False, codecs: Mapping[str, Codec] = CODECS) -> MappingText:
    """The mapping read backwards.

    Raises NotInvertibleError, naming the statement, where the way there loses what the way back would need: a cast to
    fewer bits, a codec without inverse, a dropped tensor or part without `fill=` to say what it was. `lossy=True`
    permits the first and the last (dropped elements come back as the fill, 0 by default); `add` and `mul` are undone up
    to rounding.

    >>> print(inverse("gate: f h, up: f h -> w1: ((gate + up) f) h"))
    w1: ((gate + up) f) h -> gate: f h, up: f h
    """
    text = MappingText.parse(mapping) if isinstance(mapping, str) else mapping
    return MappingText(tuple(_backwards(s, lossy, codecs) for s in text.statements))


def invert(bound: BoundMapping, *, lossy: bool = False) -> BoundMapping:
    """The bound way back: from the target's tensors to the source's. Raises as `inverse` does."""
    text = inverse(bound.mapping, lossy=lossy, codecs=bound.codecs)
    return bind(text, bound.target.specs, bound.source.specs, codecs=bound.codecs, sizes=bound.known)


def _backwards(statement: Statement, lossy: bool, codecs: Mapping[str, Codec]) -> Statement:
    fill = [o for o in statement.options if o[0] == FILL]
    loses = not statement.target or _has_void(statement.source)
    if loses and not fill and not lossy:
        raise NotInvertibleError(
            f"{statement}: what is dropped has no way back; say what it was with fill=..., or allow lossy"
        )
    creates = not statement.source or _has_void(statement.target)
    options = [_undone(o, statement, lossy, codecs) for o in reversed(statement.options) if o[0] != FILL]
    if fill or creates:
        options += fill or [(FILL, 0.0)]
    return Statement(statement.target, statement.source, tuple(options))


def _has_void(side: Side) -> bool:
    tensors = [t for group in side for t in group]
    return any(leaf.name == "_" for t in tensors for d in t.dims or () for leaf in d.leaves)


def _undone(option: Option, statement: Statement, lossy: bool, codecs: Mapping[str, Codec]) -> Option:
    name, value = option
    if name not in codecs:
        raise RelayoutError(f"{statement}: no codec {name!r}; there are {', '.join([*codecs, FILL])}")
    exact = codecs[name].exact(value) or name in ROUNDED
    if not exact and not lossy:
        raise NotInvertibleError(
            f"{statement}: {name}={value} loses bits that the way back would need; allow lossy to go on"
        )
    return name, codecs[name].inverse(value)
