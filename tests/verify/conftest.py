"""Fixtures of the verifier's tests."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from tests.helpers.verification import Made
from tests.helpers.verify_sources import SOURCES, save_source


@pytest.fixture(scope="module", autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """transformers copies the code of checkpoints to a folder and imports it from there."""
    from transformers import dynamic_module_utils

    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        other = [
            path for path in sys.path if (Path(path) / "transformers_modules").is_dir()
        ]  # found before this one
        patch.setattr(sys, "path", [path for path in sys.path if path not in other])
        for name in [
            name for name in sys.modules if name.partition(".")[0] == "transformers_modules"
        ]:
            patch.delitem(sys.modules, name)  # they look for code in an earlier folder
        yield folder


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """(OUT, SOURCE) of a conversion, by the name of the source and the number of K/V heads; treat
    both as read-only.
    """
    root = tmp_path_factory.mktemp("verify")
    numbers = torch.randint(0, 47, (40, 60), generator=torch.Generator().manual_seed(3)).tolist()
    (root / "text.txt").write_text(
        "\n".join(" ".join(f"w{number}" for number in line) for line in numbers)
    )
    text = CalibrationOptions(
        source=root / "text.txt", tokens=1000, sequence_length=30, steps=20, mix=False
    )
    results: dict[str, Path] = {}

    def make(name: str, groups: int, method: str = "mean", **options: Any) -> tuple[Path, Path]:
        source, key = root / name, repr((name, groups, method, options))
        if not source.exists():
            save_source(name, source)
        if key not in results:
            results[key] = root / f"out-{len(results)}"
            options = (
                {"native": SOURCES[name].native}
                | ({"calibration": text} if method == "fit" else {})
                | options
            )
            convert_checkpoint(
                source, results[key], groups, ConversionOptions(method=method, **options)
            )
        return results[key], source

    return make
