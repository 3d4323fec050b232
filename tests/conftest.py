"""Settings and fixtures of the whole suite."""

import os
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.helpers")

# Two workers share the machine's cores, and tiny models gain nothing from threads. This has to be set before anything
# imports torch, and subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def modeling_files_registered() -> Iterator[None]:
    """Results with a modelling file load from the package's copy of it, and no test waits for `fsync`."""
    from gqa_convert.families import modeling  # imports torch

    modeling.register_modeling()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
