"""What `tangram plan MODEL --cluster C` says, for people and programs: the ranking, why the first wins, what if."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from tangram.planner.cost.calibration import published
from tangram.planner.local.ranking_table import Titled
from tangram.planner.report import bottlenecks
from tangram.planner.search.explain import Explained
from tangram.planner.search.objectives import TIME, Aim
from tangram.planner.search.pareto import REACH, Fronts, Place
from tangram.planner.search.query import Answer
from tangram.planner.search.strategy import Ask, Choice, safe
from tangram.planner.space.optimisers_and_offload import OPTIMISERS, offload_words

HEADERS = (
    "", "mesh", "micro-batch x accumulation", "schedule x virtual stages", "EP x TP of experts", "ZeRO", "recompute",
    "memory", "fits", "step", "90 % interval", "tokens/s/device", "MFU",
)  # fmt: skip
FITS = 0.9
"""How likely a strategy is not to run out, to be called fitting."""
ZERO = ("0", "1", "2", "3")
"""Stages: nothing sharded, optimiser states, gradients too, parameters too."""
PARTS = {
    "products": "matmuls", "attention": "attention", "streams": "norms, activations, casts (memory-bound)",
    "head": "logits and loss", "launch": "launches of kernels", "tensor": "TP communication",
    "expert": "EP all-to-all", "context": "CP communication", "stages": "PP send and receive",
    "idle": "pipeline bubble", "data": "DP and FSDP communication", "optimiser": "optimiser",
    "host": "offload to the host",
}  # fmt: skip
HELD = {
    "parameters": "parameters", "gradients": "gradients", "optimiser": "optimiser states",
    "activations": "activations", "passing": "temporary: logits, recomputed layers, all-gathered parameters",
    "reserve": "allocator's reserve", "context": "context and workspaces",
}  # fmt: skip


BINDS = ("Bottlenecks", ("what", "how much"))
LINKS = ("Links, busy beside computation or not", ("link", "how long"))


def tables(answer: Answer) -> list[Titled]:
    """Titles, headers and rows."""
    if not answer.choices and answer.missed:
        deadline = answer.aim is not None and answer.aim.terms.hours is not None
        title = "The deadline is not kept" if deadline else "Nothing is ever trained"
        return [(title, ("what",), [(answer.missed,)])]
    if not answer.choices:
        return [(nothing_fits(answer), ("what", "how"), too_small(answer))]
    best = answer.choices[0]
    found: list[Titled] = [
        (ranking_title(answer), *ranking(answer)),
        ("Why the first: its step", ("", "seconds", "share"), _shares(best.parts, PARTS, best.step, "{:.2f}", 1.0)),
        _memory_table(best, answer.limit),
        (*BINDS, bottlenecks.rows(answer, best)),
        (*LINKS, bottlenecks.links(best)),
        ("What the others lose", ("", *lost_by(answer)), losses(answer)),
        ("If it were otherwise", ("", "step", "than now", "by"), otherwise(answer)),
    ]
    if answer.aim is not None and answer.aim.terms.goodput is not None:
        found.append((f"Failures on {best.devices} devices", ("", "what"), interruptions(answer.aim, best.devices)))
    if answer.assumed:
        found.append(("Not in the catalogue, and assumed", ("what",), [(one,) for one in answer.assumed]))
    return [one for one in found if one[2]]


def ranking_title(answer: Answer) -> str:
    """What is ranked, and by what."""
    by = "" if answer.aim is None or answer.aim.objective is TIME else f", by {answer.aim.objective.title}"
    name = answer.outline.description
    return f"{name} on {answer.cluster}, predicted{by} ({answer.looked:,} configurations looked at)"


def ranking(answer: Answer) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and rows of the choices; with devices and the objective's value where they say more."""
    aim, headers = answer.aim, HEADERS
    rows = [_row(str(i), one) for i, one in enumerate(answer.choices, start=1)]
    if aim is None:
        return headers, rows
    if answer.several:
        headers = (*headers[:1], "devices", *headers[1:])
        rows = [(*row[:1], str(one.devices), *row[1:]) for row, one in zip(rows, answer.choices, strict=True)]
    title = value_title(aim)
    if title not in headers:
        headers = (*headers, title)
        rows = [(*row, aim.shown(one.devices, one.step)) for row, one in zip(rows, answer.choices, strict=True)]
    return ("", *headers[1:]), rows


