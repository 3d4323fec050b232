"""The plan of a result that is translated to a stock model type with another name."""

from collections.abc import Iterator
from dataclasses import replace

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.conversion.plan.model import OutputFile, Plan, TensorChange
from gqa_convert.conversion.plan.tensors import safetensors_name
from gqa_convert.conversion.restating.piece_tensors import PieceTensor
from gqa_convert.conversion.translation.description import TranslatedTensor
from gqa_convert.conversion.translation.tensors import translate_tensors
from gqa_convert.errors import OptionError
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.layouts import Role
from gqa_convert.families.target_architectures import NoTargetArchitecture, TargetArchitecture
from gqa_convert.families.target_choice import find_target_architecture
from gqa_convert.families.target_configs import translate_config
from gqa_convert.merging.methods import COPY, MEAN, METHODS, REPEAT, MergeMethod


def choose_target(plan: Plan, native: bool | None) -> TargetArchitecture | None:
    """The stock model type to translate to, if that is the route to take."""
    family, groups = plan.family, plan.layer_groups[0]
    if family.modeling is None and native is False:
        raise OptionError(
            f"--no-native: stock classes load a {family.model_type} with fewer K/V heads directly: leave the option out"
        )
    if family.modeling is None or native is False or (native is None and groups == plan.source_kv_heads):
        return None
    found = find_target_architecture(plan.checkpoint.config, groups)
    if isinstance(found, NoTargetArchitecture):
        if native:
            raise OptionError(
                f"--native: no stock class computes the same as this {family.model_type}: {found.reason}; leave the option out to get a modelling file"
            )
        return None
    return found


def plan_translation(plan: Plan, finder: AttentionFinder, target: TargetArchitecture) -> Plan:
    """The plan with every tensor of the target architecture, in the file of the source tensor that it comes from."""
    from gqa_convert.merging.attention_heads import LayerLayout  # imports numpy

    checkpoint, groups, method = plan.checkpoint, plan.layer_groups[0], METHODS[plan.method]
    source_tensors = {name: (number, entry) for number, name, entry in checkpoint.tensors()}
    merged_layers = frozenset(
        name
        for layer in finder.layers
        if method.merges_layers and groups < layer.kv_heads
        for name in LayerLayout(finder, layer).names
    )
    translation = translate_tensors(finder.entries, checkpoint.config, target, groups, method)
    names: list[list[str]] = [[] for _ in checkpoint.shards]
    changed = {}
    changes = []
    for tensor in translation.tensors:
        if tensor.merged:
            merged, module = tensor.merged, tensor.name.rsplit(".", 2)[0]
            changes.append(
                TensorChange(
                    tensor.name, module, merged.roles, tensor.dtype, merged.before, merged.after, merged.method
                )
            )
        names[source_tensors[tensor.place][0]].append(tensor.name)
        changed[tensor.name] = _translated(tensor, source_tensors, merged_layers)
    if method.merges_layers:
        changes = list(_absorbing(changes, plan, method, changed))
    files = []
    for shard, own in zip(checkpoint.shards, names, strict=True):
        file = safetensors_name(shard.file) if checkpoint.weights_format == "torch" else shard.file
        if own:
            files.append(OutputFile(file, own, shard.header.metadata))
    return replace(
        plan,
        modeling=None,
        target_architecture=target,
        changed=changed,  # type: ignore[arg-type]
        changes=tuple(changes),
        files=tuple(files),
        config=translate_config(checkpoint.config, target, groups),
        warnings=(*plan.warnings, *_warnings(plan, target)),
    )


def _translated(
    tensor: TranslatedTensor, source_tensors: dict[str, tuple[int, TensorEntry]], merged_layers: frozenset[str]
) -> PieceTensor:
    """Rows that are only copied become ranges of bytes, unless they belong to one of the `merged_layers`, whose tensors
    do not exist yet.
    """
    if tensor.copied_ranges is None or any(name in merged_layers for name, _, _ in tensor.copied_ranges):
        return PieceTensor(tensor.name, tensor.dtype, tensor.shape, (), translated=tensor)
    pieces = []
    for name, first, rows in tensor.copied_ranges:
        number, entry = source_tensors[name]
        row_bytes = entry.nbytes // entry.shape[0]
        pieces.append((number, entry.start + first * row_bytes, rows * row_bytes))
    return PieceTensor(tensor.name, tensor.dtype, tensor.shape, tuple(pieces))


def _absorbing(
    changes: list[TensorChange], plan: Plan, method: MergeMethod, tensors: dict[str, PieceTensor]
) -> Iterator[TensorChange]:
    limits = {layer.module: limits for layer, limits in zip(plan.layers, plan.limits, strict=True)}
    for change in changes:
        found = limits.get(change.module)
        blocked = found and {"key": found.key_constraint, "value": found.value_constraint}
        pooled = blocked and not method.trains and all(blocked[role] for role in change.roles)
        exact = change.method in (COPY.name, REPEAT.name)
        yield change if exact else replace(change, method=(MEAN if pooled else method).name)
    merged = {change.module for change in changes if change.before != change.after}
    seen = {change.name for change in changes}
    for name, tensor in tensors.items():
        module = name.rsplit(".", 2)[0]
        if module in merged and name not in seen:
            role: Role = "query" if ".q_proj." in name else "output"
            yield TensorChange(name, module, (role,), tensor.dtype, tensor.shape, tensor.shape, method.name)


def _warnings(plan: Plan, target: TargetArchitecture) -> Iterator[str]:
    carried = plan.checkpoint.carried
    if target.special_tokens and "tokenizer.json" not in carried and "vocab.json" in carried:
        yield f"transformers 5 loads a {target.model_type} tokenizer from tokenizer.json only, which is missing: save it with the tokenizer first"
