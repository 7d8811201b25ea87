"""`tangram shard`: prove the op rules, or DTensor's; say which rule an operator has."""

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from tangram.cli.grouped import Json
from tangram.cli.output import print_json, print_table
from tangram.errors import UserError

if TYPE_CHECKING:
    from tangram.sharding.proof.execute import ProofVerdict


class _Group(TyperGroup):
    """`tangram shard MODEL` is `tangram shard model MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command's name before a first word that is none."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["model", *args]
        return super().parse_args(ctx, args)


shard = typer.Typer(cls=_Group)

Samples = Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Gives arguments of calls to try.")]
Imports = Annotated[list[str] | None, typer.Option("--import", metavar="MODULE", help="Defines operators.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="[OPERATOR]...", help="Only these, as aten calls them.")]


@shard.callback(invoke_without_command=True)
def _none(context: typer.Context) -> None:
    """Derive the layouts of a model (`tangram shard MODEL`), prove op rules, and look at them."""
    if context.invoked_subcommand is None:
        raise UserError("give a model, or one of check, discover, rule and sweep; --help lists them")


@shard.command()
def model(
    name: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A preset, a Hugging Face directory, a type, or FILE.py:function."),
    ],
    mesh: Annotated[str, typer.Option(metavar="MESH", help="As in 'dp=2 tp=4'.")],
    mark: Annotated[list[str] | None, typer.Option(metavar="'NAME: LAYOUT'", help="May be repeated.")] = None,
    marks: Annotated[Path | None, typer.Option(metavar="FILE", help="Marks, one a line.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples.")] = 8,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of each, where it has tokens.")] = 4096,
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a field of the configuration.")] = None,
    why: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Explain one tensor: a parameter, MODULE, MODULE:OPERATOR or file.py:LINE."),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="FILE FILE", help="Compare two files of marks; `shipped`: those that come with Tangram."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page for a browser.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Weigh work and bytes by this cluster's rates, by axis.")
    ] = None,
    choose: Annotated[
        bool, typer.Option("--choose", help="Choose the quickest plan for the cluster; marks only bind what they name.")
    ] = False,
    memory: Annotated[
        str | None, typer.Option(metavar="80GB", help="With --choose: of a rank; else what the cluster's devices have.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="With --choose: how long to look for it.")] = 10.0,
    optimiser: Annotated[
        float, typer.Option(min=0.0, help="With --choose: bytes of the optimiser's states for each parameter.")
    ] = 12.0,
    micro_batches: Annotated[
        int, typer.Option(min=1, help="With --choose: how many there are before gradients are summed.")
    ] = 1,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --choose: write it as marks, for --marks; see --job.")
    ] = None,
    job: Annotated[
        Path | None, typer.Option(metavar="JOB", help="With --write: write a plan of this job, for `tangram train`.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules for operators of your own, as `discover` writes them.")
    ] = None,
    samples: Samples = None,
    imports: Imports = None,
    json: Json = False,
) -> None:
    """Derive the layout of every tensor of a model from marks on a few. (`model` may be left out.)"""
    from tangram.cli.choose import Choosing
    from tangram.cli.derive import DeriveOptions, OwnOperators, derive_model

    if memory is not None and not choose:
        raise UserError("--memory limits what is chosen: give --choose, too")
    if write is not None and not choose:
        raise UserError("--write writes what is chosen: give --choose, too")
    if job is not None and write is None:
        raise UserError("--job is what a plan is written for: give --write with its file, too")
    choosing = Choosing(memory, seconds, optimiser, micro_batches, write, job) if choose else None
    if samples is not None and rules is None:
        raise UserError("--samples are what rules are proved with: give --rules with their file, too")
    own = OwnOperators(rules, lambda: _function(samples, imports))
    given = mark or (), marks, batch, sequence, change or ()
    derive_model(DeriveOptions(name, mesh, *given, why, diff, html, json, cluster, choosing, own))


@shard.command()
def check(
    operators: Names = None,
    rules: Annotated[Path | None, typer.Option(metavar="FILE", help="Rules of your own, a line each.")] = None,
    against: Annotated[
        Literal["dtensor", "paddle"] | None, typer.Option(help="Show where DTensor's or Paddle's rules are wrong.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="A script of each case that is wrong.")] = None,
    with_rules: Annotated[bool, typer.Option("--with-rules", help="With --against: our rules in DTensor.")] = False,
    samples: Samples = None,
    imports: Imports = None,
    mutants: Annotated[int, typer.Option(metavar="N", help="Plant every N-th mistake; the proof must find it.")] = 0,
    json: Json = False,
) -> None:
    """Prove the rules by numbers: every cut that they allow, forward and backward, beside the whole operator."""
    if against == "paddle":
        if with_rules or save is not None:
            raise UserError("--save and --with-rules are for cases that run: leave them out, or give --against dtensor")
        _against_paddle(operators or (), json)
        return
    if against is not None:
        _against(operators, save, with_rules, json)
        return
    if with_rules:
        raise UserError("--with-rules goes with --against, which has cases to run")
    if mutants:
        _mutants(operators or (), mutants, json)
        return
    given = _function(samples, imports)
    from tangram.sharding.discover import calls_to_prove, own_calls
    from tangram.sharding.proof.prove import prove, prove_calls, table_with

    own = own_calls(operators or (), given)
    own = {name: calls_to_prove(calls, calls[0].operator, table_with(rules)) for name, calls in own.items()}
    verdicts = prove_calls(own, rules) if own else prove(operators or (), rules)
    wrong = [v for v in verdicts if v.kind not in ("proved", "whole", "unproved")]
    if save is not None:
        from tangram.sharding.proof.counterexample import save_all

        lines = [f"import {name}" for name in imports or ()]
        lines += [f"import runpy\n\nrunpy.run_path({samples.rpartition(':')[0]!r})"] if samples else []
        save_all(save, [v.operator for v in wrong], rules, own, lines)
    if json:
        print_json({"operators": [vars(v) for v in verdicts], "proved": not wrong})
    else:
        _tell(verdicts, wrong)
    if wrong:
        raise typer.Exit(1)


def _tell(verdicts: "Sequence[ProofVerdict]", wrong: "Sequence[ProofVerdict]") -> None:
    counts = Counter(v.kind for v in verdicts)
    rows: list[tuple[str, ...]] = []
    for kind, n in counts.most_common():
        own = [v for v in verdicts if v.kind == kind]
        sides = [v.gradients for v in own], [v.without for v in own]
        taken = [sum(max(one.values(), default=0) for one in side) for side in sides]
        rows.append((kind, str(n), str(sum(v.cases for v in own)), *map(str, taken)))
    print_table("Op rules", ("verdict", "operators", "cases", "with gradients", "torch refuses a gradient"), rows)
    refused = [f"{v.operator} ({', '.join(v.without)})" for v in verdicts if v.without]
    if refused:
        print(f"gradients that torch refuses: {', '.join(refused)}")
    for verdict in verdicts:
        if verdict.kind == "unproved":
            print(f"{verdict.operator}: unproved: {verdict.why}")
    for verdict in wrong:
        print(f"{verdict.operator}: {verdict.kind}: {verdict.why}")


@shard.command()
def sweep(
    entries: Annotated[
        list[str] | None, typer.Argument(metavar="[ENTRY]...", help="Only these of torch's names.")
    ] = None,
    json: Json = False,
) -> None:
    """Call all of torch's database as a user does, on two simulated ranks; compare results and gradients."""
    from tangram.sharding.proof.database import sweep as run

    found = run(entries or ())
    if json:
        print_json({"entries": [vars(one) for one in found]})
        return
    counts = Counter(one.kind for one in found)
    rows = [(kind, str(n), str(sum(o.cases for o in found if o.kind == kind))) for kind, n in counts.most_common()]
    print_table("Torch's database on two ranks", ("verdict", "entries", "cases"), rows)
    for one in found:
        if one.kind in ("wrong", "refused", "crashed"):
            print(f"{one.name}: {one.kind}: {one.why}")


