"""What the operations of transformers' weight converters do, carried out on the names of dims instead of on values.

transformers declares how the tensors of a checkpoint become those of a module: `WeightConverter(sources, targets,
[MergeModulelist(0), Concatenate(1)])`. Each operation moves elements and changes none, so it can be followed on dims
made of named factors; what comes out is a statement of the mapping notation, which is bound, planned and read in parts.

Trade-off: an operation that is not in the table below is refused, even where it would mean nothing for this model.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tangram.errors import UserError
from tangram.layout.syntax import Dim

Dims = tuple[Dim, ...]


@dataclass
class Factors:
    """The factors of one statement: their sizes, and what those that had to be taken apart turned out to be."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    meaning: dict[str, Dim] = field(default_factory=dict[str, Dim])

    def fresh(self, size: int, *, fixed: bool = False) -> Dim:
        """A new factor; `fixed`: its size is written, because shapes do not tell it."""
        name = f"d{sum(known[0] == 'd' for known in self.sizes)}"
        self.sizes[name] = size
        return Dim(name, size if fixed else None)

    def label(self, name: str) -> Dim:
        """The name of a tensor, which marks its part in another one."""
        self.sizes[name] = 1
        return Dim(name)

    def size(self, dim: Dim) -> int:
        """How many elements there are along a dim."""
        return sum(math.prod(map(self.size, term)) for term in dim.terms) if dim.terms else self.sizes[dim.name]

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """The size of each dim."""
        return tuple(map(self.size, dims))

    def written(self, dim: Dim) -> Dim:
        """The dim with every factor taken apart that has been."""
        if dim.terms:
            return Dim(terms=tuple(tuple(map(self.written, term)) for term in dim.terms))
        return self.written(self.meaning[dim.name]) if dim.name in self.meaning else dim

    def become(self, dim: Dim, *terms: Sequence[Dim]) -> bool:
        """Take one factor apart, into a product or a sum of them; False where the dim is no single factor."""
        dim = self.written(dim)
        if dim.terms:
            return False
        self.meaning[dim.name] = Dim(terms=tuple(map(tuple, terms)))
        return True

    def unite(self, a: Dim, b: Dim) -> bool:
        """Say that two dims are the same; False where they cannot be."""
        a, b = self.written(a), self.written(b)
        if a == b:
            return True
        if self.size(a) != self.size(b):
            return False
        for one, other in ((b, a), (a, b)):
            if not one.terms:
                self.meaning[one.name] = other
                return True
        if [len(term) for term in a.terms] != [len(term) for term in b.terms]:
            return False
        pairs = [(x, y) for s, t in zip(a.terms, b.terms, strict=True) for x, y in zip(s, t, strict=True)]
        return all(self.unite(x, y) for x, y in pairs)


@dataclass(frozen=True)
class Symbol:
    """A tensor while it is converted: the label of the stored one that it comes from (None: of several), its dims."""

    label: str | None
    dims: Dims


@dataclass
class Work:
    """The tensors of one converter between two operations, by the pattern that transformers knows them by."""

    factors: Factors
    tensors: dict[str, list[Symbol]]
    index: Dim
    """The factor of the numbers in the names: which expert."""
    targets: tuple[str, ...]
    """The patterns of what the converter makes; their labels are `t0`, `t1`, ..."""
    first: str
    """The module's name for the first of them, for messages and for operations that look at its shape."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the module's tensors, by name."""
    config: Any

    def only(self, operation: Any) -> Symbol:
        """The one tensor that there is."""
        everything = [symbol for symbols in self.tensors.values() for symbol in symbols]
        if len(everything) != 1:
            self.refuse(operation, "of several tensors")
        return everything[0]

    def put(self, *made: Symbol) -> None:
        """What an operation with one result, or one for each target, leaves behind."""
        self.tensors = {pattern: [symbol] for pattern, symbol in zip(self.targets, made, strict=False)}

    def each(self, change: Callable[[Symbol, str], Symbol]) -> None:
        """Change every tensor by itself."""
        self.tensors = {
            pattern: [change(symbol, pattern) for symbol in symbols] for pattern, symbols in self.tensors.items()
        }

    def refuse(self, operation: Any, why: str = "") -> NoReturn:
        """Raise UserError for what has no translation."""
        raise UserError(
            f"transformers makes {self.first} with the operation {type(operation).__name__}{why and ' ' + why}, which "
            "is not supported: save the model once with save_pretrained(save_original_format=False) and train from that"
        )


def follow(work: Work, operations: Sequence[Any]) -> None:
    """Carry out a converter's operations in order. Raises UserError for one that has no translation."""
    for operation in operations:
        rule = OPERATIONS.get(type(operation).__name__)
        if rule is None:
            work.refuse(operation)
        rule(work, operation)


def _merge(work: Work, operation: Any) -> None:
    """Tensors whose names count them become one, with the count as a dim."""

    def stacked(symbol: Symbol, _: str) -> Symbol:
        at = operation.dim % (len(symbol.dims) + 1)
        return Symbol(symbol.label, (*symbol.dims[:at], work.index, *symbol.dims[at:]))

    work.each(stacked)
    if len(work.tensors) == 1:
        work.put(*next(iter(work.tensors.values())))


def _concatenate(work: Work, operation: Any) -> None:
    """Tensors after each other along a dim; each part carries the label of its tensor."""
    first, *others = parts = [symbol for symbols in work.tensors.values() for symbol in symbols]
    if not others:
        return work.put(first)
    at: int = operation.dim % len(first.dims)
    for other in others:
        pairs = enumerate(zip(first.dims, other.dims, strict=False))
        same = len(first.dims) == len(other.dims)
        if not same or not all(work.factors.unite(a, b) for i, (a, b) in pairs if i != at):
            work.refuse(operation, "of tensors whose shapes differ")
    if any(part.label is None for part in parts):
        work.refuse(operation, "after another one that joins or cuts tensors")
    joined = Dim(terms=tuple((Dim(part.label or ""), part.dims[at]) for part in parts))
    return work.put(Symbol(None, (*first.dims[:at], joined, *first.dims[at + 1 :])))


