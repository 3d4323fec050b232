"""Sources as the Hub has them: planned, converted, verified, fitted, and loaded with
transformers.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.families.loading import load_model
from gqa_convert.verify import verify_checkpoint
from tests.helpers.fitting import fitted
from tests.helpers.hub_sources import CONFIGS, HUB_SOURCES, write_hub_source
from tests.helpers.verification import failed

pytestmark = pytest.mark.usefixtures("modeling_files_registered")


@pytest.mark.parametrize("name", HUB_SOURCES)
def test_the_result_computes_what_the_source_computes_with_repeated_heads(
    name: str, once: Callable[..., Path], tmp_path: Path
) -> None:
    source, row, out = once(write_hub_source, name), HUB_SOURCES[name], tmp_path / "out"
    convert_checkpoint(source, out, 3, ConversionOptions(method="mean"))
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == (row.type_of_copy or CONFIGS[name]["model_type"])
    assert failed(verify_checkpoint(out, source)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, source in HUB_SOURCES.items() if source.fit])
def test_two_steps_of_fit(name: str, once: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    fitted(once(write_hub_source, name), out, 3, steps=2)
    assert load_model(out, torch.float32)[1] == []
