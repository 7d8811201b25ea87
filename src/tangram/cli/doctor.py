"""`tangram doctor`: what this machine has, and what will work on it."""

from typing import Annotated

import typer

from tangram.cli.output import print_json, print_table, progress

__all__ = ["doctor"]


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the compiler, which takes many seconds.")] = False,
) -> int:
    """Say what this machine has and try what will work on it; exit code 1 if something is wrong that all need."""
    with progress("looking at the machine") as status:
        from tangram.hardware.checks import Check, all_checks
        from tangram.hardware.machine import describe, versions

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
