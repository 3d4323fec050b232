"""The model that is timed, and versions of it with other numbers of K/V heads."""

from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.plan import make_plan
from gqa_convert.errors import OptionError
from gqa_convert.families.loading import auto_class, check_language_model, explained
from gqa_convert.families.table import family_of

NEEDS_HEAD = "benchmark decodes with one; name the language model that the checkpoint was made from"
"""Advice for a checkpoint that was saved without its language-model head."""
DTYPES = ("float32", "bfloat16", "float16")


def open_model(model: str | Path, revision: str | None) -> Checkpoint:
    """Open a checkpoint, a folder or a Hub id.

    Raises:
        GQAConvertError: as `open_checkpoint` and `make_plan`, or the model can't be timed.
    """
    checkpoint = open_local(model, revision, _check)
    _check(checkpoint)
    return checkpoint


def _check(checkpoint: Checkpoint) -> None:
    check_language_model(checkpoint.source_id, checkpoint.config, NEEDS_HEAD)
    make_plan(checkpoint, 1)


def stated_dtype(config: JsonObject, asked: str | None) -> str:
    """The dtype that a user asks for, or else a config states.

    Raises:
        OptionError: it is none of `DTYPES`.
    """
    dtype = asked or config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise OptionError(f"the type {dtype!r} can't be timed: choose one of {', '.join(DTYPES)} with --dtype")
    return str(dtype)


def build(config: JsonObject, name: str, dtype: str, attention: str, device: Any) -> Any:
    """An instance of the config's language model with uninitialised weights, in evaluation mode.

    Args:
        config: content of a config.json.
        name: of the model, for messages.
        dtype: of the weights, such as `bfloat16`.
        attention: transformers' name of the attention function.
        device: torch device.

    Raises:
        CorruptCheckpointError: transformers can't build the model.
    """
    import torch
    import transformers
    from transformers.initialization import no_init_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from gqa_convert.families.modeling import register_modeling

    family = family_of(config)
    if family.is_converted:
        register_modeling(family.model_type)
    kind = getattr(torch, dtype)
    with explained(name), no_init_weights(), torch.device(device):
        made = CONFIG_MAPPING[family.model_type].from_dict(config)
        auto = getattr(transformers, auto_class(config))
        model = auto.from_config(made, trust_remote_code=False, dtype=kind, attn_implementation=attention)
        model.tie_weights()
    return model.eval()
