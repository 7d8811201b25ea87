"""Fused operators are tested by both of their back ends."""

import pytest


@pytest.fixture(params=["kernels", "plain"])
def back_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test by both; torch's operators are taken where kernels were not asked for."""
    if request.param == "kernels":
        pytest.importorskip("triton")
    else:
        monkeypatch.delenv("TRITON_INTERPRET")
    return request.param