def value_title(aim: Aim) -> str:
    """Of the column of an objective's values; one of the ranking's own where that has them."""
    if aim.terms.goodput is not None:
        return f"{aim.objective.title}, with failures" if aim.objective.name != "devices" else aim.objective.title
    return "step" if aim.objective is TIME else aim.objective.title


def interruptions(aim: Aim, devices: int) -> list[tuple[str, str]]:
    """What failures of so many devices cost."""
    goodput = aim.terms.goodput
    assert goodput is not None
    snapshots = [("of one device", goodput.known)] if goodput.known else []
    if goodput.snapshots is not None:
        snapshots += [("a snapshot every", f"{goodput.between_snapshots(devices) / 60:,.1f} minutes")]
    return [
        *snapshots,
        ("between two failures", f"{goodput.between(devices) / 3600:,.1f} hours"),
        ("a checkpoint every", f"{goodput.interval(devices) / 60:,.1f} minutes"),
        ("of the time is progress", f"{goodput.share(devices):.1%}"),
    ]


def front_tables(found: Fronts) -> list[Titled]:
    """The front of steps and memory, and that of sizes; nothing where nothing fits."""
    rows = [_row("", one)[1:] for one in found.memory]
    tables: list[Titled] = []
    if rows:
        title = f"Front of time and memory: none is as quick and needs less, up to {REACH:g} times the shortest step"
        tables.append((title, HEADERS[1:], rows))
    if found.sizes:
        priced = found.sizes[0].cost is not None
        headers = (
            "devices",
            "best mesh",
            "step",
            "tokens/s",
            *(["cost of 1M tokens"] if priced else []),
            "on the front",
        )
        said = "costs no more" if priced else "has no more devices"
        tables.append((f"Front of sizes: none is quicker and {said}", headers, [_place(one) for one in found.sizes]))
    return tables


def _place(one: Place) -> tuple[str, ...]:
    cost = () if one.cost is None else (f"{one.cost:.4g}",)
    on = "yes" if one.on_front else ""
    return (str(one.devices), one.choice.mesh, f"{one.choice.step:.2f} s", f"{one.rate:,.0f}", *cost, on)


def front_json(found: Fronts) -> dict[str, object]:
    """The same for programs."""
    return {
        "reach": REACH,
        "memory": [asdict(one) for one in found.memory],
        "sizes": [asdict(one) for one in found.sizes],
    }


def as_json(answer: Answer) -> dict[str, object]:
    """The same for programs: bytes and seconds."""
    return {
        "model": answer.outline.name,
        "from": "its graph" if answer.outline.graph else "its configuration",
        "parameters": answer.outline.numbers,
        "cluster": answer.cluster,
        "ask": ask_json(answer.ask),
        "memory_limit": answer.limit,
        "looked_at": answer.looked,
        "choices": [asdict(one) for one in answer.choices],
        "smallest": asdict(answer.smallest),
        "enough_devices": answer.enough,
        "would_fit": [asdict(one) for one in answer.would],
        "assumed": list(answer.assumed),
        "instead": {name: None if math.isnan(step) else step for name, step in answer.instead.items()},
        "otherwise": {name: asdict(one) if one else None for name, one in answer.otherwise.items()},
        "binds": bottlenecks.document(answer),
        "objective": None if answer.aim is None else _aimed(answer, answer.aim),
        "missed": answer.missed or None,
    }


def ask_json(ask: Ask) -> dict[str, object]:
    """What was asked, by names."""
    return {
        **{name: value for name, value in vars(ask).items() if name not in ("able", "precision", "others")},
        "optimisers": [OPTIMISERS[code].name for code in ask.optimisers],
        "offloads": [offload_words(bits) for bits in ask.offloads],
        "base": ask.base.name,
        "documents": None if ask.documents is None else asdict(ask.documents),
        "beside": None if ask.beside is None else asdict(ask.beside),
        "precisions": [ask.precision, *ask.others],
    }


def _aimed(answer: Answer, aim: Aim) -> dict[str, object]:
    """The objective, and its value of each choice; less is better."""
    goodput = aim.terms.goodput
    shares = None if goodput is None else [goodput.share(one.devices) for one in answer.choices]
    return {
        "name": aim.objective.name,
        "devices": [one.devices for one in answer.choices],
        "values": [aim.value(one.devices, one.step) for one in answer.choices],
        "goodput": None if goodput is None else asdict(goodput),
        "shares": shares,
    }


