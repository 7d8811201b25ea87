"""The bench of fused operators: its rows, and the page's table."""

from pathlib import Path

import pytest

from bench import fused
from bench._fused import study
from tangram.errors import UserError

MARKS = "# Title\n<!-- errors -->\nold\n<!-- end of errors -->\nkept\n"


def test_rows_and_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(study, "LARGE", study.Sizes(16, 64, 40))
    page = tmp_path / fused.NAME
    page.write_text(MARKS)
    rows = {row.figure: row for row in fused.rows(False, tmp_path)}
    text = page.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("kept\n")
    assert "old" not in text
    for figure in ("RMSNorm: y", "SwiGLU: dgate", "RoPE: dk", "projected loss: losses"):
        assert rows[figure].ours < rows[figure].peers["transformers"], figure
    line = next(line for line in text.splitlines() if line.startswith("| RMSNorm | y |"))
    assert float(line.split("|")[4]) == pytest.approx(rows["RMSNorm: y"].ours, rel=0.01)
    assert rows["NVFP4: values"].ours > rows["FP8, 1 x 128: values"].ours > 0.1


def test_options_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave --quick out"):
        next(iter(fused.rows(True, tmp_path)))
    with pytest.raises(UserError, match=r"holds no fused\.md"):
        next(iter(fused.rows(False, tmp_path)))
