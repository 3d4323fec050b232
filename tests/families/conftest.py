"""Fixtures of the tests of results with a modelling file."""

from collections.abc import Iterator

import pytest

from tests.helpers.elsewhere import Elsewhere


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    """A process without gqa-convert."""
    process = Elsewhere(tmp_path_factory.mktemp("elsewhere"))
    yield process
    process.close()
