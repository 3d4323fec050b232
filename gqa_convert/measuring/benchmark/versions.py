"""A model at several numbers of K/V heads, all in memory at once; weights that do not depend on the number are shared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan import Plan, make_plan, merging_counts, spread
from gqa_convert.errors import GroupsError
from gqa_convert.families.loading import check_complete, explained, load_model
from gqa_convert.measuring.benchmark.subject import NEEDS_HEAD, Subject, build, refused_attention

_MOST_GROUPS = 7
"""Maximum number of group counts that are timed by default."""


@dataclass(frozen=True, slots=True)
class Version:
    """The model with one number of K/V heads."""

    groups: int
    plan: Plan
    model: Any


def plan_versions(checkpoint: Checkpoint, groups: Sequence[int] | None) -> list[Plan]:
    """The plan of a conversion to each number of groups, in ascending order.

    Args:
        checkpoint: of the model.
        groups: numbers of K/V heads; None for the model's number and its divisors.

    Raises:
        GroupsError: a number does not fit the heads.
        GQAConvertError: the model can't be converted.
    """
    first = make_plan(checkpoint, 1)
    own = first.source_kv_heads
    if first.family.is_layerwise:
        raise GroupsError(
            f"{checkpoint.source_id} states the K/V heads of each layer, and benchmark compares models whose layers all have N: "
            "name the model that it was converted from"
        )
    if groups is None:
        groups = spread(merging_counts(own), _MOST_GROUPS)
    return [make_plan(checkpoint, count) for count in sorted(set(groups))]


def make_versions(
    subject: Subject, plans: Sequence[Plan], attention: str, dtype: Any, device: Any
) -> tuple[list[Version], bool]:
    """A model for each plan, and whether the version with the source's number of K/V heads has the source's weights.

    Args:
        subject: the model; its weights are read if its number of K/V heads is among the plans.
        plans: of the versions.
        attention: transformers' name of the attention function.
        dtype: torch type of the weights.
        device: torch device.

    Raises:
        CorruptCheckpointError: the folder lacks weights.
        NoLanguageModelError: it was saved without its language-model head.
        UnknownAttentionError: the model's class does not support the attention function.
        ConfigError: transformers can't build a version.
    """
    import torch

    first = max(plans, key=lambda plan: (plan.groups == plan.source_kv_heads, plan.groups))
    own = subject.folder is not None and first.groups == first.source_kv_heads
    if own:
        assert subject.folder is not None
        base = _load(subject.folder, attention, dtype).to(device)
    else:
        with torch.device(device):
            base = build(first.config, subject.name, dtype=dtype, attn_implementation=attention)
        _share(base, {})
    weights = dict(base.named_parameters(remove_duplicate=False))
    versions = []
    for plan in plans:
        model = base
        if plan is not first:
            with torch.device(device):
                model = build(plan.config, subject.name, dtype=dtype, attn_implementation=attention)
            _share(model, weights)
        versions.append(Version(plan.groups, plan, model.requires_grad_(False)))
    return versions, own


def _load(folder: Path, attention: str, dtype: Any) -> Any:
    with explained(str(folder)), refused_attention(attention):
        model, missing = load_model(folder, dtype, attn_implementation=attention)
    check_complete(str(folder), folder, model, missing, NEEDS_HEAD)
    return model


def _share(model: Any, weights: dict[str, Any]) -> None:
    """Share `weights` where name and shape agree, and fill the other parameters with random numbers."""
    import torch

    filled: set[int] = set()
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                shared = weights.get(f"{prefix}.{name}" if prefix else name)
                if shared is not None and shared.shape == parameter.shape and shared.dtype == parameter.dtype:
                    module._parameters[name] = shared
                elif id(parameter) not in filled:
                    filled.add(id(parameter))
                    _randomise(parameter, bias=name.endswith("bias"))


def _randomise(parameter: Any, *, bias: bool) -> None:
    if parameter.dim() > 1:
        parameter.normal_(std=0.02)
    else:
        parameter.fill_(0.0 if bias else 1.0)
