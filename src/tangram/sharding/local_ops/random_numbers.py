"""Random numbers that belong to elements, not to ranks: element i of the whole tensor gets the same in every layout.

    key = Key(seed=7, stream=3)                        one stream for each tensor or call that draws
    at = places(Layout.parse("b/x h").bind((6, 4)), mesh, rank)
    uniform(at, key), normal(at, key), bernoulli(at, 0.9, key), dropout(x, 0.1, layout, mesh, rank, seed=7, stream=3)

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011),
checked against the known answers that come with its authors' Random123. Its key is the seed; its counter is the
element's row-major number in the whole tensor and the stream. So no rank has a state, and a run can go on in any other
layout.

What is made of the words uses +, -, *, / and square roots alone, each of which is rounded the same on every device and
at every place of a vector; library logarithms are not. The price: ten rounds are a hundred passes over the elements,
where torch's own dropout is a few.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from tangram.errors import UserError
from tangram.layout import Layout, Mesh, region
from tangram.layout.intervals import IntSet
from tangram.layout.locate import indices_of_rank

ROUNDS = 10
_AT_ONCE = 1 << 18
"""Numbers that are made at a time: what they are made of fits a cache."""
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""Of a uniform number that a type holds without rounding it up to 1."""


class Key(NamedTuple):
    """Which numbers are drawn: 64 bits of a seed, and 64 of a stream, which is another for each tensor or call."""

    seed: int = 0
    stream: int = 0


class Samples(NamedTuple):
    """Which samples of a step's global batch a micro-batch has: `rows` of them from number `first` on, of `total`."""

    first: int
    rows: int
    total: int


