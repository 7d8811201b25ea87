"""`tangram doctor`: what this machine has, and what will work on it."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.output import print_json, print_table, progress
from tangram.errors import UserError
from tangram.text import write_file

MOST_RANKS = 64


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the compiler, which takes many seconds.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure kernels and collectives into a cluster's file, --out, and stop.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="Of --measure: of so many ranks; 0: the accelerators, or two.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Of --measure: where the file is written.")] = None,
) -> int:
    """Say what this machine has and try what will work on it; exit code 1 if something is wrong that all need."""
    if measure:
        return _measure(ranks, out, json=json)
    with progress("looking at the machine") as status:
        from tangram.hardware.host.machine import describe, versions
        from tangram.hardware.measuring.checks import Check, all_checks

        machine, found = describe(), versions()
        checks: list[Check] = []
        for check in all_checks(machine, quick):
            checks.append(check)
            status.update(f"looking at the machine: {check.name} {check.status}")
    works = all(check.status == "ok" for check in checks if check.needed)
    if json:
        rows = [check.as_json() for check in checks]
        print_json({"versions": found, "machine": machine.as_json(), "checks": rows, "works": works})
    else:
        print_table("Versions", ("what", "version"), [(name, text or "missing") for name, text in found.items()])
        print_table("Machine", ("what", "found"), list(machine.in_words().items()))
        print_table(
            "Checks", ("check", "result", "why"), [(check.name, check.status, check.detail) for check in checks]
        )
    return 0 if works else 1


def _measure(ranks: int, out: Path | None, *, json: bool) -> int:
    if out is None or not out.resolve().parent.is_dir() or out.is_dir():
        raise UserError("--measure writes a cluster's file: give one with --out, in a folder that is there")
    if ranks < 0 or ranks > MOST_RANKS:
        raise UserError(f"--ranks {ranks}: measure for 1 to {MOST_RANKS}")
    with progress("loading torch") as status:
        from tangram.hardware.host.machine import accelerators
        from tangram.hardware.measuring.measured import measured

        kinds = [one.kind for one in accelerators()]
        device = kinds[0] if kinds else "cpu"
        found = measured(device, ranks or len(kinds) or 2, lambda what: status.update(f"measuring {what}"))
    write_file(out, found.text(), "the file")
    if json:
        print_json(
            {"file": str(out), "name": found.name, "ranks": found.ranks, "curves": list(map(asdict, found.fits))}
        )
        return 0
    rows = [
        (one.kind, one.of, str(one.rows), f"{one.median:.0%}", f"{one.worst:.0%}", f"{one.held_out:.0%}")
        for one in found.fits
    ]
    headers = ("curve", "of", "measured", "median error", "90 % within", "held-out half")
    print_table(f"{found.name}, as one of {found.ranks} ranks", headers, rows)
    print(f"wrote {out}: tangram plan JOB --cluster {out}")
    return 0
