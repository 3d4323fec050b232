"""The model that is timed, a checkpoint or a config alone, and its outline: a model without memory for its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.headers import Header, TensorEntry
from gqa_convert.checkpoint.paths import expanded, local_path
from gqa_convert.checkpoint.quantised import refuse_quantised_config
from gqa_convert.checkpoint.resource_errors import is_out_of_memory
from gqa_convert.checkpoint.source import CONFIG, Checkpoint, Shard, open_local
from gqa_convert.checkpoint.strict_json import JsonObject, parse_object
from gqa_convert.conversion.plan import make_plan
from gqa_convert.errors import (
    ConfigError,
    OptionError,
    SourceNotFoundError,
    UnsupportedAttentionError,
    UnsupportedFamilyError,
)
from gqa_convert.families.loading import auto_class, check_language_model, is_encoder_decoder
from gqa_convert.families.table import family_of

NEEDS_HEAD = "benchmark decodes with one; time the same shapes with --config in the place of MODEL"
"""Advice for a checkpoint that was saved without its language-model head."""
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""The dtypes of the weights, with their names in headers."""


@dataclass(frozen=True, slots=True)
class BenchmarkModel:
    """The model that is timed.

    Attributes:
        name: as the user wrote it.
        config: the content of its config.json.
        folder: with its weights; None for random ones.
    """

    name: str
    config: JsonObject
    folder: Path | None


def open_model(model: str | Path | None, config: str | Path | None, revision: str | None) -> BenchmarkModel:
    """Open a checkpoint (a folder or a Hub id), or a config alone: a config.json, or a folder that holds one.

    Raises:
        OptionError: neither was named, or both.
        SourceNotFoundError: there is no such file or folder.
        ConfigError: the config can't be read.
        GQAConvertError: as `open_checkpoint`.
    """
    if (model is None) == (config is None):
        raise OptionError(
            "name either MODEL or --config FILE: a checkpoint is timed with its weights, a config alone with random ones"
        )
    if model is not None:
        checkpoint = open_local(model, revision, _check)
        _check(checkpoint)
        return BenchmarkModel(expanded(model), checkpoint.config, checkpoint.folder)
    assert config is not None
    path = local_path(config)
    if path.is_dir():
        path /= CONFIG
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise SourceNotFoundError(
            f"--config {config}: {path} can't be read ({problem.strerror}): name a config.json or its folder"
        ) from None
    found = parse_object(raw, str(path), ConfigError)
    refuse_quantised_config(found, expanded(config), str(path))
    return BenchmarkModel(expanded(config), found, None)


def stated_dtype(config: JsonObject, asked: str | None) -> str:
    """The dtype that a user asks for, or else a config states.

    Raises:
        OptionError: it is none of `DTYPES`.
    """
    dtype = asked or config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise OptionError(f"the type {dtype!r} can't be timed: choose one of {', '.join(DTYPES)} with --dtype")
    return str(dtype)


def _check(checkpoint: Checkpoint) -> None:
    check_language_model(checkpoint.source_id, checkpoint.config, NEEDS_HEAD)
    make_plan(checkpoint, 1)


def build(config: JsonObject, where: str, dtype: str, attention: str, device: Any) -> Any:
    """An instance of the config's language model with uninitialised weights, in evaluation mode.

    Args:
        config: content of a config.json.
        where: the name of its source, for messages.
        dtype: of the weights, such as `bfloat16`.
        attention: transformers' name of the attention function.
        device: torch device.

    Raises:
        UnsupportedFamilyError: the model type is unknown here, or to transformers.
        ConfigError: transformers can't build the model.
        UnsupportedAttentionError: its class does not support the attention function.
    """
    import torch
    import transformers
    from transformers.initialization import no_init_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from gqa_convert.families.modeling import register_modeling

    family = family_of(config)
    if is_encoder_decoder(config):
        raise UnsupportedFamilyError(f"{where} is an encoder-decoder, and benchmark times decoders")
    if family.is_converted:
        register_modeling(family.model_type)
    if family.model_type not in CONFIG_MAPPING:
        raise UnsupportedFamilyError(
            f"transformers has no class of type {family.model_type}, and code of a checkpoint is never run: it can't be timed"
        )
    known = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
    try:
        made = CONFIG_MAPPING[family.model_type].from_dict(known)
        auto = getattr(transformers, auto_class(config | {"is_encoder_decoder": made.is_encoder_decoder}))
        with no_init_weights(), torch.device(device):
            model = auto.from_config(
                made, trust_remote_code=False, dtype=getattr(torch, dtype), attn_implementation=attention
            )
            model.tie_weights()
    except UnsupportedAttentionError:
        raise
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        raise ConfigError(
            f"{where}: transformers refuses this {family.model_type} config ({type(problem).__name__}: {problem}): repair it"
        ) from None
    return model.eval()


def headers(model: BenchmarkModel, outline: Any) -> Checkpoint:
    """A checkpoint without weights, as a plan reads it: the names, shapes and dtypes of the parameters of an outline."""
    entries, start = {}, 0
    for name, parameter in outline.named_parameters():
        kind = DTYPES[str(parameter.dtype).removeprefix("torch.")]
        entries[name] = TensorEntry(kind, tuple(parameter.shape), start, parameter.nbytes)
        start += parameter.nbytes
    shard = Shard("model.safetensors", start, Header(entries, {}, 0))
    return Checkpoint(
        source_id=model.name,
        revision=None,
        folder=None,
        config=model.config,
        weights_format="safetensors",
        shards=(shard,),
        index_metadata=None,
        carried=(),
        left_behind=(),
        sizes={shard.file: start},
    )
