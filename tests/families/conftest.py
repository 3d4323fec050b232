"""Fixtures of the tests of results with a modelling file."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.elsewhere import Elsewhere


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    """A process without gqa-convert."""
    process = Elsewhere(tmp_path_factory.mktemp("elsewhere"))
    yield process
    process.close()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny checkpoint of a type by a function, once with the same options; treat it as read-only."""
    made: dict[str, Path] = {}

    def make(function: Callable[..., Path], model_type: str, **options: Any) -> Path:
        key = repr((function.__name__, model_type, options))
        if key not in made:
            made[key] = function(model_type, tmp_path_factory.mktemp(model_type) / "source", **options)
        return made[key]

    return make
