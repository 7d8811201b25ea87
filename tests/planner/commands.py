"""What tests of `tangram plan` share."""

import pytest

from tangram.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence on stderr."""
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err
