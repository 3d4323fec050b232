"""Writes quantised weights as an ordinary checkpoint, through the readers of transformers.

transformers dequantises while it loads. It refuses to save a model that it read in this way, so that the weights are put
into a new model of the same class first, which copies nothing.
"""

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.gguf_files import GGUFModel
from gqa_convert.checkpoint.headers import Header, TensorEntry
from gqa_convert.checkpoint.quantised import RESTORED, quantisation_method, without_quantisation
from gqa_convert.checkpoint.resource_errors import is_out_of_memory
from gqa_convert.checkpoint.source import CONFIG, Checkpoint, Shard
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import CorruptCheckpointError, GQAConvertError, MissingExtraError, UnsupportedFormatError
from gqa_convert.families.legacy_config_keys import legacy_config_keys
from gqa_convert.families.loading import auto_class, no_bars, no_warnings, read_config

_SHARD = "5GB"
_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def outline_gguf(model: GGUFModel) -> Checkpoint:
    """The checkpoint that `write_gguf` will write, as far as its config and the shapes of its tensors go.

    Args:
        model: the file.

    Raises:
        UnsupportedFormatError: transformers cannot read the file's architecture.
    """
    import torch
    import transformers

    config = _config_of(model)
    stated = _as_json(config, model.dtype)
    with torch.device("meta"), _explained(model.source_id):
        made = getattr(transformers, auto_class(stated)).from_config(config, dtype=getattr(torch, model.dtype))
    stated["architectures"] = [type(made).__name__]
    tied = set(getattr(made, "_tied_weights_keys", None) or ()) if stated.get("tie_word_embeddings", True) else set()
    entries, start = {}, 0
    for name, tensor in made.state_dict().items():
        if name not in tied:
            entries[name] = TensorEntry(_DTYPE_NAMES[model.dtype], tuple(tensor.shape), start, tensor.nbytes)
            start += tensor.nbytes
    file = "model.safetensors"
    return Checkpoint(
        source_id=model.source_id,
        revision=model.revision,
        folder=None,
        config=stated,
        weights_format="safetensors",
        shards=(Shard(file, start, Header(entries, {}, 0)),),
        index_metadata=None,
        carried=(),
        left_behind=(),
        sizes={file: start},
    )


def write_gguf(model: GGUFModel, folder: Path) -> tuple[str, ...]:
    """Write a GGUF file's weights and tokenizer as an ordinary checkpoint.

    Args:
        model: the file.
        folder: an empty folder.

    Returns:
        Sentences on what is not as in the file.

    Raises:
        UnsupportedFormatError: transformers cannot read the file's architecture.
    """
    import torch
    import transformers

    config = _config_of(model)
    dtype = getattr(torch, model.dtype)
    options = {"gguf_file": model.file.name, "local_files_only": True}
    with _explained(model.source_id), _quiet():
        loader = getattr(transformers, auto_class(_as_json(config, model.dtype)))
        loaded = loader.from_pretrained(model.file.parent, dtype=dtype, trust_remote_code=False, **options)
        _save(loaded, dtype, folder)
    notes = (_tokenizer(model, folder, options),)
    return tuple(filter(None, notes))


def _tokenizer(model: GGUFModel, folder: Path, options: dict[str, Any]) -> str | None:
    """Save the file's tokenizer; a sentence where there is none that transformers can read."""
    import transformers

    try:
        with _quiet():
            transformers.AutoTokenizer.from_pretrained(
                model.file.parent, trust_remote_code=False, **options
            ).save_pretrained(folder)
    except Exception as problem:  # transformers raises no narrower type
        first = next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
        return (
            f"transformers cannot read the tokenizer in {model.source_id} ({first[:160]}): copy the original model's tokenizer files into "
            "the result"
        )
    return None


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
    with _explained(source_id), _quiet():
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
        _save(loaded, torch.bfloat16, folder)
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


def _config_of(model: GGUFModel) -> Any:
    import transformers

    with _explained(model.source_id), no_warnings():
        return transformers.AutoConfig.from_pretrained(
            model.file.parent, gguf_file=model.file.name, local_files_only=True, trust_remote_code=False
        )


def _as_json(config: Any, dtype: str) -> JsonObject:
    stated: JsonObject = json.loads(config.to_json_string(use_diff=False))
    stated.pop("quantization_config", None)
    return stated | {"dtype": dtype}


def _save(loaded: Any, dtype: Any, folder: Path) -> None:
    """Save the weights of a loaded model, through a new model that knows of no quantisation."""
    import torch

    config = loaded.config
    for each in (config, *(getattr(config, name) for name in getattr(config, "sub_configs", ()) or ())):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    config.dtype = dtype
    with torch.device("meta"):
        fresh = type(loaded)(config).to(dtype)
    fresh.load_state_dict({name: tensor.to(dtype) for name, tensor in loaded.state_dict().items()}, assign=True)
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
def _quiet() -> Iterator[None]:
    """Without transformers' warnings and bars; the bar of its GGUF reader stays on a terminal."""
    with ExitStack() as stack:
        stack.enter_context(no_bars())
        stack.enter_context(no_warnings())
        if not sys.stderr.isatty():
            stack.enter_context(redirect_stderr(io.StringIO()))
        yield


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
        if "not supported" in first:
            raise UnsupportedFormatError(
                f"{source_id} cannot be read by transformers ({first[:200]}): convert the Hugging Face checkpoint that it was made from"
            ) from problem
        raise CorruptCheckpointError(
            f"{source_id} cannot be loaded by transformers ({type(problem).__name__}: {first[:200]}): check its files, or convert the "
            "checkpoint that it was made from"
        ) from problem
