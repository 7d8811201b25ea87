"""The operators that a model runs, as a graph: what each takes and gives, where in the model it stands, and its line.

    values    the tensors, by number: parameters, buffers, inputs, and what operators make
    nodes     the operators in the order in which they ran; in their arguments a tensor is a `Ref` to its value
    blocks    runs of nodes that are the same but for the tensors they take, such as the layers of a decoder

A graph has no memory and no device. Sizes are those that it was captured with; what each is in terms of the sizes that
were called dynamic is kept beside (`Value.sizes`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal, NamedTuple, cast

import torch
from torch._ops import OpOverload

Kind = Literal["parameter", "buffer", "input", "made"]


class Ref(NamedTuple):
    """A tensor in the arguments of a node."""

    value: int

    def __repr__(self) -> str:
        return f"%{self.value}"


class Size(int):
    """A size that depends on dynamic ones: a number, and what it is made of."""

    text: str

    @staticmethod
    def of(size: int | torch.SymInt, symbols: Mapping[str, str]) -> Size:
        """A size as torch has it; `symbols`: the caller's names of torch's."""
        if not isinstance(size, torch.SymInt):
            made = Size(size)
            made.text = str(size)
            return made
        node = cast(Any, size.node)
        made = Size(node.hint)
        made.text = re.sub(r"\bs\d+\b", lambda found: symbols.get(found[0], found[0]), str(node.expr))
        return made


@dataclass(frozen=True)
class Value:
    """A tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind = "made"
    name: str = ""
    """Of a parameter, a buffer or an input."""
    stride: tuple[int, ...] = ()
    sizes: tuple[str, ...] = ()
    """Each size in terms of the dynamic ones, as `2*batch`; empty where none is dynamic."""
    trained: bool = False
    """Of a parameter: whether it gets a gradient."""
    differentiable: bool = False
    """Whether gradients flow through it, as autograd says."""

    @property
    def nbytes(self) -> int:
        """Of all its elements."""
        return self.dtype.itemsize * prod(self.shape)


@dataclass(frozen=True)
class Node:
    """An operator that ran."""

    operator: OpOverload
    arguments: Mapping[str, Any]
    """By name, in the schema's order, with every default filled in."""
    results: tuple[int | None, ...]
    """Values; None for a result that is no tensor."""
    module: str
    """The path of the innermost module whose forward ran; "" for the model itself."""
    source: str
    """`file:line` of the first frame outside torch."""
    of: int | None = None
    """Of a node of the backward: the node of the forward that it differentiates; None in the forward."""
    backward: bool = False
    implied: bool = False
    """No operator that ran: what a write into a view does to the tensor that it is a view of."""
    renews: tuple[int, int] | None = None
    """Of an implied one: what that tensor was before, and the node that made the view of it."""

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The values that it takes, one for each place."""
        return tuple(refs(self.arguments))


Leaves = tuple[int | None, ...]
"""Of what a function is given or gives, flattened as torch's pytrees are: the value of each tensor, None for others."""


@dataclass(frozen=True)
class Run:
    """One time that the forward of a module ran."""

    module: str
    turn: int
    """How often the module had run before."""
    parent: int | None
    """The run whose code called it."""
    takes: Leaves
    """Of its arguments, positional and by keyword: `(args, kwargs)`."""
    gives: Leaves
    first: int
    stop: int
    """The nodes, with those of the modules inside."""
    line: str = ""
    """Whose code called it, as `file:line`: also what functions are called by in a module of torch's own."""


@dataclass(frozen=True)
class Called:
    """A function of torch that the code of a module called, as `F.linear` or `x.view`; some operators ran in it."""

    run: int
    """The run of the module whose code called it."""
    line: str
    """`file:line`"""
    function: str
    turn: int
    """How often the run had called this function in this line before."""
    takes: Leaves
    """Of its arguments: `(args, kwargs)`."""
    gives: Leaves
    form: Any
    """How what it gives is put together of its leaves, as a TreeSpec of torch's pytrees."""
    first: int
    stop: int
    """The nodes."""
    again: bool = False
    """Whether it is called again in the backward, by no module's forward."""
    nothing: tuple[int, ...] = ()
    """The places of what it gives that are None."""


@dataclass(frozen=True)
class Answer:
    """A number that a function of torch, called by the code of a run, has read out of tensors (`Read`)."""

    run: int
    line: str
    function: str
    turn: int
    answer: Any


@dataclass(frozen=True)
class Read:
    """A number that was read out of tensors whose values are known, or a tensor of as many elements as they say."""

    line: str
    operator: OpOverload
    arguments: tuple[list[Any], dict[str, Any]]
    """Its arguments, positional and by keyword."""
    answer: Any
    values: tuple[int, ...]
    inputs: tuple[str, ...]
    """The inputs that it follows from."""


