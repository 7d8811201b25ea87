"""Which tensor a person means: a parameter, what a module gives, what an operator or a source line gives.

    model.layers.0.self_attn.q_proj.weight         a parameter, a buffer or an input
    model.layers.0.self_attn                       what the module gives
    model.layers.0.self_attn:softmax               what its operator gives; softmax#2 the second of that name
    modeling_llama.py:254                          what the last operator of this line gives
    model.layers.0.mlp:modeling_llama.py:254       where several modules run the line

`{0..31}` for the number of a layer, as it is printed, is the first of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from tangram.errors import UserError
from tangram.models.capturing.graph import Graph

_LINE = re.compile(r"(?P<file>[\w/.\-]*\.py):(?P<line>\d+)")


def value_of(graph: Graph, text: str) -> int:
    """The value that a text names. Raises UserError with what is near, or with the choices where it names several."""
    plain = re.sub(r"\{(\d+)\.\.\d+\}", r"\1", text.strip())
    plain = "" if plain == "the model" else plain
    named = {value.name: v for v, value in graph.of_kind("parameter", "buffer", "input")}
    known = {**graph.results, **named}
    if plain in known:
        return known[plain]
    if line := _LINE.fullmatch(plain):
        return _of_line(graph, text, line["file"], int(line["line"]), None)
    module, colon, what = plain.partition(":")
    if not colon:
        raise UserError(f'the model has no parameter, module or source line "{text}"{_near(plain, known)}')
    module = "" if module == "the model" else module
    modules = {node.module for node in graph.nodes if not node.backward}
    if module not in modules:
        raise UserError(f'no operator runs in a module "{module}"{_near(module, modules)}')
    if line := _LINE.fullmatch(what):
        return _of_line(graph, text, line["file"], int(line["line"]), module)
    return _of_operator(graph, module, what)


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [one for one in known if one], 1, 0.4)
    return f"; the nearest is {close[0]}" if close else ""


def _of_line(graph: Graph, text: str, file: str, line: int, module: str | None) -> int:
    """What the last operator of a source line gives, in the first layer that runs it."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        own = node.source == f"{file}:{line}" or node.source.endswith(f"/{file}:{line}")
        made = [v for v in node.results if v is not None]
        if own and made and not node.backward and module in (None, node.module):
            found[node.module] = made[0]
    if not found:
        lines = sorted({node.source.rpartition("/")[2] for node in graph.nodes}, key=_number)
        some = [one for one in lines if one.startswith(f"{file.rpartition('/')[2]}:")]
        close = min(some, key=lambda one: abs(_number(one) - line), default="")
        raise UserError(
            f'no operator runs in the source line "{text}"' + (f"; the nearest is {close}" if close else "")
        )
    kinds: dict[str, str] = {}
    for name in found:
        kinds.setdefault(re.sub(r"\d+", "N", name), name)
    if len(kinds) > 1:
        some = " or ".join(f"{name}:{file}:{line}" for name in [*kinds.values()][:3])
        raise UserError(f"{len(kinds)} modules run {file}:{line}: say which one, as in {some}")
    return next(iter(found.values()))


def _number(line: str) -> int:
    return int(line.rpartition(":")[2] or 0)


def operators(graph: Graph) -> dict[str, int]:
    """What each operator gives first, as `MODULE:OPERATOR` or, of several in one module, `MODULE:OPERATOR#2`."""
    there: dict[str, list[int]] = {}
    for node in graph.nodes:
        made = [v for v in node.results if v is not None]
        if made and not node.backward:
            name = node.operator.name().partition("::")[2].partition(".")[0]
            there.setdefault(f"{node.module or 'the model'}:{name}", []).append(made[0])
    return {
        name if len(own) == 1 else f"{name}#{i}": v for name, own in there.items() for i, v in enumerate(own, start=1)
    }


def _of_operator(graph: Graph, module: str, what: str) -> int:
    """What an operator of a module gives."""
    name, _, place = what.partition("#")
    there: dict[str, list[int]] = {}
    for node in graph.nodes:
        made = [v for v in node.results if v is not None]
        if node.module == module and not node.backward and made:
            own = node.operator.name().partition("::")[2]
            for one in {own, own.partition(".")[0]}:
                there.setdefault(one, []).append(made[0])
    if name not in there:
        names = ", ".join(sorted(one for one in there if "." not in one))
        raise UserError(f'"{module or "the model"}" runs no operator "{name}", but {names}')
    some = there[name]
    if len(some) > 1 and not place:
        raise UserError(f'"{module or "the model"}" runs {name} {len(some)} times: say which, {name}#1 to #{len(some)}')
    if place and not (place.isdigit() and 0 < int(place) <= len(some)):
        raise UserError(f'"{module or "the model"}" runs {name} {len(some)} times, so there is no {name}#{place}')
    return some[int(place or 1) - 1]
