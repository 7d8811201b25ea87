"""What holds for every test: how hard hypothesis searches, one thread for torch, and which tests run (tests/selection).

HYPOTHESIS_PROFILE chooses the search: `dev` is quick and draws new examples each time, `ci` (the default where CI is
set) runs the same for the same test, so that what fails there is the change's, and `thorough` is for a night and
draws new ones. None has a deadline: a busy machine is no bug. A failure prints how to repeat it.
"""

import gc
import importlib.util
import os
import pkgutil
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tangram.kernels import compiled
from tests.selection import plugin

settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), max_examples=50, derandomize=True, print_blob=True)
settings.register_profile("thorough", settings.get_profile("dev"), max_examples=3000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

os.environ["TANGRAM_HISTORY"] = ""  # what tests train is not remembered, nor does what was measured here change them
torch.set_num_threads(1)  # tests run side by side; more threads than cores make all of them slower
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and so would ranks


# Triton is loaded under its interpreter, which has to be asked for before: by the conftest.py of a folder that pytest
# is told of, which runs between here and pytest_configure, or else there. No longer, for ranks inherit it.
INTERPRET = "TRITON_INTERPRET"
_before = os.environ.get(INTERPRET)
os.environ[INTERPRET] = "1"


def _load_kernels() -> None:
    if importlib.util.find_spec("triton") is not None:
        for module in pkgutil.iter_modules(compiled.__path__):
            importlib.import_module(f"{compiled.__name__}.{module.name}")


def pytest_configure(config: pytest.Config) -> None:
    plugin.configure(config)
    config.pluginmanager.register(plugin.ForWorkers())
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        _load_kernels()  # not where others run the tests
    if _before is None:
        del os.environ[INTERPRET]


def pytest_addoption(parser: pytest.Parser) -> None:
    plugin.add_options(parser)


def pytest_report_header(config: pytest.Config) -> str | None:
    return plugin.header(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return plugin.ignores(collection_path, config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    plugin.deselect(config, items)


SEEN = pytest.StashKey[list[tuple[str, str]]]()


@pytest.fixture
def capsys(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> pytest.CaptureFixture[str]:
    """pytest's, which keeps what a test reads: where it fails, the report shows what a user would have seen."""
    seen = request.node.stash.setdefault(SEEN, [])
    read = capsys.readouterr

    def readouterr() -> Any:
        printed = read()
        seen.append((printed.out, printed.err))
        return printed

    monkeypatch.setattr(capsys, "readouterr", readouterr)
    return capsys


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for place, streams in enumerate(item.stash.get(SEEN, list[tuple[str, str]]()), 1):
            for name, text in zip(("stdout", "stderr"), streams, strict=True):
                if text:
                    report.sections.append((f"what a user sees: {name}, read {place}", text))
    return report


def pytest_collection_finish() -> None:
    """What stands after the collection, stays: the collector of garbage need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else Triton says at the end that it is still held