def explained_tables(found: Explained) -> list[Titled]:
    """Of a given strategy: why it cannot run, or what it needs and what it loses to the best."""
    best = found.best.choices[0] if found.best.choices else None
    first: list[Titled] = [("The best", HEADERS, [_row("best", best)])] if best else []
    if found.choice is None:
        return [("It cannot run", ("why",), [(reason,) for reason in found.refused]), *first]
    one = found.choice
    rows = [_row("given", one), *([_row("best", best)] if best else [])]
    beyond = (one.memory - safe(found.best.limit)) / 1e9
    fits = (
        "it fits"
        if one.fits >= FITS
        else f"it fits in {one.fits:.0%} of such runs, {beyond:.1f} GB beyond what is safe"
    )
    tables: list[Titled] = [
        (f"{found.best.outline.description}: MFU {one.utilisation:.1%} is to be expected, and {fits}", HEADERS, rows),
        ("Its step", ("", "seconds", "share"), _shares(one.parts, PARTS, one.step, "{:.2f}", 1.0)),
        _memory_table(one, found.best.limit),
        (*BINDS, bottlenecks.rows(found.best, one)),
        *([(*LINKS, links)] if (links := bottlenecks.links(one)) else []),
    ]  # fmt: skip
    if best:
        more = {name: part - best.parts[name] for name, part in one.parts.items()}
        lost = sorted(((part, name) for name, part in more.items() if abs(part) > 0.005 * best.step), reverse=True)
        said = [(PARTS[name], f"{part:+.2f} s") for part, name in lost]
        if said:
            tables.append((f"Beside the best: {one.step / best.step - 1:+.1%}", ("", "more"), said))
    return tables


def explained_json(found: Explained) -> dict[str, object]:
    """The same for programs."""
    best = found.best.choices[0] if found.best.choices else None
    return {
        "refused": list(found.refused),
        "given": asdict(found.choice) if found.choice else None,
        "best": asdict(best) if best else None,
    }


def again_words(again: str) -> str:
    """What is recomputed, as a part of a sentence."""
    return "no recompute" if again == "none" else f"recompute {again}"


def _between(low: float, high: float) -> str:
    digits = 2 if high < 10 else 1 if high < 1000 else 0
    return f"{low:.{digits}f} to {high:.{digits}f} s"


def _row(place: str, one: Choice) -> tuple[str, ...]:
    experts = f"{one.expert} x {one.expert_tensor}" if one.expert > 1 else ""
    return (
        place,
        one.mesh + _without_sequence_parallelism(one),
        f"{one.micro} x {one.micros}",
        one.stages,
        experts,
        divided_words(one),
        one.again,
        f"{one.memory / 1e9:.1f} GB",
        f"{one.fits:.0%}",
        f"{one.step:.2f} s",
        _between(one.low, one.high),
        f"{one.tokens_per_device:,.0f}",
        f"{one.utilisation:.1%}",
    )


def _without_sequence_parallelism(one: Choice) -> str:
    """Where TP ranks all keep the activations between their matmuls: typed as it is read by `tangram plan explain`."""
    return " sp=1" if one.at["tensor"] > 1 and not one.at["sequence_parallel"] else ""


def divided_words(one: Choice) -> str:
    """What DP ranks divide, over how many where not all, and by what ways less memory is needed."""
    return "; ".join([ZERO[one.zero] + near_words(one), *lean_words(one)])


def near_words(one: Choice) -> str:
    """Over how many ranks states are divided, where not over all."""
    return (
        f" over {one.at['shard']:.0f} ranks"
        if one.zero and one.at["shard"] < one.at["data"] * one.at["context"]
        else ""
    )


def lean_words(one: Choice) -> list[str]:
    """Another optimiser than AdamW, what is offloaded to the host, matmuls of fewer than 16 bits."""
    low = f"{one.precision} matmuls" if one.precision in ("fp8", "fp4") else ""
    kind = "" if one.optimiser == "adamw" else one.optimiser
    return [word for word in (kind, f"offload: {one.offload}" if one.offload else "", low) if word]


def _memory_table(one: Choice, limit: float) -> Titled:
    between = f"90 % interval {one.memory_low / 1e9:.1f} to {one.memory_high / 1e9:.1f} GB"
    return f"Its memory, of {limit / 1e9:.0f} GB; {between}", ("", "GB", "share"), memory_rows(one)


def memory_rows(one: Choice) -> list[tuple[str, ...]]:
    """What the fullest rank's GB are for, the largest first, and what is beside them in its host's memory."""
    rows = _shares(one.held, HELD, one.memory, "{:.1f}", 1e-9)
    return [*rows, ("beside it, in the host's memory", f"{one.host / 1e9:.1f}", "")] if one.host else rows


