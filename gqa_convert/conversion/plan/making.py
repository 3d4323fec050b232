"""Makes a plan, or refuses."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gqa_convert.checkpoint.files import links_note
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.plan.completeness import check_tensors
from gqa_convert.conversion.plan.layer_groups import layer_groups
from gqa_convert.conversion.plan.model import OutputShard, Plan, TensorChange
from gqa_convert.conversion.plan.tensors import plan_tensors, plan_translation, reshard, safetensors_name
from gqa_convert.errors import OptionError
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.layerwise import find_form, restate, why_not_decilm
from gqa_convert.families.layouts import Role
from gqa_convert.families.legacy_config_keys import legacy_config_keys
from gqa_convert.families.table import Family, Modeling, family_of
from gqa_convert.families.target_architectures import NoTargetArchitecture, TargetArchitecture
from gqa_convert.families.target_choice import find_target_architecture
from gqa_convert.families.target_configs import translate_config
from gqa_convert.families.wrappers import decoder_config, decoder_section, with_kv_heads
from gqa_convert.merging.methods import COPY, MEAN, REPEAT, MergeMethod, choose_method


def make_plan(
    checkpoint: Checkpoint,
    groups: int | Sequence[int],
    *,
    method: str = "mean",
    seed: int = 0,
    encoder: bool = False,
    native: bool | None = None,
    max_shard_size: int | None = None,
) -> Plan:
    """Plan a conversion.

    Args:
        checkpoint: the opened source.
        groups: K/V heads per layer in the result (the paper's GQA-N); or those of each attention layer, in the order of
            the layers' numbers.
        method: `mean` or `first`; `factor` or `fit`, which change queries and outputs too.
        seed: of the order of batches in `fit`.
        encoder: convert an encoder's self-attention too. It keeps no cache, and the paper leaves it alone (section 2).
        native: for families whose own class has no K/V-head count: translate to a stock class that computes the same
            and has one, or
            (False) add a modelling file; by default the former wherever there is such a class.
        max_shard_size: split the output anew into files of at most so many bytes of tensors; without it every input
            file has one output file of the same name.

    Raises:
        UnsupportedFamilyError: the model type is unknown or cannot be converted.
        ConfigError: the tensors' names or shapes contradict the config.
        GroupsError: `groups` does not fit the heads, or the family has no form in which layers differ.
        UnsupportedFormatError: the K/V projections have a type that can't be merged.
        OptionError: an unknown method, an impossible shard size, no encoder to convert, or a route that there is not.
    """
    chosen = choose_method(method)
    if max_shard_size is not None and max_shard_size < 1:
        raise OptionError(f"--max-shard-size {max_shard_size} is not positive: give a size such as 5GB")
    family = family_of(checkpoint.config)
    finder = AttentionFinder(checkpoint, family, encoder=encoder)
    unused = tuple(check_tensors(checkpoint, finder))
    counts = layer_groups(finder, groups)
    target_architecture = _target(checkpoint, finder, counts[0], native)
    unchanged = all(layer.kv_heads == count for layer, count in zip(finder.layers, counts, strict=True))
    reasons: tuple[str, ...] = ()
    modeling = None if target_architecture or (unchanged and not family.is_converted) else family.modeling
    if target_architecture:
        shards, changes = plan_translation(checkpoint, finder, target_architecture, counts[0], chosen)
        config = translate_config(checkpoint.config, target_architecture, counts[0])
    else:
        shards, changes = plan_tensors(checkpoint, finder, counts, chosen)
        if len(set(counts)) > 1 or family.is_layerwise:
            form = find_form(family, finder.config)
            assert not isinstance(form, str), form  # layer_groups has refused it
            modeling = form
            config = _layerwise_config(checkpoint.config, modeling, finder, counts)
            if reason := why_not_decilm(form, family, finder.config):
                reasons = (f"vLLM and llama.cpp don't run the result, which can't become a DeciLM, since {reason}",)
        else:
            config = _converted_config(checkpoint.config, family, modeling, counts[0], encoder=encoder)
    if chosen.merges_layers:
        changes = list(_folded(changes, checkpoint, finder, counts, chosen, shards if target_architecture else None))
        reasons += tuple(_constraints(finder, counts, chosen))
    if checkpoint.weights_format == "torch":
        shards = [replace(shard, file=safetensors_name(shard.file), whole_copy_of=None) for shard in shards]
    if max_shard_size is not None:
        shards = reshard(shards, max_shard_size)
    return Plan(
        checkpoint=checkpoint,
        family=family,
        modeling=modeling,
        target_architecture=target_architecture,
        layer_groups=counts,
        method=method,
        seed=seed,
        heads=finder.heads,
        source_kv_heads=finder.kv_heads,
        layers=finder.layers,
        changes=tuple(changes),
        shards=tuple(shards),
        config=config,
        warnings=(*unused, *reasons, *_warnings(checkpoint, family, modeling, target_architecture)),
    )


def _target(
    checkpoint: Checkpoint, finder: AttentionFinder, groups: int, native: bool | None
) -> TargetArchitecture | None:
    """The stock model type to translate to, if that is the route to take."""
    family = finder.family
    if family.modeling is None and native is False:
        raise OptionError(
            f"--no-native: stock classes load a {family.model_type} with fewer K/V heads directly: leave the option out"
        )
    if family.modeling is None or native is False or (native is None and groups == finder.kv_heads):
        return None
    found = find_target_architecture(checkpoint.config, groups)
    if isinstance(found, NoTargetArchitecture):
        if native:
            raise OptionError(
                f"--native: no stock class computes the same as this {family.model_type}: {found.reason}; leave the option out to get a modelling file"
            )
        return None
    return found


def _converted_config(
    config: JsonObject, family: Family, modeling: Modeling | None, groups: int, *, encoder: bool
) -> JsonObject:
    """The source's config with the family's own keys and ChatGLM2's convention set to the new count, for old clients
    and new.
    """
    if family.wrapped:
        return _wrapper_config(config, family, groups)
    result = copy.deepcopy(config)
    if family.modeling is None or modeling is not None:  # stock classes of the other types know no such keys
        for dotted in family.kv_heads_keys:
            *parents, last = dotted.split(".")
            place = result
            for key in parents:
                place = place.setdefault(key, {})
            place[last] = groups
        if encoder:
            result[family.encoder_kv_heads_key] = groups
    result["multi_query_attention"] = True
    result["multi_query_group_num"] = groups
    if modeling is None:  # else transformers 5 alone loads it
        result |= legacy_config_keys(result)
    else:
        result |= _modeling_keys(config, modeling)
    return result


def _wrapper_config(config: JsonObject, family: Family, groups: int) -> JsonObject:
    """The same for a wrapper, with the keys in the config of its decoder."""
    keys = dict.fromkeys(family.kv_heads_keys, groups) | {
        "multi_query_attention": True,
        "multi_query_group_num": groups,
    }
    result = with_kv_heads(config, family, keys)
    legacy = legacy_config_keys(decoder_config(result))
    section = decoder_section(result)
    if section is not None:
        result[section] |= {key: value for key, value in legacy.items() if key not in result[section]}
        legacy = legacy_config_keys(result)
    return result | legacy


def _modeling_keys(config: JsonObject, modeling: Modeling) -> JsonObject:
    """The config keys that lead transformers to a modelling file and to the source's tokenizer."""
    names = [name for _, name in modeling.classes]
    stated = [f"GQA{name.removeprefix('GQA')}" for name in config.get("architectures") or ()]
    kept = {
        auto: target_architecture
        for auto, target_architecture in config.get("auto_map", {}).items()
        if not auto.startswith(("AutoConfig", "AutoModel"))
    }
    tokenizer = config.get("tokenizer_class")
    return {
        "model_type": modeling.model_type,
        "architectures": [name for name in stated if name in names] or [names[min(2, len(names) - 1)]],
        "auto_map": kept | modeling.auto_map,
        "tokenizer_class": modeling.tokenizer if tokenizer is None else tokenizer,
    }


def _layerwise_config(
    config: JsonObject, modeling: Modeling, finder: AttentionFinder, counts: tuple[int, ...]
) -> JsonObject:
    """The source's config with a number of K/V heads for each layer."""
    numbered = sorted(zip(finder.layers, counts, strict=True), key=lambda pair: pair[0].number)
    by_layer = tuple(count for _, count in numbered)
    return restate(modeling, config, by_layer) | _modeling_keys(config, modeling)


def _folded(
    changes: list[TensorChange],
    checkpoint: Checkpoint,
    finder: AttentionFinder,
    counts: tuple[int, ...],
    method: MergeMethod,
    target_shards: list[OutputShard] | None,
) -> Iterator[TensorChange]:
    """The changes of a folding method: K/V tensors with the method that applies to each, then the projections into
    which maps are folded.
    """
    from gqa_convert.merging.absorption_limits import find_absorption_limits  # imports numpy
    from gqa_convert.merging.attention_heads import LayerLayout

    groups_of = {layer.module: count for layer, count in zip(finder.layers, counts, strict=True)}
    reasons = {layer.module: find_absorption_limits(finder, layer) for layer in finder.layers}
    for change in changes:
        constraints = reasons.get(change.module)
        blocked = constraints and {
            "key": constraints.key_constraint,
            "value": constraints.value_constraint,
            "key_norm": "averaged",
        }
        pooled = blocked and not method.trains and all(blocked[role] for role in change.roles)
        exact = change.method in (COPY.name, REPEAT.name)
        yield change if exact else replace(change, method=(MEAN if pooled else method).name)
    if target_shards is not None:
        yield from _translated_projections(changes, target_shards, method)
        return
    entries = {name: entry for _, name, entry in checkpoint.tensors()}
    seen = {change.name for change in changes}
    for layer in finder.layers:
        module = layer.module
        constraints = reasons[module]
        taken = {"query": constraints.key_constraint, "output": constraints.value_constraint}
        for name, role in LayerLayout(finder, layer).absorbing.items():
            if layer.kv_heads > groups_of[module] and name not in seen and (method.trains or not taken[role]):
                entry = entries[name]
                yield TensorChange(name, module, (role,), entry.dtype, entry.shape, entry.shape, method.name)


def _translated_projections(
    changes: list[TensorChange], shards: list[OutputShard], method: MergeMethod
) -> Iterator[TensorChange]:
    """Yield the query and output projections beside the merged tensors of a translated result."""
    merged = {change.module for change in changes if change.before != change.after}
    seen = {change.name for change in changes}
    for tensor in (tensor for shard in shards for tensor in shard.tensors):
        module = tensor.name.rsplit(".", 2)[0]
        if module in merged and tensor.name not in seen:
            role: Role = "query" if ".q_proj." in tensor.name else "output"
            yield TensorChange(tensor.name, module, (role,), tensor.dtype, tensor.shape, tensor.shape, method.name)


def _constraints(finder: AttentionFinder, counts: tuple[int, ...], method: MergeMethod) -> Iterator[str]:
    """Which heads a folding method cannot fold, and why."""
    if all(layer.kv_heads <= count for layer, count in zip(finder.layers, counts, strict=True)):
        return
    from gqa_convert.merging.absorption_limits import find_absorption_limits  # imports numpy

    found = [find_absorption_limits(finder, layer) for layer in finder.layers]
    for role, reasons in (
        ("keys", [each.key_constraint for each in found]),
        ("values", [each.value_constraint for each in found]),
    ):
        reason = next(filter(None, reasons), None)
        if reason:
            yield f"{role} {method.constrained_heads} in {len(list(filter(None, reasons)))} of {len(found)} attention layers, since {reason}"


def _warnings(
    checkpoint: Checkpoint, family: Family, modeling: Modeling | None, target_architecture: TargetArchitecture | None
) -> Iterator[str]:
    if checkpoint.left_behind:
        names = ", ".join(checkpoint.left_behind[:3]) + (" ..." if len(checkpoint.left_behind) > 3 else "")
        yield f"{len(checkpoint.left_behind)} file(s) with weights in other formats or training state are not copied: {names}"
    yield from links_note(checkpoint.links_out)
    if (
        target_architecture
        and target_architecture.special_tokens
        and "tokenizer.json" not in checkpoint.carried
        and "vocab.json" in checkpoint.carried
    ):
        yield f"transformers 5 loads a {target_architecture.model_type} tokenizer from tokenizer.json only, which is missing: save it with the tokenizer first"
    brings_code = any(name.endswith(".py") for name in checkpoint.carried) or "auto_map" in checkpoint.config
    if not family.native and not family.modeling:
        keys = ", ".join(family.kv_heads_keys)
        yield f"transformers loads it with the checkpoint's own code, which reads {keys}; that code is copied and never run here"
    elif brings_code and modeling is None:
        yield "the checkpoint contains Python code, which is copied and never run: check that it reads num_key_value_heads"
