"""A model at several numbers of K/V heads, all in memory at once; weights that do not depend on the number are shared."""

from collections.abc import Sequence
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan import Plan, make_plan, merging_counts, spread
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.families.layerwise import kv_heads_by_layer
from gqa_convert.families.loading import check_complete, explained, load_model
from gqa_convert.measuring.latency.models import NEEDS_HEAD, build


def plan_versions(checkpoint: Checkpoint, candidates: Sequence[int] | None) -> tuple[list[Plan], int | list[int]]:
    """Plan a version for each number of K/V heads, rising. A model whose layers differ is its only version.

    Args:
        checkpoint: the model.
        candidates: numbers of K/V heads; None for the model's own and its divisors, at most seven.

    Returns:
        The plans, and the model's own number of K/V heads or that of each layer.

    Raises:
        GroupsError: a number does not fit the heads.
        GQAConvertError: the model can't be converted.
    """
    by_layer = kv_heads_by_layer(checkpoint.config, checkpoint.source_id)
    if by_layer is None:
        own = make_plan(checkpoint, 1).source_kv_heads
        counts = sorted(set(candidates or spread(merging_counts(own), 7)))
        try:
            return [make_plan(checkpoint, count) for count in counts], own
        except GroupsError as problem:
            raise GroupsError(str(problem).replace("--groups", "--candidates")) from None
    if candidates is not None:
        raise OptionError(
            f"--candidates: the layers of {checkpoint.source_id} differ in their K/V heads, and it is timed with these: "
            "leave it out, or time the model that it was converted from"
        )
    plan = make_plan(checkpoint, by_layer)
    return [plan], plan.stated_groups


def make_models(
    checkpoint: Checkpoint, plans: Sequence[Plan], own: int | list[int], dtype: str, device: Any
) -> tuple[list[Any], str]:
    """The models of the plans, and transformers' name of their attention function: this package's, where the model's class
    takes it. The model with the own K/V heads has its weights.

    Args:
        checkpoint: the model that is timed.
        plans: of its versions.
        own: the model's K/V heads.
        dtype: of the weights, such as `bfloat16`.
        device: torch device.

    Raises:
        CorruptCheckpointError: the folder lacks weights.
        NoLanguageModelError: it was saved without its language-model head.
        GQAConvertError: as of `build`.
    """
    import torch

    from gqa_convert.attention import register
    from gqa_convert.attention.support import why_unsupported

    register()
    name, folder, attention = checkpoint.source_id, checkpoint.folder, "eager"
    assert folder is not None
    with explained(name):
        source, missing = load_model(folder, getattr(torch, dtype), attn_implementation=attention)
    check_complete(name, folder, source, missing, NEEDS_HEAD)
    if why_unsupported(type(source), source.config) is None:
        attention = "gqa"
        source.set_attn_implementation(attention)
    source = source.to(device)
    weights = dict(source.named_parameters(remove_duplicate=False))
    models = []
    for plan in plans:
        made = source
        if plan.stated_groups != own:
            made = build(plan.config, name, dtype, attention, device)
            _share(made, weights)
        models.append(made.requires_grad_(False))
    return models, attention


def _share(model: Any, weights: dict[str, Any]) -> None:
    """Share `weights` where name and shape agree, and fill the other parameters with small random numbers."""
    import torch

    with torch.no_grad():
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            shared = weights.get(name)
            if shared is not None and shared.shape == parameter.shape:
                parent, _, key = name.rpartition(".")
                model.get_submodule(parent)._parameters[key] = shared
            else:
                parameter.normal_(std=0.02)