def _mutants(operators: Sequence[str], every: int, json: bool) -> None:
    from tangram.sharding.proof.mutate import score

    found = score(operators, every)
    missed = [m for m in found if not m.found]
    if json:
        print_json({"mutants": [vars(m) for m in found], "found": len(found) - len(missed), "of": len(found)})
    else:
        print(f"the proof found {len(found) - len(missed)} of {len(found)} planted mistakes")
        for mutant in missed:
            print(f"not found: {mutant.operator}: {mutant.what}: {mutant.rule}")


def _against(names: Sequence[str] | None, save: Path | None, with_rules: bool, json: bool) -> None:
    from tangram.sharding import compare as against

    cases = {case.name: case for case in against.CASES}
    unknown = [name for name in names or () if name not in cases]
    if unknown:
        raise UserError(f"there is no case {unknown[0]}, but {', '.join(cases)}")
    found = against.run([cases[name] for name in names] if names else None, save=save, fixed=with_rules)
    if json:
        print_json({"cases": [_plain(one) for one in found]})
        return
    rows = [(o.name, o.verdict, str(o.expected), str(o.got)) for o in found]
    print_table(
        f"DTensor of the installed torch{' with our rules' * with_rules}",
        ("case", "verdict", "plain torch", "DTensor"),
        rows,
    )


