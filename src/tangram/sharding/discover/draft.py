"""From what was found in calls of different shapes to one line: the forms that explain most of it, with letters.

For each choice of forms of the inputs, dims that were cut together become one factor; a factor is whole where it was
not found in every call that has it, or became something else in another. Each output gets the first form in which all
its dims are what was found. Of all choices, the one is taken by which most dims can be cut, and the shortest of those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase

from tangram.layout.syntax import Slot
from tangram.sharding.discover.cuts import DimsTogether
from tangram.sharding.discover.operand_patterns import (
    Context,
    Key,
    OperandForm,
    context,
    input_forms,
    output_forms,
    slots_of,
)
from tangram.sharding.ops.bind import ALL
from tangram.sharding.ops.calls import OpCall, schema_of

CHOICES = 4000
"""Of forms of the inputs, that are looked at."""
Root = Key


@dataclass(frozen=True)
class DraftCase:
    """A call and what was found in it."""

    call: OpCall
    together: Sequence[DimsTogether]
    outputs: Sequence[tuple[int, ...]]
    """The shapes of its results."""


@dataclass(frozen=True)
class Draft:
    """A line of a table in the making."""

    text: str
    score: int
    """How many dims of the calls can be cut by it."""
    mixed: int = 0
    """0 where all dims are by position or named by an argument, 1 where all have letters, 2 for both."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """The smallest is best."""
        return -self.score, self.mixed, len(self.text)


@dataclass
class _Factors:
    """Which keys are one factor, and which factors are whole."""

    above: dict[Key, Key] = field(default_factory=dict[Key, Key])
    uncut: set[Key] = field(default_factory=set[Key])

    def root(self, key: Key) -> Key:
        while key in self.above:
            key = self.above[key]
        return key

    def join(self, keys: Sequence[Key]) -> None:
        roots = sorted({self.root(k) for k in keys})
        letters = [r for r in roots if r[0] == "letter"]
        if len(roots) == 1:
            return
        if len(letters) == len(roots):
            self.above |= dict.fromkeys(roots[1:], roots[0])
        else:
            self.uncut.update(roots)


def draft(name: str, cases: Sequence[DraftCase], note: str = "") -> Draft | None:
    """The best line for what was found; None where no form fits all calls. `note`: `if(reduction 1)`, to go with it."""
    cases = [case for case in cases if _has_dims(case.call)] or cases
    best: Draft | None = None
    for slot in (None, *slots_of([c.call for c in cases])):
        at = [context(case.call, slot) for case in cases]
        if any(one is None for one in at):
            continue
        for forms in _choices(slot, cases):
            made = _made(name, cases, [one for one in at if one is not None], forms, slot, note)
            if made is not None and (best is None or made.rank < best.rank):
                best = made
    return best


def _has_dims(call: OpCall) -> bool:
    """Whether there is anything to cut: rules say nothing of scalars in the place of tensors, nor of nothing."""
    first = next((t for t in call.tensors if t is not None), None)
    return first is not None and first.ndim > 0 and all(t is None or t.numel() for t in call.tensors)


def operand_of(call: OpCall) -> list[int]:
    """Of each tensor, which operand of a rule it is: those of a list are one."""
    names = list(dict.fromkeys(name for name, _ in call.places))
    return [names.index(name) for name, _ in call.places]


def _choices(slot: Slot | None, cases: Sequence[DraftCase]) -> Iterator[list[OperandForm]]:
    ndims: dict[int, list[int]] = {}
    for case in cases:
        for operand, tensor in zip(operand_of(case.call), case.call.tensors, strict=True):
            if tensor is not None:
                ndims.setdefault(operand, []).append(tensor.ndim)
    options = [input_forms(slot, ndims[o]) if o in ndims else [OperandForm()] for o in range(max(ndims) + 1)]
    yield from (list(some) for some in itertools.islice(itertools.product(*options), CHOICES))


def _made(
    name: str,
    cases: Sequence[DraftCase],
    at: Sequence[Context],
    forms: Sequence[OperandForm],
    slot: Slot | None,
    note: str,
) -> Draft | None:
    if slot is not None and not any(form.slot == slot for form in forms):
        return None
    keyed: list[dict[tuple[int, int], Key]] = []
    contexts: list[Context] = []
    for case, one in zip(cases, at, strict=True):
        keys = _keys(case, one, forms)
        if keys is None:
            return None
        keyed.append(keys)
        rest = max((k[2] for k in keys.values() if k[0] == "rest"), default=0)
        contexts.append(one if slot is not None else Context(one.call, rest=rest))
    factors = _Factors()
    for case, keys in zip(cases, keyed, strict=True):
        for found in case.together:
            factors.join([keys[spot] for spot in found.dims])
    return _Writer(name, cases, contexts, forms, slot, keyed, factors, note).line()


def _keys(case: DraftCase, at: Context, forms: Sequence[OperandForm]) -> dict[tuple[int, int], Key] | None:
    found: dict[tuple[int, int], Key] = {}
    for i, (operand, tensor) in enumerate(zip(operand_of(case.call), case.call.tensors, strict=True)):
        if tensor is not None:
            keys = forms[operand].keys(at, operand, tensor.ndim)
            if keys is None:
                return None
            found |= {(i, d): key for d, key in enumerate(keys)}
    return found


@dataclass
class _Writer:
    """Writes the line for one choice of forms."""

    name: str
    cases: Sequence[DraftCase]
    at: Sequence[Context]
    forms: Sequence[OperandForm]
    slot: Slot | None
    keyed: Sequence[Mapping[tuple[int, int], Key]]
    factors: _Factors
    note: str
    by_root: list[dict[Root, DimsTogether]] = field(default_factory=list[dict[Root, DimsTogether]])
    equal: bool = False
    """Whether a dim of one element is not broadcast to others."""

    def line(self) -> Draft | None:
        if not self._broadcasts():
            return None
        self._mark_uncut()
        count = len(self.cases[0].outputs)
        outputs: list[OperandForm] = []
        for o in range(count):
            form = self._output(o)
            if form is None:
                return None
            outputs.append(form)
        text = self._text(outputs)
        score = sum(len(f.dims) for case in self.by_root for root, f in case.items() if not self._is_uncut(root))
        forms = [*self.forms, *outputs]
        letters = any(form.before + form.after or form.own for form in forms)
        mixed = 0 if not letters else 2 if any(form.rest or form.slot for form in forms) else 1
        return None if text is None else Draft(text, score, mixed)

    def _broadcasts(self) -> bool:
        """Whether dims by position are equal or of one element: 8 beside 4 are not, and 2 beside 1 are it by chance."""
        if self.slot is not None and self.slot.argument != ALL:
            return True
        for case, keys in zip(self.cases, self.keyed, strict=True):
            operands, sizes = operand_of(case.call), dict[Key, dict[int, int]]()
            for (i, d), key in keys.items():
                tensor = case.call.tensors[i]
                if key[0] != "letter" and tensor is not None and tensor.shape[d] != 1:
                    sizes.setdefault(key, {})[operands[i]] = tensor.shape[d]
            if any(len({*some.values()}) > 1 for some in sizes.values()):
                return False
        return True

    def _is_uncut(self, root: Root) -> bool:
        """The others are whole together, and so are the dims of a slot."""
        if root[0] == "letter":
            return root in self.factors.uncut
        return any(self.factors.root(w)[0] == root[0] for w in self.factors.uncut)

    def _mark_uncut(self) -> None:
        """What is not found in a call that has it; what becomes of it must agree."""
        after: dict[tuple[Root, int], str] = {}
        for case, keys in zip(self.cases, self.keyed, strict=True):
            groups: dict[Root, set[tuple[int, int]]] = {}
            sizes: dict[Root, set[int]] = {}
            ones = set[Root]()
            for (i, d), key in keys.items():
                tensor = case.call.tensors[i]
                assert tensor is not None
                if tensor.shape[d] == 1:
                    ones.add(self.factors.root(key))
                else:
                    groups.setdefault(self.factors.root(key), set()).add((i, d))
                    sizes.setdefault(self.factors.root(key), set()).add(tensor.shape[d])
            found = {frozenset(f.dims): f for f in case.together}
            here: dict[Root, DimsTogether] = {}
            for root, spots in groups.items():
                one = found.get(frozenset(spots))
                if one is not None:
                    here[root] = one
                elif len(sizes[root]) == 1 and root in ones:
                    self.equal = True  # what has one element of it is not broadcast
                elif len(sizes[root]) == 1:
                    self.factors.uncut.add(root)
            self.by_root.append(here)
            for root, one in here.items():
                for o, (op, _) in enumerate(one.outputs):
                    kind = (root if root[0] == "letter" else (root[0], -1, -1)), o
                    if after.setdefault(kind, op) != op or (root[0] == "rest" and op != "cut"):
                        self.factors.uncut.add(root)

    def _output(self, o: int) -> OperandForm | None:
        """The first form in which every dim is what was found."""
        ndims = [len(case.outputs[o]) for case in self.cases]
        arguments = [a.name for a in schema_of(self.cases[0].call.operator).arguments]
        some = output_forms(self.slot, ndims, arguments)
        if not any(form.rest for form in self.forms):
            some = [form for form in some if not form.rest]
        return next((f for f in some if self._letters(f, o) is not None), None)

    def _letters(self, form: OperandForm, o: int) -> dict[int, Root | None] | None:
        """The factors of an output's letters by their place; None where a dim is not what was found."""
        letters: dict[int, Root | None] = {}
        for case, at, here in zip(self.cases, self.at, self.by_root, strict=True):
            keys = form.keys(at, -2 - o, None)
            if keys is None or len(keys) != len(case.outputs[o]):
                return None
            seen = {f.outputs[o][1]: r for r, f in here.items() if f.outputs[o][0] == "cut" and not self._is_uncut(r)}
            for d, key in enumerate(keys):
                root = seen.get(d)
                if key[0] == "kept" and case.outputs[o][d] != 1:
                    return None
                if key[0] == "letter":
                    if root is not None and (root[0] != "letter" or letters.get(key[2], root) not in (root, None)):
                        return None
                    letters[key[2]] = root or letters.get(key[2])
                elif root != key and (root is not None or (key in here and not self._is_uncut(key))):
                    return None
        return letters

    def _text(self, outputs: Sequence[OperandForm]) -> str | None:
        names: dict[Root, str] = {}
        taken = set(self.cases[0].call.arguments)
        free = (c for c in ascii_lowercase if c not in taken)
        after = self._after(len(outputs))

        def letter(root: Root | None) -> str:
            if root is None or self._is_uncut(root) or root not in after:
                return "_"
            if root not in names:
                names[root] = next(free)
            return names[root]

        def of(form: OperandForm, roots: Mapping[int, Root | None]) -> str:
            rest_whole, slot_whole = (self._is_uncut((kind, -1, 0)) for kind in ("rest", "slot"))
            others = "..." + "^" * rest_whole
            lead = [letter(roots.get(i)) for i in range(form.before)]
            tail = [letter(roots.get(form.before + i)) for i in range(form.after)]
            middle = [others] if form.rest else []
            if form.slot is not None:
                shown = f"{form.slot}{'^' * (slot_whole and not form.slot.keep)}"
                middle = [others, shown, others] if form.rest and form.slot.argument != ALL else [shown]
                if form.slot.trailing:
                    middle = middle[:2]
            elif form.own:
                middle = [others, letter(roots.get(0)), others]
            return " ".join([*lead, *middle, *tail])

        left = [
            of(form, {i: self.factors.root(("letter", o, i)) for i in range(max(form.before + form.after, 1))})
            for o, form in enumerate(self.forms)
        ]
        right: list[str] = []
        for o, form in enumerate(outputs):
            roots = self._letters(form, o)
            assert roots is not None
            pending = [
                f"{ops[o]}:{self._slot_text() if root[0] == 'slot' else letter(root)}"
                for root, ops in after.items()
                if ops[o] != "cut" and not self._is_uncut(root)
            ]
            right.append(" ".join([of(form, roots), *dict.fromkeys(pending)]).strip())
        if (
            self.slot is not None
            and self.slot.trailing
            and any("sum:" in r or "max:" in r or "min:" in r for r in right)
        ):
            return None  # pending over trailing dims has no sign
        return f"{self.name} : {', '.join(left)} -> {', '.join(right)}{self._notes(after, letter)}"

    def _slot_text(self) -> str:
        return f"{{{self.slot.argument}}}" if self.slot is not None else ""

    def _after(self, count: int) -> dict[Root, list[str]]:
        """What becomes of each output when a factor is cut; the same on all parts is their maximum, too."""
        found: dict[Root, list[str]] = {}
        for here in self.by_root:
            for root, one in here.items():
                key = root if root[0] == "letter" else (root[0], -1, 0)
                if not self._is_uncut(root):
                    found[key] = ["max" if op == "same" else op for op, _ in one.outputs[:count]]
        return found

    def _notes(self, after: Mapping[Root, list[str]], letter: Callable[[Root], str]) -> str:
        once = sorted({i for here in self.by_root for r, f in here.items() if not self._is_uncut(r) for i in f.once})
        notes = [f"once({' '.join(map(str, once))})"] if once else []
        scaled = dict.fromkeys(
            r if r[0] == "letter" else (r[0], -1, 0)
            for here in self.by_root
            for r, f in here.items()
            if f.scale and not self._is_uncut(r)
        )
        notes += [f"scale({self._slot_text() if root[0] == 'slot' else letter(root)})" for root in scaled]
        notes = [*([self.note] if self.note else []), *notes, *(["equal"] if self.equal else [])]
        return f" ; {' '.join(notes)}" if notes else ""