def _shares(
    parts: Mapping[str, float], names: dict[str, str], whole: float, form: str, unit: float
) -> list[tuple[str, ...]]:
    return [
        (names[name], form.format(part * unit), f"{part / whole:.0%}")
        for name, part in sorted(parts.items(), key=lambda item: -item[1])
        if part / whole >= 0.005
    ]


def shares(one: Choice) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Rows of what a step's seconds and the fullest rank's GB are for, the largest first."""
    return (
        _shares(one.parts, PARTS, one.step, "{:.2f}", 1.0),
        memory_rows(one),
    )


def lost_by(answer: Answer) -> tuple[str, str]:
    """Headers of `losses`."""
    sizes = answer.aim is not None and answer.aim.objective.sizes
    return ("more" if sizes else "longer", "mostly by")


def losses(answer: Answer) -> list[tuple[str, ...]]:
    """Of each choice but the first how much more it is, and by what mostly, in seconds of the first's devices."""
    best, aim, learned = answer.choices[0], answer.aim, published()
    found: list[tuple[str, ...]] = []
    for i, one in enumerate(answer.choices[1:], start=2):
        each = one.devices / best.devices if aim is not None and aim.objective.sizes else 1.0
        more = {name: part * each - best.parts[name] for name, part in one.parts.items()}
        worst = max(more, key=more.__getitem__)
        lost = one.step / best.step - 1 if aim is None else _lost(aim, best, one)
        same = one.devices == best.devices and one.alike(best, learned)
        told = " (cannot be told apart from the first)" if same else ""
        found.append((str(i), f"{lost:.1%}{told}", f"{PARTS[worst]} ({more[worst]:+.2f} s)"))
    return found


def _lost(aim: Aim, best: Choice, one: Choice) -> float:
    """By the objective, or by the step where it is the same."""
    first, other = aim.value(best.devices, best.step), aim.value(one.devices, one.step)
    return other / first - 1 if other != first else one.step / best.step - 1


def otherwise(answer: Answer) -> list[tuple[str, ...]]:
    """The best step if something were otherwise, beside that of now on as many devices, and the mesh that has it."""
    best = answer.choices[0]
    return [
        (name, "nothing fits", "", "")
        if one is None
        else (name, f"{one.step:.2f} s", f"{one.step / best.step - 1:+.1%}", _changed(best, one))
        for name, one in answer.otherwise.items()
    ]


def _changed(now: Choice, one: Choice) -> str:
    """What of a strategy is not as now."""
    told = [one.mesh] if one.mesh != now.mesh else []
    if one.micro != now.micro:
        told.append(f"micro-batches of {one.micro}")
    if one.stages != now.stages and one.schedule:
        told.append(one.stages)
    if (one.expert, one.expert_tensor) != (now.expert, now.expert_tensor):
        told.append(f"EP {one.expert} x TP {one.expert_tensor}")
    if one.zero != now.zero:
        told.append(f"ZeRO {one.zero}")
    if one.again != now.again:
        told.append(again_words(one.again))
    if one.precision != now.precision:
        told.append(f"{one.precision} matmuls")
    return ", ".join(told) or "the same strategy"


def nothing_fits(answer: Answer) -> str:
    """By how much, and the smallest change of each kind that fits, in a sentence."""
    least = answer.smallest
    return (
        f"Nothing fits: a rank needs {(least.memory - safe(answer.limit)) / 1e9:.1f} GB more than is safe of "
        f"{answer.limit / 1e9:.1f}; {', or '.join(_would(answer))} would do"
    )


def _would(answer: Answer) -> list[str]:
    room = f"devices of {answer.smallest.memory * answer.limit / safe(answer.limit) / 1e9:.0f} GB"
    return [room, *(one.said for one in answer.would)]


def too_small(answer: Answer) -> list[tuple[str, ...]]:
    """By how much, and what would fit."""
    least = answer.smallest
    fixed = sum(part for name, part in least.held.items() if name in ("parameters", "gradients", "optimiser"))
    return [
        ("the least that a rank needs", f"{least.memory / 1e9:.1f} GB, of {answer.limit / 1e9:.1f}"),
        ("with", f"{least.mesh}, micro-batches of {least.micro}, ZeRO {least.zero}, {again_words(least.again)}"),
        ("too much by", f"{(least.memory - safe(answer.limit)) / 1e9:.1f} GB, so that nine of ten such runs fit"),
        ("of it states", f"{fixed / 1e9:.1f} GB"),
        *((("what would fit", "or")[at > 0], said) for at, said in enumerate(_would(answer))),
    ]
