"""Every engine has everything that docs/developing.md asks for, and a forgotten step is named."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from gqa_convert.serving.engines import ENGINES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_complete(name: str) -> None:
    module = import_module(ENGINES[name].module)
    assert hasattr(module.Adapter, "generate"), "step 1: the Adapter generates tokens"
    assert hasattr(module.Adapter, "logits"), "step 1: the Adapter computes logits"
    assert name in (ROOT / "gqa_convert/cli/check_serving.py").read_text(), (
        "step 3: the help of --engine names it"
    )
    guide, types = (
        (ROOT / file).read_text() for file in ("docs/serving-and-publishing.md", "pyproject.toml")
    )
    (columns,) = re.findall(r"^\| \| .*llama\.cpp.*$", guide, re.MULTILINE)
    assert name in columns.lower(), "step 4: the table of engines in the guide has a column for it"
    (untyped,) = re.findall(r"^module = \[\"accelerate.*$", types, re.MULTILINE)
    assert module.__file__ is not None
    imported = re.findall(
        r"^ +(?:from|import) (\w+)", Path(module.__file__).read_text(), re.MULTILINE
    )
    for package in {*imported} - {"numpy"}:
        assert f'"{package}.*"' in untyped, (
            "step 5: pyproject.toml lists it among the packages without types"
        )
