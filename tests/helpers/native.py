"""Cases of the families whose results load in transformers' own classes."""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoModelForCausalLM

from gqa_convert.families.table import FAMILIES

TOKENS = torch.tensor([[0, 0, 7, 33, 12, 50, 9], [5, 21, 60, 3, 44, 18, 27]])

_STATED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
OPTIONS = {name: (name.partition(",")[0], values) for name, values in _STATED["options"].items()}
"""Variants of a family that concern K/V heads: model type and config values."""

NATIVE = sorted(model_type for model_type, family in FAMILIES.items() if family.native)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    model_type: (model_type, {}) for model_type in NATIVE
} | OPTIONS

REPRESENTATIVE = tuple(_STATED["representative"])


def load(folder: Path) -> nn.Module:
    """Load a model in float32, and assert that the folder has every parameter and no other."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, as a share of the expected values' standard deviation."""
    return float((found - expected).abs().max() / expected.std())
