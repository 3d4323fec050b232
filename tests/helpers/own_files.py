"""Tiny random checkpoints of the families that need a modelling file once converted: 12 query heads
in the decoder, a head width that is not hidden size / heads where a config has a key for it, random
biases and gains, weights large enough for attention to matter.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.tiny import make_config, make_model, randomise

_STATED = yaml.safe_load(Path(__file__).with_name("own_files.yaml").read_text())
SIZES: dict[str, dict[str, Any]] = _STATED["sizes"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    name: tuple(case) for name, case in _STATED["variants"].items()
}

_KEYS = {
    "AutoModelForImageTextToText": {"decoder", "vision_config"},
    "AutoModelForSpeechSeq2Seq": {"max_source_positions"},
    "AutoModelForSeq2SeqLM": {"encoder_layers", "d_kv"},
}
"""Sizes that only models of an auto class have."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    model_type: (model_type, {}) for model_type in SIZES
} | VARIANTS


def auto_class(model_type: str) -> str:
    """Name of transformers' auto class for language modelling."""
    sizes = SIZES.get(model_type, {}).keys()
    for auto, keys in _KEYS.items():
        if sizes & keys:
            return auto
    return "AutoModelForCausalLM"


def make_source_model(model_type: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """A stock model with random weights, biases and gains, in float32.

    Args:
        model_type: a key of `SIZES`, or a type that keeps its class.
        seed: of the weights.
        changes: config values besides or instead of those in `SIZES`.
    """
    if model_type not in SIZES:
        return make_model(make_config(model_type, **changes), seed=seed)
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(SIZES[model_type] | changes))
    model = (
        getattr(transformers, auto_class(model_type))
        .from_config(config, dtype=torch.float32)
        .eval()
    )
    fixed = [
        (parameter, parameter.detach().clone())
        for parameter in model.parameters()
        if not parameter.requires_grad
    ]
    randomise(model, seed)
    with torch.no_grad():
        for parameter, sinusoids in fixed:
            parameter.copy_(sinusoids)
        for name, buffer in model.named_buffers():
            if name.endswith("final_logits_bias"):
                buffer.normal_(generator=torch.Generator().manual_seed(seed))
    return model


def make_source(
    model_type: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shards: str | int = "50GB",
    **changes: Any,
) -> Path:
    """Save a tiny random stock model, in the names that transformers writes.

    Args:
        model_type: a key of `SIZES`, or a type that keeps its class.
        folder: where to.
        dtype: of the weights.
        seed: of the weights.
        shards: size of a shard, at most.
        changes: config values besides or instead of those in `SIZES`.

    Returns:
        The folder.
    """
    make_source_model(model_type, seed=seed, **changes).to(dtype).save_pretrained(
        folder, max_shard_size=shards
    )
    return folder


def load_stock(folder: Path, model_type: str, auto: str | None = None, **options: Any) -> nn.Module:
    """Load a source with transformers' own class."""
    stock = getattr(transformers, auto or auto_class(model_type))
    return stock.from_pretrained(folder, **({"dtype": torch.float32} | options)).eval()
