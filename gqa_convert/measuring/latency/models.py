"""The model that is timed, and versions of it with other numbers of K/V heads, all in memory at once; weights that do not
depend on the number are shared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights

from gqa_convert.attention import register
from gqa_convert.attention.interface import why_unsupported
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan import Plan, make_plan, merging_counts, spread
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.families.layerwise import kv_heads_by_layer
from gqa_convert.families.loading import (
    auto_class,
    check_complete,
    check_language_model,
    explained,
    load_model,
)
from gqa_convert.families.modeling import register_modeling
from gqa_convert.families.table import family_of
from gqa_convert.runtime.json_objects import JsonObject

_NEEDS_HEAD = (
    "benchmark decodes with one; name the language model that the checkpoint was made from"
)
"""Advice for a checkpoint that was saved without its language-model head."""


def plan_versions(checkpoint: Checkpoint, candidates: Sequence[int] | None) -> dict[int, Plan]:
    """Plan a version for each number of K/V heads, rising.

    Args:
        checkpoint: the model.
        candidates: numbers of K/V heads; None for the model's own and its divisors, at most seven.

    Returns:
        The plans by their numbers.

    Raises:
        NoLanguageModelError: it was saved without its language-model head.
        OptionError: the layers of the model differ in number.
        GroupsError: a number does not fit the heads.
        GQAConvertError: the model can't be converted.
    """
    check_language_model(checkpoint.source_id, checkpoint.config, _NEEDS_HEAD)
    own = make_plan(checkpoint, 1).source_kv_heads
    if kv_heads_by_layer(checkpoint.config, checkpoint.source_id) is not None:
        raise OptionError(
            f"the layers of {checkpoint.source_id} differ in their K/V heads: time the model that it was converted from"
        )
    counts = sorted(set(candidates or spread(merging_counts(own), 7)))
    try:
        return {count: make_plan(checkpoint, count) for count in counts}
    except GroupsError as problem:
        raise GroupsError(str(problem).replace("--groups", "--candidates")) from None


def make_models(
    checkpoint: Checkpoint, plans: Mapping[int, Plan], dtype: str, device: str
) -> tuple[list[Any], str]:
    """The models of the plans, and transformers' name of their attention function: this package's, where the model's class
    takes it. The model with the own K/V heads has its weights.

    Args:
        checkpoint: the model that is timed.
        plans: of its versions, by their K/V heads.
        dtype: of the weights, such as `bfloat16`.
        device: torch device.

    Raises:
        CorruptCheckpointError: the folder lacks weights, or transformers can't build a version.
        NoLanguageModelError: it was saved without its language-model head.
    """
    register()
    name = checkpoint.source_id
    folder = checkpoint.local_folder
    settings = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    with explained(name):
        source, missing = load_model(folder, **settings)
    check_complete(name, folder, missing, _NEEDS_HEAD)
    if why_unsupported(type(source), source.config) is None:
        settings["attn_implementation"] = "gqa"
        source.set_attn_implementation("gqa")
    source = source.to(device).requires_grad_(False)
    weights = dict(source.named_parameters(remove_duplicate=False))
    models = []
    for groups, plan in plans.items():
        made = source
        if groups != plan.source_kv_heads:
            with explained(name), torch.device(device):
                made = _build(plan.config, settings)
            shapes = {
                key: parameter.shape
                for key, parameter in made.named_parameters(remove_duplicate=False)
            }
            shared = {
                key: weight for key, weight in weights.items() if weight.shape == shapes.get(key)
            }
            made.load_state_dict(shared, strict=False, assign=True)
            for key, parameter in made.named_parameters():
                if key not in shared:
                    parameter.normal_(std=0.02)  # random numbers
        models.append(made)
    return models, settings["attn_implementation"]


def _build(config: JsonObject, settings: Mapping[str, Any]) -> Any:
    """An instance of the config's language model with uninitialised weights, in evaluation mode and without gradients.

    Args:
        config: content of a config.json.
        settings: options of `from_config`.
    """
    family = family_of(config)
    if family.is_converted:
        register_modeling(family.model_type)
    made = transformers.CONFIG_MAPPING[family.model_type].from_dict(config)
    auto = getattr(transformers, auto_class(config))
    with no_init_weights():
        model = auto.from_config(made, trust_remote_code=False, **settings)
        model.tie_weights()
    return model.eval().requires_grad_(False)