def _chunk(work: Work, operation: Any) -> None:
    """Equal parts along a dim, one for each target, as `torch.chunk` cuts them."""
    if operation.num_shards_attribute is not None:
        work.refuse(operation, "into a number of parts")
    n, parts = work.factors.size(_dim_of(work, operation)), len(work.targets)
    each = -(-n // parts)
    _cut(work, operation, [max(0, min(each, n - i * each)) for i in range(parts)])


def _split(work: Work, operation: Any) -> None:
    """Parts along a dim as long as the targets."""
    names = [work.first.replace(work.targets[0], target) for target in work.targets]
    if not all(name in work.shapes for name in names):
        work.refuse(operation, "into tensors that the model has not")
    dim: int = operation.dim
    _cut(work, operation, [work.shapes[name][dim] for name in names])


def _dim_of(work: Work, operation: Any) -> Dim:
    at: int = operation.dim
    return work.only(operation).dims[at]


def _cut(work: Work, operation: Any, sizes: Sequence[int]) -> None:
    symbol, factors = work.only(operation), work.factors
    at: int = operation.dim % len(symbol.dims)
    labels = [factors.label(f"t{i}") for i in range(len(sizes))]
    dim = factors.written(symbol.dims[at])
    if sum(sizes) != factors.size(dim) or not all(sizes):
        work.refuse(operation, f"of {factors.size(dim)} into {len(sizes)} parts")
    lead = dim.terms[0][0] if len(dim.terms) == 1 else dim
    if lead is dim:
        parts = [factors.fresh(size) for size in sizes]
        done = factors.become(dim, *[(label, part) for label, part in zip(labels, parts, strict=True)])
    else:  # a product whose first factor counts the parts
        rest = dim.terms[0][1:]
        parts = [rest[0] if len(rest) == 1 else Dim(terms=(rest,))] * len(sizes)
        done = factors.size(lead) == len(sizes) and factors.become(lead, *[(label,) for label in labels])
    if not done:
        work.refuse(operation, "after another one that joins or cuts tensors")
    work.put(*[Symbol(None, (*symbol.dims[:at], part, *symbol.dims[at + 1 :])) for part in parts])


def _transpose(work: Work, operation: Any) -> None:
    """Two dims change places; with `check_dims` only where the shape is not the module's already."""
    symbol = work.only(operation)
    dims = list(symbol.dims)
    if not (operation.check_dims and work.factors.shape(symbol.dims) == work.shapes[work.first]):
        dims[operation.dim0], dims[operation.dim1] = dims[operation.dim1], dims[operation.dim0]
    work.put(Symbol(symbol.label, tuple(dims)))


def _interleave(work: Work, operation: Any) -> None:
    """Pairs along a dim become halves, or halves pairs."""
    symbol, factors = work.only(operation), work.factors
    at: int = operation.dim % len(symbol.dims)
    size = factors.size(symbol.dims[at])
    if size % 2:
        work.refuse(operation, f"of {size}, an odd number")
    two, half = factors.fresh(2, fixed=True), factors.fresh(size // 2)
    before, after = ((two, half), (half, two)) if operation.inverse else ((half, two), (two, half))
    if not factors.become(symbol.dims[at], before):
        work.refuse(operation, "after another one that joins or cuts tensors")
    work.put(Symbol(symbol.label, (*symbol.dims[:at], Dim(terms=(after,)), *symbol.dims[at + 1 :])))


def _permute_for_rope(work: Work, operation: Any) -> None:
    """In each head, pairs of rows become halves, or halves pairs, for the rotary positions."""
    config = getattr(work.config, operation.subconfig_key or "", work.config)
    heads = getattr(config, "num_attention_heads", 1)
    factors, names = work.factors, operation.permute_layer_names

    def permuted(symbol: Symbol, pattern: str) -> Symbol:
        if len(symbol.dims) not in (1, 2) or (names is not None and not any(name in pattern for name in names)):
            return symbol
        rows = factors.size(symbol.dims[0])
        if rows % (2 * heads):
            work.refuse(operation, f"of {rows} rows in {heads} heads")
        head, two, half = (
            factors.fresh(heads, fixed=True),
            factors.fresh(2, fixed=True),
            factors.fresh(rows // heads // 2),
        )
        before, after = ((two, half), (half, two)) if operation.inverse else ((half, two), (two, half))
        if not factors.become(symbol.dims[0], (head, *before)):
            work.refuse(operation, "after another one that joins or cuts tensors")
        return Symbol(symbol.label, (Dim(terms=((head, *after),)), *symbol.dims[1:]))

    work.each(permuted)
    everything = list(itertools.chain(*work.tensors.values()))
    if len(everything) == 1:
        work.put(*everything)


def _flatten_kernel(work: Work, operation: Any) -> None:
    """The kernel of a convolution as the rows of a matrix."""
    symbol = work.only(operation)
    if len(symbol.dims) not in (2, 5):
        work.refuse(operation, f"of {len(symbol.dims)} dims")
    flat = symbol.dims if len(symbol.dims) == 2 else (symbol.dims[0], Dim(terms=(symbol.dims[1:],)))
    work.put(Symbol(symbol.label, flat))


OPERATIONS: Mapping[str, Callable[[Work, Any], None]] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
    "Conv3dToLinear": _flatten_kernel,
}
"""By the name of transformers' class."""
