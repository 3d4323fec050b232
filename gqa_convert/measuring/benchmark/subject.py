"""The model that is timed: a checkpoint or a config alone."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.headers import Header, TensorEntry
from gqa_convert.checkpoint.paths import expanded, local_path
from gqa_convert.checkpoint.quantised import refuse_quantised_config
from gqa_convert.checkpoint.resource_errors import is_out_of_memory
from gqa_convert.checkpoint.source import CONFIG, Checkpoint, Shard, open_local
from gqa_convert.checkpoint.strict_json import Config, JsonObject, parse_object
from gqa_convert.conversion.plan import make_plan
from gqa_convert.errors import (
    ConfigError,
    OptionError,
    SourceNotFoundError,
    UnsupportedAttentionError,
    UnsupportedFamilyError,
)
from gqa_convert.families.loading import auto_class, check_language_model
from gqa_convert.families.table import family_of

_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
NEEDS_HEAD = "benchmark decodes with one; time the same shapes with --config in the place of MODEL"
"""Advice for a checkpoint that was saved without its language-model head."""
_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class UnknownAttentionError(OptionError):
    """The model's class does not support the attention function of this name."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is timed."""

    name: str
    config: JsonObject
    """The content of its config.json."""
    folder: Path | None
    """The folder with its weights, None for random ones."""


def open_subject(model: str | Path | None, config: str | Path | None, revision: str | None = None) -> Subject:
    """A checkpoint (a folder or a Hub id), or a config alone: a config.json, or a folder that holds one.

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
        checkpoint = open_local(model, revision, _check_remote)
        _check_head(checkpoint)
        return Subject(expanded(model), checkpoint.config, checkpoint.folder)
    assert config is not None
    if revision is not None:
        raise OptionError("--revision belongs to a MODEL on the Hub, and --config is a local file: leave one out")
    path = local_path(config)
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise SourceNotFoundError(
            f"--config {config}: there is no file {path}: name a config.json or the folder that holds it"
        )
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise ConfigError(f"{path} can't be read ({problem.strerror}): check its permissions") from None
    found = parse_object(raw, str(path), ConfigError)
    refuse_quantised_config(found, expanded(config), str(path))
    return Subject(expanded(config), found, None)


def _check_remote(checkpoint: Checkpoint) -> None:
    _check_head(checkpoint)
    make_plan(checkpoint, 1)


def _check_head(checkpoint: Checkpoint) -> None:
    check_language_model(checkpoint.source_id, checkpoint.config, NEEDS_HEAD)


def transformers_config(config: Config, where: str) -> Any:
    """The transformers config for the content of a config.json.

    Raises:
        UnsupportedFamilyError: the model type is unknown here, or to transformers.
        ConfigError: transformers refuses the values.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from gqa_convert.families.modeling import register_modeling

    family = family_of(config)
    model_type = family.model_type
    if family.is_converted:
        register_modeling(model_type)
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedFamilyError(
            f"transformers has no class of type {model_type}, and code of a checkpoint is never run: it can't be timed"
        )
    known = {
        key: value for key, value in copy.deepcopy(config).items() if key not in ("auto_map", "quantization_config")
    }
    try:
        return CONFIG_MAPPING[model_type].from_dict(known)
    except Exception as problem:
        raise ConfigError(f"{where}: transformers refuses this {model_type} config ({problem}): repair it") from None


def decoder_layers(config: Any) -> int:
    """The number of decoder layers of a transformers config."""
    inner = config.get_text_config(decoder=True)
    return next(int(value) for name in _DECODER_LAYERS if isinstance(value := getattr(inner, name, None), int))


@contextmanager
def refused_attention(attention: str | None) -> Iterator[None]:
    """A context that recognises transformers' errors about attention functions.

    Raises:
        UnknownAttentionError: transformers refused the attention function.
    """
    try:
        yield
    except UnsupportedAttentionError as problem:
        raise UnknownAttentionError(f"--attention {attention}: {problem}") from None
    except (KeyError, ValueError) as problem:  # a table of the model's own, or a class that says no
        if attention is None or (problem.args != (attention,) and "attention implementation" not in str(problem)):
            raise
        raise UnknownAttentionError(
            f"--attention {attention}: transformers' class has separate attention code: leave it out"
        ) from None


def build(config: JsonObject, where: str, **options: Any) -> Any:
    """An instance of the config's language model with uninitialised weights.

    Args:
        config: content of a config.json.
        where: the name of its source, for messages.
        options: `dtype` and `attn_implementation` of transformers' from_config.

    Raises:
        ConfigError: transformers can't build the model.
        UnknownAttentionError: its class does not support the attention function.
    """
    import transformers
    from transformers.initialization import no_init_weights

    made = transformers_config(config, where)
    try:
        with no_init_weights(), refused_attention(options.get("attn_implementation")):
            task = auto_class(config | {"is_encoder_decoder": made.is_encoder_decoder})
            model = getattr(transformers, task).from_config(made, trust_remote_code=False, **options)
        model.tie_weights()
    except KeyError as problem:
        raise ConfigError(f"{where}: this {config['model_type']} config lacks {problem}: repair it") from None
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError) as problem:
        if is_out_of_memory(problem):
            raise
        raise ConfigError(
            f"{where}: transformers can't build this {config['model_type']} ({problem}): repair the config"
        ) from None
    return model.eval()


def headers(subject: Subject, dtype: str) -> Checkpoint:
    """A checkpoint without weights, as a plan reads it: the names, shapes and dtypes of the model's parameters.

    Args:
        subject: the model.
        dtype: of the weights, such as `bfloat16`.
    """
    import torch

    with torch.device("meta"):
        model = build(subject.config, subject.name, dtype=getattr(torch, dtype))
    entries, start = {}, 0
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * parameter.element_size()
        kind = _TYPES[str(parameter.dtype).removeprefix("torch.")]
        entries[name] = TensorEntry(kind, tuple(parameter.shape), start, nbytes)
        start += nbytes
    shard = Shard("model.safetensors", start, Header(entries, {}, 0))
    return Checkpoint(
        source_id=subject.name,
        revision=None,
        folder=None,
        config=subject.config,
        weights_format="safetensors",
        shards=(shard,),
        index_metadata=None,
        carried=(),
        left_behind=(),
        sizes={shard.file: start},
    )