def _against_paddle(names: Sequence[str], json: bool) -> None:
    from tangram.sharding.compare import paddle

    reports, differences = paddle.compare(names)
    wrong = [one for one in differences if one.verdict.startswith("ours") and one.verdict != "ours is right"]
    if json:
        print_json({"operators": [_plain(one) for one in reports], "differences": [_plain(one) for one in differences]})
    else:
        rows = [(one.paddle, one.aten, str(one.cases), str(one.agree)) for one in reports if one.agree < one.cases]
        cases, agree = sum(one.cases for one in reports), sum(one.agree for one in reports)
        title = f"Paddle's rules: {len({one.paddle for one in reports})} operators, {cases} cuts, the same in {agree}"
        print_table(title, ("Paddle", "aten", "cuts", "the same"), rows)
        for one, others in paddle.first_of_each(differences):
            print(f"{one}{f' ({others} more cuts alike)' if others else ''}")
        print(", ".join(f"{verdict}: {n}" for verdict, n in Counter(o.verdict for o in differences).most_common()))
    if wrong:
        raise typer.Exit(1)


def _plain(outcome: Any) -> dict[str, Any]:
    return {key: getattr(outcome, key) for key in outcome.__dataclass_fields__}


@shard.command()
def rule(
    operator: Annotated[str, typer.Argument(help="As aten calls it, as sum.dim_IntList.")], json: Json = False
) -> None:
    """Show the rule of an operator, and where it stands."""
    from tangram.sharding.ops.rule_table import rules_of

    rows = rules_of(operator)
    if json:
        print_json({"rules": [dict(zip(("operator", "rule", "where"), row, strict=True)) for row in rows]})
    else:
        print_table("Op rules", ("operator", "rule", "where"), rows)


@shard.command()
def discover(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OPERATOR]...", help="As aten calls it, or as namespace::name.")
    ] = None,
    samples: Samples = None,
    imports: Imports = None,
    every: Annotated[bool, typer.Option("--all", help="Report valid cuts that the table does not allow.")] = False,
    json: Json = False,
) -> None:
    """Run an operator on cut inputs and propose its rule, proved."""
    if every:
        _gaps(json)
        return
    if not operators:
        raise UserError("name an operator, or give --all")
    given = _function(samples, imports)
    from tangram.sharding.discover import discover as find

    found = [one for operator in operators for one in find(operator, given)]
    if json:
        print_json({"proposals": [vars(one) for one in found]})
        return
    for one in found:
        for line in one.lines:
            print(line)
        if not one.lines:
            print(f"# {one.operator}: no rule: {one.why}")
        for remark in one.remarks:
            print(f"#   {remark}")


def _gaps(json: bool) -> None:
    from tangram.sharding.discover.report import gaps

    found = gaps()
    if json:
        print_json({"gaps": [vars(gap) for gap in found]})
        return
    print_table(
        "Valid but not in the table",
        ("operator", "cut", "calls", "why whole"),
        [(gap.operator, gap.cut, str(gap.calls), gap.reason) for gap in found],
    )


def _function(samples: str | None, imports: Sequence[str] | None) -> "Callable[[], Iterable[Any]] | None":
    """What `--samples FILE.py:function` names, once the modules are imported that define operators."""
    sys.path.insert(0, str(Path.cwd()))
    for name in imports or ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"--import {name}: {error}") from None
        except Exception as error:  # noqa: BLE001  the author's module may raise anything
            raise UserError(f"--import {name}: {type(error).__name__}: {error}".splitlines()[0]) from None
    if samples is None:
        return None
    path, _, name = samples.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"--samples {samples}: give FILE.py:function, of a file that is there")
    from tangram.models.building.code import function_of

    return function_of(path, name, f"--samples {samples}")
