"""`tangram shard MODEL`: capture a model, derive its layouts from marks, print them by module."""

import time
from pathlib import Path

from tangram.cli.output import print_json, print_table, progress
from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.planner.read import changes_of


def derive_model(
    name: str, mesh: str, marks: list[str], file: Path | None, batch: int, sequence: int, changes: list[str], json: bool
) -> None:
    """Print what follows from the marks."""
    from tangram.sharding.derive.marks import Mark, marks_of, read_marks

    axes = Mesh.parse(mesh)
    given = [*(read_marks(file) if file else []), *map(Mark.parse, marks)]
    from tangram.models.capture import capture
    from tangram.models.costs import block_names
    from tangram.models.fold import folded
    from tangram.models.named import named_config, on_meta, token_inputs
    from tangram.sharding.derive.derive import derive
    from tangram.sharding.derive.show import amount, as_json, tables, total

    with progress("capturing"):
        config = named_config(name, changes_of(changes))
        given = given or marks_of(str(config.model_type)) or []
        if not given:
            raise UserError(
                f"no marks come with Tangram for a {config.model_type} model: give some, as in "
                "--mark '*.q_proj.weight: out/tp in', or a file of them with --marks"
            )
        model = on_meta(config)
        start = time.perf_counter()
        graph = folded(capture(model, token_inputs(batch, sequence)), block_names(model))
        captured = time.perf_counter()
        found = derive(graph, given, axes)
        derived = time.perf_counter()
    if json:
        print_json({**as_json(found), "seconds": {"capture": captured - start, "derive": derived - captured}})
        return
    for title, headers, rows in tables(found):
        print_table(title, headers, rows)
    print(
        f"a rank receives {amount(total(found))}; {len(graph.nodes)} operators captured in {captured - start:.1f} s, "
        f"layouts of {len(graph.values)} tensors derived in {derived - captured:.2f} s"
    )