@dataclass
class DrawNumbers:
    """How elements of a micro-batch's tensors are numbered: as in the tensors of the global batch in one process.

    So which micro-batch and rank a sample is in does not show in what is drawn for it.
    """

    samples: Samples | None = None
    """None: a call stands for itself, and elements are numbered as they are in its tensors."""
    after: Mapping[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])
    """By the shape of a tensor: how many elements of one sample stand side by side, 0 where it has no samples. Of a
    shape that is not there it is not known, and what is drawn is the micro-batch's."""
    apart: str = ""
    """Why some of what is drawn is the micro-batch's, until that has been told; "" where nothing is."""

    def of_all(self, at: Tensor | NumberSpan, shape: tuple[int, ...], key: Key) -> tuple[Tensor | NumberSpan, Key]:
        """The numbers in the global batch's tensor of elements with numbers in a tensor of this shape, and the key."""
        if self.samples is None:
            return at, key
        first, count, total = self.samples
        after = self.after.get(shape)
        if after is None:
            return at, Key(key.seed, first + 1)
        block = count * after  # of the micro-batch's samples, which stand between those of others
        if not block or math.prod(shape) == block:
            return at + first * after, key
        at = at.numbers if isinstance(at, NumberSpan) else at
        return at + (at // block * (max(total, first + count) - count) + first) * after, key


class NumberSpan(NamedTuple):
    """Numbers that follow one another from `start` on, in this shape, without the memory for them."""

    start: int
    shape: tuple[int, ...]
    device: torch.device | None = None

    def __add__(self, more: int) -> NumberSpan:  # pyright: ignore[reportIncompatibleMethodOverride]  not a tuple's
        return self._replace(start=self.start + more)

    @property
    def numbers(self) -> Tensor:
        """With memory."""
        n = math.prod(self.shape)
        return torch.arange(self.start, self.start + n, dtype=torch.int64, device=self.device).view(self.shape)


class Current(NamedTuple):
    """What operators draw by."""

    key: Key = Key()
    numbers: DrawNumbers | None = None


_CURRENT: ContextVar[Current] = ContextVar("key", default=Current())  # noqa: B039  a tuple


def current() -> Current:
    """What operators draw by here."""
    return _CURRENT.get()


@contextmanager
def using(key: Key, numbers: DrawNumbers | None = None) -> Generator[None]:
    """Operators that draw, within it, do so by this key: all ranks that run parts of one call have the same."""
    token = _CURRENT.set(Current(key, numbers))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def fresh() -> Key:
    """The key of the next call that draws: a number of torch's own generator on the CPU, which moves on by it.

    So `torch.manual_seed` says what is drawn, no two calls draw the same, and what is recomputed in the backward
    (`torch.utils.checkpoint` restores the generator for it) draws as it did before. Processes whose generators are in
    one state and that run the same calls in the same order have the same keys.
    """
    with _disable_current_modes():  # a number, also where operators run on fake tensors or are kept for a backward
        return Key(int(torch.empty((), dtype=torch.int64).random_(generator=torch.random.default_generator)))


def philox(counters: Tensor, key: Key) -> Tensor:
    """Four words of 32 bits, as int64, for each counter of 64 bits and a key: shape [4, ...].

    Words 0 and 1 of Philox's counter are those of `counters`, words 2 and 3 the stream's; its key is the seed.
    """
    a, b = counters & _LOW, (counters >> 32) & _LOW
    c = torch.full_like(a, key.stream & _LOW)
    d = torch.full_like(a, (key.stream >> 32) & _LOW)
    low, high = key.seed & _LOW, (key.seed >> 32) & _LOW
    for _ in range(ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # int64 wraps as uint64 does
        a = (second >> 32).bitwise_and_(_LOW).bitwise_xor_(b).bitwise_xor_(low)
        c = (first >> 32).bitwise_and_(_LOW).bitwise_xor_(d).bitwise_xor_(high)
        b, d = second.bitwise_and_(_LOW), first.bitwise_and_(_LOW)
        low, high = (low + _WEYL[0]) & _LOW, (high + _WEYL[1]) & _LOW
    return torch.stack([a, b, c, d])


def words(at: Tensor, key: Key, count: int) -> Tensor:
    """`count` (1, 2 or 4) words for each element, by its number in the whole tensor: shape [count, *at.shape].

    Elements beside each other share the four words of one counter.
    """
    per = 4 // count
    flat = at.flatten()
    blocks, which = cast("tuple[Tensor, Tensor]", torch.unique_consecutive(flat // per, return_inverse=True))
    made = philox(blocks, key).T.reshape(len(blocks), per, count)
    return made[which, flat % per].T.reshape(count, *at.shape)


def _fraction(at: Tensor, key: Key, bits: int) -> Tensor:
    """Multiples of 2 ** -bits in [0, 1), as float64: one word an element for 32 bits or fewer, else two."""
    if bits <= 32:
        return (words(at, key, 1)[0] >> (32 - bits)).double() * 2.0**-bits
    one, other = words(at, key, 2)
    return (((one << 32) | other) >> (64 - bits) & ((1 << bits) - 1)).double() * 2.0**-bits


def _open(high: Tensor, low: Tensor | None) -> Tensor:
    """Numbers between 0 and 1 and never either, as float64, of one word or two."""
    if low is None:
        return (high.double() + 0.5) * 2.0**-32
    return (((high << 20) | (low >> 12)).double() + 0.5) * 2.0**-52


def uniform(at: Tensor, key: Key, dtype: torch.dtype = torch.float32, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Numbers in [low, high), one for each element of `at`. Raises UserError for a type without fractions."""
    made = _fraction(at, key, _BITS[_real(dtype)]).to(dtype)
    return made if (low, high) == (0.0, 1.0) else made * (high - low) + low


def bernoulli(at: Tensor | NumberSpan, p: float | Tensor, key: Key) -> Tensor:
    """True with probability `p`, which may be a tensor that fits `at`."""
    if isinstance(p, Tensor):
        return _fraction(at.numbers if isinstance(at, NumberSpan) else at, key, 32) < p.double()
    limit = math.ceil(p * 2.0**32)  # a word is less than p * 2 ** 32
    if not isinstance(at, NumberSpan):
        return words(at, key, 1)[0] < limit
    n = math.prod(at.shape)
    made = torch.empty(n, dtype=torch.bool, device=at.device)
    for done in range(0, n, _AT_ONCE):
        piece = at._replace(start=at.start + done, shape=(min(_AT_ONCE, n - done),))
        torch.lt(_along(piece, key), limit, out=made[done : done + _AT_ONCE])
    return made.view(at.shape)


def _along(at: NumberSpan, key: Key) -> Tensor:
    """A word for each element, as `words` gives them one by one."""
    n = math.prod(at.shape)
    first, stop = at.start // 4, -(-(at.start + n) // 4)
    blocks = torch.arange(first, stop, dtype=torch.int64, device=at.device)
    skip = at.start - 4 * first
    return philox(blocks, key).T.reshape(-1)[skip : skip + n].view(at.shape)


def integers(at: Tensor, key: Key, low: int, high: int) -> Tensor:
    """Whole numbers in [low, high), as int64. Raises UserError where there is none, or more than 2 ** 32 of them."""
    if not 0 < high - low <= 1 << 32:
        raise UserError(f"integers from {low} to below {high} cannot be drawn: give 1 to 2**32 of them")
    return (((words(at, key, 1)[0] * (high - low)) >> 32) & _LOW) + low


def normal(at: Tensor, key: Key, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of the standard normal distribution (Box and Muller). Raises UserError for a type without fractions."""
    wide = _real(dtype) == torch.float64
    some = words(at, key, 4 if wide else 2)
    radius = (-2.0 * _log(_open(some[0], some[1] if wide else None))).sqrt()
    turns = _open(some[2], some[3]) if wide else some[1].double() * 2.0**-32
    return (radius * _circle(turns)[0]).to(dtype)


def exponential(at: Tensor, key: Key, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of the exponential distribution with mean 1, none of them 0."""
    return (-_log(_between(at, key, dtype))).to(dtype)


def geometric(at: Tensor, p: float, key: Key, dtype: torch.dtype = torch.float32) -> Tensor:
    """How many trials of probability `p` it takes until one succeeds: 1 or more."""
    if p == 1:
        return torch.ones_like(at, dtype=dtype)
    return (_log(_between(at, key, torch.float64)) / math.log1p(-p)).ceil().clamp(min=1).to(dtype)


def cauchy(at: Tensor, key: Key, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of the standard Cauchy distribution."""
    cosine, sine = _circle(_between(at, key, torch.float64) * 0.5)
    return (-cosine / sine).to(dtype)


def _between(at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    wide = _real(dtype) == torch.float64
    some = words(at, key, 2 if wide else 1)
    return _open(some[0], some[1] if wide else None)


def _real(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _BITS:
        raise UserError(f"no {str(dtype).removeprefix('torch.')} is drawn: draw float64, float32, float16 or bfloat16")
    return dtype


def _log(x: Tensor) -> Tensor:
    """The natural logarithm of positive float64, by the series of artanh."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    power = exponent.double() - small.double()
    s = (mantissa - 1) / (mantissa + 1)
    return _polynomial(s * s, [1 / k for k in range(1, 24, 2)]) * s * 2 + power * math.log(2)


def _circle(turns: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of turns in [0, 1), as float64: of a quarter, by their series."""
    quarter = (turns * 4).floor()
    a = (turns * 4 - quarter) * (math.pi / 2)
    square = a * a
    cosine = _polynomial(square, [(-1) ** k / math.factorial(2 * k) for k in range(12)])
    sine = _polynomial(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(12)]) * a
    odd, left, lower = quarter % 2 == 1, (quarter == 1) | (quarter == 2), quarter >= 2
    x, y = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    return torch.where(left, -x, x), torch.where(lower, -y, y)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """By Horner; a product and a sum each time, which no device joins to one rounding."""
    made = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        made = made.mul_(x).add_(c)
    return made


def numbered(sets: list[IntSet], shape: list[int], device: torch.device | None = None) -> Tensor:
    """The row-major numbers, in a whole tensor of this shape, of the elements in a product of sets of indices."""
    made = torch.zeros((), dtype=torch.int64, device=device)
    stride = math.prod(shape)
    for own, n in zip(sets, shape, strict=True):
        stride = stride // n if n else 0
        runs = [torch.arange(a, b, dtype=torch.int64, device=device) for a, b in own]
        index = torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64, device=device)
        made = made[..., None] + index * stride
    return made


def places(layout: Layout, mesh: Mesh, rank: int, device: torch.device | None = None) -> Tensor:
    """The row-major numbers in the whole tensor of the elements that a rank holds, in the shape in which it holds them.

    Raises LayoutError where the layout has no sizes (`Layout.bind` gives them) or names axes that the mesh lacks.
    """
    shape = [*layout.shape]
    if not layout.flat:
        return numbered([indices_of_rank(dim, mesh, mesh.coords(rank)) for dim in layout.dims], shape, device)
    boxes = [numbered([*box], shape, device).flatten() for box in region(layout, mesh, rank).boxes]
    return torch.cat(boxes).sort().values if boxes else torch.zeros(0, dtype=torch.int64, device=device)


def dropout(x: Tensor, p: float, layout: Layout, mesh: Mesh, rank: int, seed: int, stream: int = 0) -> Tensor:
    """A rank's part `x` of a tensor with elements dropped with probability `p`, the others divided by 1 - p.

    `layout` is the whole tensor's, with its sizes. The same elements are dropped in every layout. `stream` is another
    for each place in the model and each step: nothing counts them here. Raises UserError where `p` is no probability,
    or `x` is not the part that the rank holds.
    """
    if not 0 <= p <= 1:
        raise UserError(f"a probability of {p} is not between 0 and 1")
    at = places(layout, mesh, rank, x.device)
    if at.shape != x.shape:
        raise UserError(f"rank {rank} holds {list(at.shape)} of {layout}, and not a part of {list(x.shape)}")
    keep = bernoulli(at, 1 - p, Key(seed, stream))
    return x * keep * (0.0 if p == 1 else 1 / (1 - p))
