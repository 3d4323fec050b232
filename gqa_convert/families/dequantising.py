"""Writes quantised weights as an ordinary checkpoint, through the readers of transformers.

transformers dequantises while it loads. It refuses to save a model that it read in this way, so that the weights are put
into a new model of the same class first, which copies nothing.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.quantised import RESTORED, quantisation_method, without_quantisation
from gqa_convert.checkpoint.resource_errors import is_out_of_memory
from gqa_convert.checkpoint.source import CONFIG
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import CorruptCheckpointError, GQAConvertError, MissingExtraError
from gqa_convert.families.legacy_config_keys import legacy_config_keys
from gqa_convert.families.loading import auto_class, no_bars, no_warnings, read_config

_SHARD = "5GB"


def write_restored(checkpoint_folder: Path, folder: Path, source_id: str) -> None:
    """Write the weights of a quantised checkpoint dequantised, with its config without the quantisation.

    Args:
        checkpoint_folder: the checkpoint.
        folder: where to write.
        source_id: the checkpoint in messages.

    Raises:
        MissingExtraError: the package of the quantisation method is not installed.
        CorruptCheckpointError: transformers cannot load the checkpoint.
    """
    import torch
    import transformers

    config = read_config(checkpoint_folder)
    method = quantisation_method(config)
    assert method in RESTORED, method
    _check_installed(method)
    with _explained(source_id), no_bars(), no_warnings():
        loader = getattr(transformers, auto_class(config))
        loaded = loader.from_pretrained(
            checkpoint_folder,
            dtype=torch.bfloat16,
            trust_remote_code=False,
            local_files_only=True,
            **_options_of(method),
        )
        if method == "bitsandbytes":
            loaded = loaded.dequantize(dtype=torch.bfloat16)
        _save(loaded, folder)
    plain = without_quantisation(config)
    (folder / CONFIG).write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _options_of(method: str) -> JsonObject:
    import transformers

    if method == "bitsandbytes":
        return {}
    kinds: dict[str, Callable[..., Any]] = {
        "mxfp4": transformers.Mxfp4Config,
        "compressed-tensors": transformers.CompressedTensorsConfig,
    }
    return {"quantization_config": kinds[method](dequantize=True)}


def _check_installed(method: str) -> None:
    package = RESTORED[method]
    if package is not None and find_spec(package.replace("-", "_")) is None:
        raise MissingExtraError(f"weights quantised by {method} need the package {package}: pip install {package}")


def _save(loaded: Any, folder: Path) -> None:
    """Save the weights of a loaded model in bfloat16, through a new model that knows of no quantisation."""
    import torch

    config = loaded.config
    for each in (config, *(getattr(config, name) for name in getattr(config, "sub_configs", ()) or ())):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        fresh = type(loaded)(config).to(torch.bfloat16)
    fresh.load_state_dict(
        {name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()}, assign=True
    )
    fresh.tie_weights()
    if (generation := getattr(loaded, "generation_config", None)) is not None:
        fresh.generation_config = generation
    fresh.save_pretrained(folder, max_shard_size=_SHARD)
    path = folder / CONFIG
    stated = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(
        json.dumps(stated | legacy_config_keys(stated), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


@contextmanager
def _explained(source_id: str) -> Iterator[None]:
    """Turn transformers' errors about a source into one line; errors about too little memory pass unchanged."""
    try:
        yield
    except (GQAConvertError, OSError):
        raise
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        first = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
        raise CorruptCheckpointError(
            f"{source_id} cannot be loaded by transformers ({type(problem).__name__}: {first[:200]}): check its files, or convert the "
            "checkpoint that it was made from"
        ) from problem