@dataclass(frozen=True)
class Custom:
    """A `torch.autograd.Function` of the model's own that was applied, with gradients on."""

    name: str
    line: str
    """`file:line` where it is applied."""
    first: int
    stop: int
    """The nodes."""
    values: tuple[int, ...]
    """What it and its backward take, and what is made in it."""
    late: tuple[int, ...]
    """Of these, what its backward alone takes."""
    runs: tuple[int, ...]
    """The runs of modules in it."""
    each: bool
    """Whether forward and backward are element by element."""
    draws: bool
    """Whether its backward draws random numbers outside of any module's forward."""


@dataclass(frozen=True)
class Block:
    """Nodes of one layer: `first` up to and without `stop`."""

    path: str
    first: int
    stop: int
    kind: int
    """Blocks of one kind are the same but for the tensors they take."""
    takes: tuple[int, ...]
    """The values from outside, in the order in which they are first taken."""
    gives: tuple[int, ...]
    """The values that are taken by later nodes, or are results of the graph."""


@dataclass(frozen=True)
class Graph:
    """What a model runs."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: Mapping[str, int]
    """The results that were asked for, by name."""
    gradients: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of each trained parameter, where the backward was captured."""
    results: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of each module that ran, by its path, the first tensor that it gave."""
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Tensors of numbers that stand in the model's code, by the name of their value, which is a buffer."""
    blocks: tuple[Block, ...] = ()
    runs: tuple[Run, ...] = ()
    """Of modules in the forward, in the order in which they began."""
    calls: tuple[Called, ...] = ()
    """In the forward, in the order in which they began."""
    changed: Mapping[str, int] = field(default_factory=dict[str, int])
    """The buffers that the forward changes, by name: what they are after it."""
    written: frozenset[str] = frozenset()
    """The parameters into which it writes in a way that autograd sees, as it does not see what `.data` does."""
    answers: tuple[Answer, ...] = ()
    reads: tuple[Read, ...] = ()
    """What code has read out of tensors."""
    customs: tuple[Custom, ...] = ()
    """In the order in which they were applied."""
    rules: str = ""
    """Op rules of operators of one's own that it may have (`tangram.sharding.discover.own_rules`), one a line."""

    def of_kind(self, *kinds: Kind) -> Iterator[tuple[int, Value]]:
        """The values of some kinds, with their numbers."""
        return ((i, value) for i, value in enumerate(self.values) if value.kind in kinds)

    @property
    def read_inputs(self) -> tuple[str, ...]:
        """The inputs whose values code reads, by name."""
        return tuple(dict.fromkeys(name for one in self.reads for name in one.inputs))

    @cached_property
    def maker(self) -> Mapping[int, int]:
        """For each value that is made, the node that makes it."""
        return {value: i for i, node in enumerate(self.nodes) for value in node.results if value is not None}

    @cached_property
    def takers(self) -> Mapping[int, tuple[int, ...]]:
        """For each value, the nodes that take it."""
        found: dict[int, dict[int, None]] = {}
        for i, node in enumerate(self.nodes):
            for value in node.inputs:
                found.setdefault(value, {})[i] = None
        return {value: tuple(nodes) for value, nodes in found.items()}


def following(nodes: Sequence[Node], values: Sequence[Value], first: Collection[int]) -> set[int]:
    """Some values and all with fractions that follow from them, through nodes in their order."""
    found = set(first)
    for node in nodes:
        if found.intersection(node.inputs):
            found.update(v for v in node.results if v is not None and values[v].dtype.is_floating_point)
    return found


def flat(results: Any) -> list[Any]:
    """What an operator gives, lists and tuples within each other opened, in order."""
    if isinstance(results, list | tuple):
        return [x for one in cast("Sequence[Any]", results) for x in flat(one)]
    return [results]


def refs(arguments: Any) -> Iterator[int]:
    """The values in arguments, in order."""
    if isinstance(arguments, Ref):
        yield arguments.value
    elif isinstance(arguments, Mapping):
        for one in cast("Mapping[str, Any]", arguments).values():
            yield from refs(one)
    elif isinstance(arguments, list | tuple):
        for one in cast("Sequence[Any]", arguments):
            yield from refs(one)


def filled(arguments: Any, made: Callable[[int], Any]) -> Any:
    """Arguments with what `made` gives in place of each reference."""
    if isinstance(arguments, Ref):
        return made(arguments.value)
    if isinstance(arguments, Mapping):
        return {name: filled(one, made) for name, one in cast("Mapping[str, Any]", arguments).items()}
    if isinstance(arguments, list | tuple):
        return [filled(one, made) for one in cast("Sequence[Any]", arguments)]
    return arguments


@lru_cache(1 << 12)
def _schema(func: OpOverload) -> tuple[tuple[str, Any], ...]:
    arguments = cast(Any, func)._schema.arguments
    return tuple((a.name, a.default_value if a.has_default_value() else None) for a in arguments)


def named_arguments(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator is called with, by name in the schema's order, with every default filled in."""
    return {
        name: args[i] if i < len(args) else kwargs.get(name, default) for i, (name, default) in enumerate(_schema(func))
    }
