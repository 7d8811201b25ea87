"""Codecs: arithmetic on elements on their way from source to target, by name. One row per codec.

A codec works on each element alone, so it commutes with every relayout and stands beside the mapping (`; add=-1`). What
needs several elements at once (averaging, absorbing a matrix) is an operation before or after; codes with scales have
a table of their own, `tangram.relayout.quantised`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tangram.layout.syntax import Option
from tangram.relayout.mapping.errors import NotInvertibleError, RelayoutError

if TYPE_CHECKING:
    from torch import Tensor

Value = float | str | None


@dataclass(frozen=True)
class Codec:
    """One row.

    `apply(tensor, value)` gives the new tensor; `dtype(dtype, value)` its dtype by name, raising RelayoutError where
    the codec does not apply; `inverse(value)` the option that undoes it (`None` when nothing does); `exact(value)`
    whether undoing it gives back every bit.
    """

    apply: Callable[[Tensor, Value], Tensor]
    dtype: Callable[[str, Value], str]
    inverse: Callable[[Value], Value]
    exact: Callable[[Value], bool]


def _number(value: Value, name: str) -> float:
    if not isinstance(value, float):
        raise RelayoutError(f"{name} takes a number, as in {name}=-1")
    return value


def _widened(x: Tensor) -> Tensor:
    """Half-precision values as float32, so that a sum is rounded once."""
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def _add(x: Tensor, value: Value) -> Tensor:
    return (_widened(x) + _number(value, "add")).to(x.dtype)


def _mul(x: Tensor, value: Value) -> Tensor:
    return (_widened(x) * _number(value, "mul")).to(x.dtype)


def _floating(name: str) -> Callable[[str, Value], str]:
    def check(dtype: str, value: Value) -> str:
        _number(value, name)
        if not dtype.startswith(("float", "bfloat", "complex")):
            raise RelayoutError(f"{name} is for floating-point tensors, not {dtype}")
        return dtype

    return check


def _negative(value: Value) -> Value:
    return -_number(value, "add")


def _reciprocal(value: Value) -> Value:
    if _number(value, "mul") == 0:
        raise NotInvertibleError("mul=0 loses every value")
    return 1 / _number(value, "mul")


def _cast_names(value: Value) -> tuple[str, str]:
    if not isinstance(value, str) or value.count(":") != 1:
        raise RelayoutError("cast names both dtypes, as in cast=float32:bfloat16")
    source, target = value.split(":")
    for name in (source, target):
        if name not in _MANTISSA:
            raise RelayoutError(f"cast knows no dtype {name!r}; it knows {', '.join(_MANTISSA)}")
    return source, target


_MANTISSA: Mapping[str, tuple[int, int]] = {
    "float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2),
}  # fmt: skip
"""Exponent and mantissa bits: a cast keeps every value when neither shrinks."""


def _cast(x: Tensor, value: Value) -> Tensor:
    import torch

    return x.to(getattr(torch, _cast_names(value)[1]))


def _cast_dtype(dtype: str, value: Value) -> str:
    source, target = _cast_names(value)
    if dtype != source:
        raise RelayoutError(f"cast={value} meets a tensor of {dtype}")
    return target


def _cast_back(value: Value) -> Value:
    source, target = _cast_names(value)
    return f"{target}:{source}"


def _cast_exact(value: Value) -> bool:
    source, target = _cast_names(value)
    return all(a <= b for a, b in zip(_MANTISSA[source], _MANTISSA[target], strict=True))


def _swap_nibbles(x: Tensor, value: Value) -> Tensor:
    return (x << 4) | (x >> 4)


def _uint8(dtype: str, value: Value) -> str:
    if dtype != "uint8":
        raise RelayoutError(f"swap_nibbles is for 4-bit values packed in uint8, not {dtype}")
    return dtype


CODECS: Mapping[str, Codec] = {
    "add": Codec(_add, _floating("add"), _negative, lambda value: False),
    "mul": Codec(_mul, _floating("mul"), _reciprocal, lambda value: False),
    "cast": Codec(_cast, _cast_dtype, _cast_back, _cast_exact),
    "swap_nibbles": Codec(_swap_nibbles, _uint8, lambda value: value, lambda value: True),
}
"""Pass a larger table to `bind` for codecs of your own."""
ROUNDED = ("add", "mul")
"""Those that are undone up to rounding."""


def measured(codecs: Mapping[str, Codec], heard: Callable[[float], None]) -> Mapping[str, Codec]:
    """The same codecs, whose sums and products call `heard` with how far off a value comes back that was rounded.

    That is the largest |undone - own| / |own|, where `undone` is what the inverse makes of the result in 64-bit floats.
    """

    def with_measure(codec: Codec) -> Codec:
        def apply(x: Tensor, value: Value) -> Tensor:
            import torch

            made, own = codec.apply(x, value), _exact(x)
            try:
                undone = codec.apply(_exact(made), codec.inverse(value))
            except NotInvertibleError:
                undone = torch.zeros_like(own)
            off = (undone - own).abs() / own.abs()
            heard(float(off[off.isfinite()].max()) if off.isfinite().any() else 0.0)
            return made

        return replace(codec, apply=apply)

    return {**codecs, **{name: with_measure(codecs[name]) for name in ROUNDED if name in codecs}}


def _exact(x: Tensor) -> Tensor:
    import torch

    return x.to(torch.complex128 if x.is_complex() else torch.float64)


FILL = "fill"
"""Not a codec: the value of elements that the source does not have."""


def arithmetic(options: tuple[Option, ...]) -> tuple[Option, ...]:
    """The options that are codecs, in the order they apply."""
    return tuple(o for o in options if o[0] != FILL)


def fill_value(options: tuple[Option, ...]) -> float:
    """The value of `fill`, 0 when it is not given. Raises RelayoutError when it is no number, or given twice."""
    if sum(name == FILL for name, _ in options) > 1:
        raise RelayoutError("fill is given twice")
    return _number(dict(options).get(FILL, 0.0), FILL)


def result_dtype(dtype: str, options: tuple[Option, ...], codecs: Mapping[str, Codec]) -> str:
    """The dtype after all codecs. Raises RelayoutError for an unknown codec or one that does not apply."""
    for name, value in arithmetic(options):
        if name not in codecs:
            raise RelayoutError(f"no codec {name!r}; there are {', '.join([*codecs, FILL])}")
        dtype = codecs[name].dtype(dtype, value)
    return dtype
