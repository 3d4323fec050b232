"""Fixtures of the verifier's tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """transformers copies the code of checkpoints to a folder and imports it from there."""
    from transformers import dynamic_module_utils

    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            patch.delitem(sys.modules, name)  # they look for code in an earlier folder
        yield folder
