"""A pytest plugin for mutants: hypothesis stops at the first failure, and the code under test is the mutated one."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "mutants",
    deadline=None,
    max_examples=20,  # two fifths of the quick profile: as many as each mutant needs, and repeatable
    phases=(Phase.explicit, Phase.generate),  # no shrinking: that a test fails is enough
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def pytest_configure() -> None:
    """Refuse to run where another copy of tangram would be tested."""
    import tangram

    here = Path(tangram.__file__).resolve()
    if not here.is_relative_to(Path(os.environ["MUTANT_SOURCE"]).resolve()):
        pytest.exit(f"{here} is not the mutated copy", returncode=3)
