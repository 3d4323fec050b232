"""A model at several numbers of K/V heads, all in memory at once; weights that do not depend on the number are shared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gqa_convert.conversion.plan import Plan, make_plan, merging_counts, spread
from gqa_convert.errors import GroupsError
from gqa_convert.families.layerwise import kv_heads_by_layer, restate
from gqa_convert.families.loading import check_complete, explained, load_model
from gqa_convert.measuring.benchmark.subject import NEEDS_HEAD, Subject, build, headers, refused_attention
from gqa_convert.measuring.results.kv_heads import KVHeads, one_or_each, order_of

_MOST_GROUPS = 7
"""Maximum number of group counts that are timed by default."""


@dataclass(frozen=True, slots=True)
class PlannedVersion:
    """A version that can be built.

    Attributes:
        groups: its K/V heads per layer, or those of each layer.
        plan: of a conversion that yields it.
        is_own: whether these are the model's own numbers, with which it has its own weights.
    """

    groups: KVHeads
    plan: Plan
    is_own: bool


@dataclass(frozen=True, slots=True)
class Version:
    """The model with one number of K/V heads, or with one for each layer."""

    groups: KVHeads
    plan: Plan
    model: Any


def plan_versions(subject: Subject, dtype: str, groups: Sequence[int] | None) -> list[PlannedVersion]:
    """The versions with each number of groups, in ascending order. A model whose layers differ is the last version, and
    the others have one number in all layers.

    Args:
        subject: the model.
        dtype: of its weights, such as `bfloat16`.
        groups: numbers of K/V heads; None for the model's number (the largest of its layers) and its divisors.

    Raises:
        GroupsError: a number does not fit the heads.
        GQAConvertError: the model can't be converted.
    """
    checkpoint = headers(subject, dtype)
    first = make_plan(checkpoint, 1)
    own = first.source_kv_heads
    counts = sorted(set(spread(merging_counts(own), _MOST_GROUPS) if groups is None else groups))
    by_layer = kv_heads_by_layer(checkpoint.config, checkpoint.source_id)
    if by_layer is None:
        plans = [make_plan(checkpoint, count) for count in counts]
        return [PlannedVersion(plan.groups, plan, plan.groups == own) for plan in plans]
    itself = PlannedVersion(one_or_each(by_layer), make_plan(checkpoint, by_layer), is_own=True)
    others = [count for count in counts if count != itself.groups]
    return [*(_uniform(subject, dtype, count, first) for count in others), itself]


def _uniform(subject: Subject, dtype: str, count: int, plan: Plan) -> PlannedVersion:
    """The shapes of a model whose layers differ, with one number of K/V heads in all layers."""
    possible = merging_counts(plan.heads)
    if count not in possible:
        raise GroupsError(
            f"--groups {count} does not divide the {plan.heads} query heads of {subject.name}: choose from "
            f"{', '.join(map(str, possible))}"
        )
    counts = (count,) * len(plan.layers)
    assert plan.modeling is not None
    uniform = replace(subject, config=restate(plan.modeling, subject.config, counts), folder=None)
    return PlannedVersion(count, make_plan(headers(uniform, dtype), counts), is_own=False)


def make_versions(
    subject: Subject, planned: Sequence[PlannedVersion], attention: str, dtype: Any, device: Any
) -> tuple[list[Version], bool]:
    """The versions, and whether the one with the model's own number of K/V heads has the model's weights.

    Args:
        subject: the model; its weights are read if its own number of K/V heads is planned.
        planned: the versions to build.
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

    first = max(planned, key=lambda each: (each.is_own, order_of(each.groups)))
    own = subject.folder is not None and first.is_own
    if own:
        assert subject.folder is not None
        base = _load(subject.folder, attention, dtype).to(device)
    else:
        with torch.device(device):
            base = build(first.plan.config, subject.name, dtype=dtype, attn_implementation=attention)
        _share(base, {})
    weights = dict(base.named_parameters(remove_duplicate=False))
    versions = []
    for each in planned:
        model = base
        if each is not first:
            with torch.device(device):
                model = build(each.plan.config, subject.name, dtype=dtype, attn_implementation=attention)
            _share(model, weights)
        versions.append(Version(each.groups, each.plan, model.requires_grad_(False)))
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
