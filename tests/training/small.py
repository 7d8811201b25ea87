"""A model, a text and a plan small enough for tests."""

from pathlib import Path
from typing import Any

import tomli_w

from tangram.schema.plan import Plan

WORLD = 2
SMALL_MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def write_text(folder: Path) -> Path:
    """Files of many lengths, most of them far from a multiple of the sequence, so that samples count unequal tokens."""
    for number in range(24):
        lines = [f"value_{i} = {i * number} + {number}" for i in range(1 + 5 * number % 17)]
        (folder / "deep" / f"{number % 3}").mkdir(parents=True, exist_ok=True)
        (folder / "deep" / f"{number % 3}" / f"file{number}.py").write_text("\n".join(lines))
    return folder


def small_plan(text: Path, **changes: dict[str, Any]) -> Plan:
    """A plan on `text`; `changes` are keys of its tables, or whole values of keys outside tables."""
    return Plan.model_validate(small_tables(text, **changes))


def plan_file(path: Path, text: Path, **changes: dict[str, Any]) -> Path:
    """The plan as a file."""
    path.write_text(tomli_w.dumps(small_tables(text, **changes)))
    return path


def small_tables(text: Path, **changes: Any) -> dict[str, Any]:
    """The tables of a plan as its file would have them."""
    tables: dict[str, Any] = {
        "version": 3,
        "seed": 3,
        "mesh": f"dp={WORLD}",
        "axes": {"data": ["dp"]},
        "layouts": {"parameters": {"*": "_/dp ..."}},
        "model": {"preset": "qwen3-1m", "change": SMALL_MODEL},
        "data": {
            "sources": [{"path": str(text), "pattern": "**/*.py"}],
            "cache": str(text.parent / "tokens"),
            "held_out": 0.3,
            "held_out_samples": 13,
            "sequence": 32,
            "global_batch": 8,
            "micro_batch": 2,
        },
        "optimiser": {"lr": 1e-2, "warmup_steps": 1, "weight_decay": 0.1},
        "run": {"steps": 3, "device": "cpu"},
    }
    for table, keys in changes.items():
        tables[table] = {**tables.get(table, {}), **keys} if isinstance(keys, dict) else keys
    return tables
