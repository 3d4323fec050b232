"""Settings and fixtures of the whole suite."""

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from gqa_convert.runtime.machine import STATED

pytest.register_assert_rewrite("tests.helpers")

# How long an example takes says nothing where other programs run.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

# Two workers share the machine's cores, and tiny models gain nothing from threads. This has to be
# set before anything imports torch, and subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of processes import the package, and would spend most of that time on compiling it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell ignores SIGINT in what it runs in the background, and nohup SIGHUP, for all children:
# tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


EXPECTED_SKIPS = ("only root may mount file systems", "tmpfs can't be mounted here")
"""How the reasons begin for which a machine may skip a test. `-ra` prints every skip; another
reason is a failure.
"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        assert isinstance(report.longrepr, tuple)
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(EXPECTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = (
                f"add the reason to EXPECTED_SKIPS in tests/conftest.py, or do not skip: {reason}"
            )
    return report


def pytest_collection_finish() -> None:
    """Evaluations and benchmarks collect garbage, which need not be sought among all modules and
    tests each time.
    """
    gc.freeze()


@pytest.fixture(autouse=True)
def environment_restored() -> Iterator[None]:
    """A variable that the code under test or a library sets ends with the test that set it."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(params=[True, False], ids=["fast bfloat16", "slow bfloat16"])
def fast_bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor has instructions for bfloat16: what depends on it is tested under
    both answers.
    """
    monkeypatch.setenv(STATED, json.dumps({"bfloat16": request.param}))
    return bool(request.param)


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """No test waits for `fsync`: it matters when the machine dies, not when a process does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module")
def modeling_files_registered() -> None:
    """Results with a modelling file load from the package's copy of it."""
    from gqa_convert.families import modeling  # imports torch

    modeling.register_modeling()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny checkpoint of a type, or of another name, by a function, once with the same
    options; treat it as read-only.
    """
    made: dict[str, Path] = {}

    def make(function: Callable[..., Path], kind: str, **options: Any) -> Path:
        key = repr((function.__name__, kind, options))
        if key not in made:
            made[key] = function(kind, tmp_path_factory.mktemp("once") / "source", **options)
        return made[key]

    return make
