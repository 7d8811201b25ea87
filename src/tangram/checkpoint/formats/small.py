"""Small files that lie beside weights: configuration, tokenizer, and where a conversion has come from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tangram.checkpoint.commits import read_bounded

LARGEST_SMALL = 1 << 28
"""Bytes of a configuration or tokenizer file that is read."""
SMALL = (".json", ".txt", ".model", ".jinja")
"""How the names of those files end."""
PROVENANCE = "provenance.json"
NOT_OURS = ("metadata.json", "manifest.json", "tangram.json")
"""Indexes of formats, which are not carried along."""


def small_files(path: Path) -> dict[str, bytes]:
    """Configuration and tokenizer of a directory."""
    found: dict[str, bytes] = {}
    for file in sorted(path.iterdir()):
        ours = file.name.endswith(".index.json") or file.name.startswith(".") or file.name in NOT_OURS
        if file.suffix in SMALL and file.is_file() and not ours:
            found[file.name] = read_bounded(file.resolve(), LARGEST_SMALL)
    return found


def with_provenance(small: Mapping[str, bytes], fields: Mapping[str, Any]) -> dict[str, bytes]:
    """The same with a file that says what was converted and how; what it says already of earlier ones stays inside."""
    before: list[Any] = []
    if PROVENANCE in small:
        try:
            told: Any = json.loads(small[PROVENANCE])
        except ValueError:
            told = {"unreadable": small[PROVENANCE].decode(errors="replace")}
        before = [told]
    text = json.dumps({**fields, **({"before": before[0]} if before else {})}, indent=1)
    return {**small, PROVENANCE: text.encode()}
