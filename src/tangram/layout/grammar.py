"""The one parser: meshes, layouts, mappings, regions and op rules. LALR(1), by Lark.

Every entry point takes text and returns values of `syntax`; errors are `NotationError`s that point at the character.
Parsing is pure, and cached where the values are made, so callers may parse in inner loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, TypeVar, cast

from lark import Lark, Token, Transformer, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken, VisitError

from tangram.layout.errors import NotationError
from tangram.layout.intervals import MAPS, IntSet, normal
from tangram.layout.syntax import (
    REST,
    VOID,
    Cut,
    Dim,
    Index,
    LayoutWords,
    Note,
    Operand,
    Piece,
    RuleWords,
    Slot,
    Statement,
    TensorPattern,
    Wild,
)

GRAMMAR = r"""
mesh: view ("|" view)*
view: axis*
axis: NAME SIZE

layout: dims suffix*
dims: dim*
dim: atom cut*
atom: NAME [SIZE] -> named
    | INT         -> literal
    | "_" [SIZE]  -> void
    | "..."       -> rest
    | "(" term ("+" term)* ")" -> bracket
term: dim+
cut: "/" NAME [":" map]
map: NAME ["[" args "]"] -> named_map
   | "[" args "]"        -> sizes
args: INT+ | NAME
suffix: "//" NAME [":" map]      -> flat
      | OP ":" NAME              -> pending
      | "@" NAME SIZE ("," INT)* -> at

statement: side "->" side [";" option+]
side: tied ("," tied)* | "_"
tied: tensor ("=" tensor)*
tensor: PATTERN ["as" NAME] [colon dims]
colon: ":"
option: NAME "=" (NUMBER | value) | NAME
value: NAME [":" NAME]
index: dim ["+" INT]

region: box ("+" box)*
box: "[" set* "]"
set: run ("," run)*
run: INT ":" INT

rule: operators ":" operands "->" operands [";" note+]
operators: OPERATOR+
operands: operand ("," operand)*
operand: piece* contraction*
piece: (dim | slot) [MARK]
slot: SLOT
contraction: OP ":" (NAME | SLOT)
note: NAME ["(" (NAME | SLOT | INT)* ")"]

OP.2: /(sum|avg|max|min)(?=\s*:)/
SIZE: /=\s*\d+(?![\w.{])/
NAME: /[A-Za-z]\w*/
PATTERN: /(?!_(?![\w.\/{]))([\w.\/]|-(?!>)|\{[^{}]*\})+/
NUMBER: /(-?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?|-?inf|nan)(?![\w:])/
OPERATOR: /[A-Za-z_][\w.]*/
SLOT: /\{#{0,2}[A-Za-z_]\w*(:[A-Za-z_]\w*)?\}/
MARK: /[\^']/
INT: /\d+/
%import common.WS
%ignore WS
"""

T = TypeVar("T")


class _Build(Transformer[Token, Any]):
    """Parse tree to `syntax` values; one method a rule."""

    def INT(self, t: Token) -> int:
        return int(t)

    def SIZE(self, t: Token) -> int:
        return int(t[1:])

    def NUMBER(self, t: Token) -> float:
        return float(t)

    def NAME(self, t: Token) -> str:
        return str(t)

    def OP(self, t: Token) -> str:
        return str(t)

    def axis(self, c: list[Any]) -> tuple[str, int]:
        return c[0], c[1]

    def view(self, c: list[Any]) -> tuple[Any, ...]:
        return tuple(c)

    mesh = dims = term = tied = side = view

    def named(self, c: list[Any]) -> Dim:
        return Dim(c[0], c[1])

    def literal(self, c: list[Any]) -> Dim:
        return Dim("", c[0])

    def void(self, c: list[Any]) -> Dim:
        return Dim(VOID, c[0])

    def rest(self, c: list[Any]) -> Dim:
        return Dim(REST)

    def bracket(self, c: list[Any]) -> Dim:
        return Dim(terms=tuple(c))

    def dim(self, c: list[Any]) -> Dim:
        return replace(c[0], cuts=tuple(c[1:]))

    def args(self, c: list[Any]) -> tuple[int, ...] | str:
        return c[0] if isinstance(c[0], str) else tuple(c)

    def named_map(self, c: list[Any]) -> tuple[str, Any]:
        return c[0], c[1] if c[1] is not None else ()

    def sizes(self, c: list[Any]) -> tuple[str, Any]:
        return "sizes", c[0]

    def cut(self, c: list[Any]) -> Cut:
        return Cut(c[0], *(c[1] or ()))

    def flat(self, c: list[Any]) -> tuple[str, Any]:
        return "flat", Cut(c[0], *(c[1] or ()))

    def pending(self, c: list[Any]) -> tuple[str, Any]:
        return "pending", (c[0], c[1])

    def at(self, c: list[Any]) -> tuple[str, Any]:
        return "at", (c[0], tuple(c[1:]))

    def layout(self, c: list[Any]) -> LayoutWords:
        def of(kind: str) -> tuple[Any, ...]:
            return tuple(value for name, value in c[1:] if name == kind)

        return c[0], of("flat"), of("pending"), of("at")

    def colon(self, c: list[Any]) -> bool:
        return True

    def tensor(self, c: list[Any]) -> TensorPattern:
        name, alias, _, dims = c
        return TensorPattern(_name_parts(name), alias, dims)

    def value(self, c: list[Any]) -> str:
        return c[0] if c[1] is None else f"{c[0]}:{c[1]}"

    def option(self, c: list[Any]) -> tuple[str, Any]:
        return c[0], c[1] if len(c) > 1 else None

    def statement(self, c: list[Any]) -> Statement:
        return Statement(c[0], c[1], tuple(o for o in c[2:] if o is not None))

    def index(self, c: list[Any]) -> Index:
        return Index(c[0], c[1] or 0)

    def run(self, c: list[Any]) -> tuple[int, int]:
        return c[0], c[1]

    def set(self, c: list[Any]) -> IntSet:
        return normal(c)

    def box(self, c: list[Any]) -> tuple[IntSet, ...]:
        return tuple(c)

    region = view

    def slot(self, c: list[Any]) -> Slot:
        argument, _, keep = c[0].strip("{#}").partition(":")
        return Slot(argument, keep, c[0].count("#"))

    def piece(self, c: list[Any]) -> Piece:
        return Piece(c[0], c[1] == "^", c[1] == "'")

    def contraction(self, c: list[Any]) -> tuple[str, str]:
        return c[0], str(c[1])

    def operand(self, c: list[Any]) -> Operand:
        pieces = tuple(x for x in c if isinstance(x, Piece))
        return Operand(pieces, tuple(x for x in c if not isinstance(x, Piece)))

    def note(self, c: list[Any]) -> Note:
        return c[0], tuple(str(x) for x in c[1:] if x is not None)

    operators = operands = view

    def rule(self, c: list[Any]) -> RuleWords:
        return tuple(map(str, c[0])), c[1], c[2], tuple(x for x in c[3:] if x is not None)


_STARTS = ["mesh", "layout", "statement", "index", "region", "rule"]
_BUILD = _Build()

_WORDS = {
    "NAME": "a name", "INT": "a number", "SIZE": "=number", "PATTERN": "a tensor name", "NUMBER": "a number",
    "LPAR": "(", "RPAR": ")", "LSQB": "[", "RSQB": "]", "SLASH": "/", "COLON": ":", "PLUS": "+", "COMMA": ",",
    "EQUAL": "=", "SEMICOLON": ";", "VBAR": "|", "AT": "@", "OP": "sum:", "AS": "as", "UNDERSCORE": "_",
    "OPERATOR": "an operator", "SLOT": "{argument}", "MARK": "^ or '", "$END": "the end",
    "__ANON_0": "...", "__ANON_1": "//", "__ANON_2": "->",
}  # fmt: skip


@cache
def _lark() -> Lark:
    """Made when the first text is parsed, which takes a tenth of a second that many commands need not spend."""
    return Lark(GRAMMAR, parser="lalr", start=_STARTS, maybe_placeholders=True, propagate_positions=True)


def _parse(start: str, text: str, end: str = "the end of the text") -> Any:
    try:
        return _BUILD.transform(_lark().parse(text, start=start))
    except UnexpectedInput as error:
        raise NotationError(text, _position(error, text), _reason(error, text, end)) from None
    except VisitError as error:
        if isinstance(error.orig_exc, NotationError):  # an index in a tensor's name
            raise NotationError(text, error.orig_exc.position, error.orig_exc.reason) from None
        if isinstance(error.orig_exc, ValueError):  # Python reads no number of thousands of digits
            raise NotationError(text, 0, "a number is too long") from None
        raise
    except RecursionError:
        raise NotationError(text, 0, "too many brackets inside each other") from None


def _find(start: str, text: str, rule: str, which: Callable[[Tree[Token]], bool] = lambda _: True) -> int:
    """Where the first such rule of a text that parses begins: for errors that the grammar cannot see."""
    tree = _lark().parse(text, start=start)
    return min(node.meta.start_pos for node in tree.find_data(rule) if which(node))


def _is_unknown_map(node: Tree[Token]) -> bool:
    name, args = cast("tuple[Token, Tree[Token] | None]", tuple(node.children))
    return str(name) not in MAPS or (str(name) == "sizes" and args is None)


def _is_plain_rest(dim: Tree[Token]) -> bool:
    """Whether a dim is `...` without cuts."""
    (atom, *cuts) = cast("list[Tree[Token]]", dim.children)
    return atom.data == "rest" and not cuts


def _position(error: UnexpectedInput, text: str) -> int:
    at = error.pos_in_stream
    return len(text) if at is None or isinstance(error, UnexpectedEOF) or at < 0 or _at_end(error) else at


def _at_end(error: UnexpectedInput) -> bool:
    return isinstance(error, UnexpectedToken) and cast("Token", error.token).type == "$END"


def _reason(error: UnexpectedInput, text: str, end: str) -> str:
    expected: set[str] = set()
    if isinstance(error, UnexpectedToken):
        expected = set(error.accepts or error.expected)
    elif isinstance(error, UnexpectedCharacters):
        expected = set(cast("set[str]", error.allowed or ()))
    position = _position(error, text)
    found = repr(text[position]) if position < len(text) else end
    words = sorted({_WORDS.get(e, e.lower()) for e in expected if e != "WS"})
    return f"{found} is not understood here" + (f"; expected {', '.join(words)}" if words else "")


def _name_parts(name: Token) -> tuple[str | Index | Wild, ...]:
    """`layers.{l+3}.w` as ("layers.", Index(l, 3), ".w")."""
    parts: list[str | Index | Wild] = []
    for found in re.finditer(r"([^{}]+)|\{([^{}]*)\}", name):
        literal, inner = found.groups()
        if literal:
            parts.append(literal)
        elif re.fullmatch(r"\s*[A-Za-z]\w*\s*\*\s*", inner):
            parts.append(Wild(inner.strip(" *")))
        else:
            parts.append(_index(inner, (name.start_pos or 0) + found.start(2)))
    return tuple(parts)


def _index(text: str, at: int) -> Index:
    """The index in braces that begins at this position of the statement."""
    try:
        index = cast("Index", _parse("index", text, end="'}'"))
    except NotationError as error:
        raise NotationError(text, at + error.position, error.reason) from None
    for rule, wrong in (
        ("cut", any(n.cuts for n in index.dim.nodes)),
        ("rest", any(n.name == REST for n in index.dim.nodes)),
    ):
        if wrong:
            position = at + _find("index", text, rule)
            raise NotationError(text, position, "an index in a name is made of factors, without cuts")
    return index


def parse_layout(text: str) -> LayoutWords:
    """What a layout is made of."""
    words = cast("LayoutWords", _parse("layout", text))
    dims, flat = words[:2]
    for cut in [c for dim in dims for node in dim.nodes for c in node.cuts] + list(flat):
        if cut.map not in MAPS or (cut.map == "sizes" and not cut.args):
            known = ", ".join(sorted(m for m in MAPS if m and m != "sizes"))
            position = _find("layout", text, "named_map", _is_unknown_map)
            raise NotationError(text, position, f"no index map {cut.map!r}; there are {known}")
    if any(n.name == REST and (n is not dim or n.cuts) for dim in dims for n in dim.nodes):
        top = cast("Tree[Token]", _lark().parse(text, start="layout").children[0])
        plain = {d.meta.start_pos for d in cast("list[Tree[Token]]", top.children) if _is_plain_rest(d)}
        position = _find("layout", text, "rest", lambda node: node.meta.start_pos not in plain)
        raise NotationError(text, position, "'...' stands for whole dims, without brackets and cuts")
    if sum(d.name == REST for d in dims) > 1:
        raise NotationError(text, text.rfind(REST), "'...' stands once in a layout")
    return words


@lru_cache(1 << 10)
def parse_mesh(text: str) -> tuple[tuple[tuple[str, int], ...], ...]:
    """The views of a mesh."""
    return cast("tuple[tuple[tuple[str, int], ...], ...]", _parse("mesh", text))


@lru_cache(1 << 10)
def parse_region(text: str) -> tuple[tuple[IntSet, ...], ...]:
    """The boxes of a region."""
    for run in re.finditer(r"(\d+)\s*:\s*(\d+)", text):
        if int(run[1]) > int(run[2]):
            raise NotationError(text, run.start(), f"{run[0]} ends before it begins")
    return cast("tuple[tuple[IntSet, ...], ...]", _parse("region", text))


def parse_statements(text: str, lines: Iterable[tuple[int, str]]) -> tuple[Statement, ...]:
    """The statements of a mapping's lines, each with its offset in the text."""
    return tuple(_within(text, start, line, _statement) for start, line in lines)


def parse_rule(text: str) -> RuleWords:
    """What an op rule is made of."""
    words = cast("RuleWords", _parse("rule", text))
    _, inputs, outputs, _ = words
    pieces = [piece for operand in (*inputs, *outputs) for piece in operand.pieces]
    if any(node.cuts for piece in pieces if isinstance(piece.what, Dim) for node in piece.what.nodes):
        raise NotationError(text, _find("rule", text, "cut"), "a rule has no cuts: it says what can be cut")
    if any(operand.pending for operand in inputs):
        raise NotationError(text, _find("rule", text, "contraction"), "only outputs have a pending reduction")
    if any(piece.beyond for operand in outputs for piece in operand.pieces):
        raise NotationError(text, text.rfind("'"), "only inputs are read beyond a part's borders")
    return words


@lru_cache(1 << 14)
def _statement(text: str) -> Statement:
    statement = cast("Statement", _parse("statement", text))
    for tensor in statement.tensors:
        for dim in tensor.dims or ():
            if any(node.cuts for node in dim.nodes):
                position = _find("statement", text, "cut")
                raise NotationError(text, position, "a mapping has no cuts: it says what is what, not who holds it")
            if any(node.name == REST for node in dim.nodes):
                position = _find("statement", text, "rest")
                raise NotationError(text, position, "a mapping names its dims; leave them out to keep any shape")
    if not statement.source and not statement.target:
        raise NotationError(text, 0, "a statement has a tensor on at least one side")
    return statement


def _within(text: str, start: int, line: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(line)
    except NotationError as error:
        raise NotationError(text, start + error.position, error.reason) from None
