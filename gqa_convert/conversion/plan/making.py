"""Makes a plan, or refuses."""

from collections.abc import Iterator, Sequence, Set

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.families import decilm
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.layerwise import find_form, restate
from gqa_convert.families.layouts import regrouped, separate
from gqa_convert.families.loading import check_language_model
from gqa_convert.families.table import Family, Modeling, family_of
from gqa_convert.merging.absorption_limits import AbsorptionLimits, find_absorption_limits
from gqa_convert.merging.methods import COPY, MEAN, REPEAT, MergeMethod, choose_method
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.messages import some

from .completeness import check_layers
from .configs import converted_config, modeling_keys
from .layer_kv_heads import layer_kv_heads
from .model import OutputFile, Plan, TensorChange


def make_plan(
    checkpoint: Checkpoint,
    kv_heads: int | Sequence[int],
    *,
    method: str = MEAN.name,
    native: bool | None = None,
) -> Plan:
    """Plan a conversion.

    Args:
        checkpoint: the opened source.
        kv_heads: K/V heads per layer in the result (the paper's GQA-N); or those of each attention
            layer, in the order of the layers' numbers.
        method: `mean` or `first`; `factor` or `fit`, which change queries and outputs too. The
            default is the method that reads nothing but weights; `plan_conversion` makes the plan
            that `convert` carries out by default.
        native: as the user asked for it; refused where it does not fit the family. A source that is
            rewritten for a stock class is planned as one of that type.

    Raises:
        UnsupportedFamilyError: the model type is unknown or cannot be converted.
        ConfigError: the tensors' names or shapes contradict the config.
        GroupsError: `kv_heads` does not fit the heads, or the family has no form in which layers
            differ.
        NoLanguageModelError: the checkpoint was saved without a language-model head.
        UnsupportedFormatError: the K/V projections have a type that can't be merged.
        OptionError: an unknown method, or a route that there is not.
    """
    merge_method = choose_method(method)
    family = family_of(checkpoint.config)
    _check_route(checkpoint, family, native)
    finder = AttentionFinder(checkpoint, family)
    check_layers(checkpoint, finder)
    counts = layer_kv_heads(finder, kv_heads)
    limits = {}
    if merge_method.merges_layers:
        limits = {layer.module: find_absorption_limits(finder, layer) for layer in finder.layers}
    changes: list[TensorChange] = []
    for layer in sorted(finder.layers, key=lambda layer: layer.number):
        own = counts[layer.module]
        changes += _layer_changes(finder, layer, own, merge_method, limits.get(layer.module))
    # other engines run these layers with the number that the config states
    without_run = MEAN if merge_method.merges_layers else merge_method
    for layer in finder.unused_layers:
        changes += _layer_changes(finder, layer, min(counts.values()), without_run, None)
    changed = [change for change in changes if change.sources and change.method != COPY.name]
    written = {change.name: change for change in changed}
    dropped = {name for change in changed for name in change.sources} - written.keys()
    modeling, config, notes = _form(checkpoint, finder, tuple(counts.values()))
    if any(counts[layer.module] < layer.kv_heads for layer in finder.layers):
        notes = [*_constraint_notes([*limits.values()], merge_method), *notes]
    if finder.unused_layers:
        names = some([layer.module for layer in finder.unused_layers])
        notes.append(f"transformers leaves out {names}: there, method {without_run.name} applies")
    return Plan(
        checkpoint=checkpoint,
        family=family,
        modeling=modeling,
        layers=finder.layers,
        layer_kv_heads=counts,
        limits=limits,
        method=method,
        heads=finder.heads,
        source_kv_heads=finder.kv_heads,
        changes=tuple(changes),
        regrouped=written,
        files=tuple(_kept_files(checkpoint, dropped)),
        config=config,
        warnings=(*notes, *_warnings(checkpoint, family, modeling)),
    )


def _check_route(checkpoint: Checkpoint, family: Family, native: bool | None) -> None:
    """Refuse a source without a language-model head, and a way of loading that its type has not."""
    if family.native or family.modeling is not None:
        check_language_model(
            checkpoint.source_id, checkpoint.config, "a K/V cache serves to generate text"
        )
    if family.modeling is None and native is False:
        raise OptionError(
            f"--no-native: stock classes load a {family.model_type} with fewer K/V heads directly: "
            "leave the option out"
        )
    if family.modeling is not None and native:
        raise OptionError(
            f"--native: a {family.model_type} is not rewritten for a stock class: leave the option "
            "out to get a modelling file"
        )


# Tensors


def _layer_changes(
    finder: AttentionFinder,
    layer: AttentionLayer,
    kv_heads: int,
    method: MergeMethod,
    limits: AbsorptionLimits | None,
) -> Iterator[TensorChange]:
    """The tensors of a layer that hold K/V heads, copied ones included, and those that absorb maps.

    Args:
        finder: of the source.
        layer: one of its layers.
        kv_heads: K/V heads of the layer in the result.
        method: that merges them.
        limits: what may be absorbed; None for methods that let nothing be absorbed.

    Raises:
        GroupsError: heads would be repeated that have a tensor each.
    """
    entries, family, applied = finder.entries, finder.family, method
    if kv_heads >= layer.kv_heads:
        applied = COPY if kv_heads == layer.kv_heads else REPEAT
    # projections
    for name, sections in finder.sections(layer):
        if not any(section.merged for section in sections):
            continue
        before = entries[name].shape
        is_transposed = family.transposed and len(before) == 2
        rows = sum(section.rows for section in regrouped(sections, kv_heads))
        after = (before[0], rows) if is_transposed else (rows, *before[1:])
        entry = TensorEntry(finder.dtype(name), after)
        yield TensorChange(
            name, before, entry, applied.name, (name,), sections, kv_heads, is_transposed
        )
    # the gains of norms that have a tensor for each K/V head
    if names := finder.head_list(layer):
        if kv_heads > len(names):
            raise GroupsError(
                f"{layer.module}.{family.key_norm_name} has one tensor per K/V head, so that heads "
                f"can't be repeated here: choose at most {len(names)}"
            )
        size, shape = len(names) // kv_heads, entries[names[0]].shape
        entry = TensorEntry(finder.dtype(names[0]), shape)
        sections = separate("key_norm", size, shape[0])
        for group in range(kv_heads):
            sources = tuple(names[group * size : (group + 1) * size])
            yield TensorChange(
                names[group], (size, *shape), entry, applied.name, sources, sections, kv_heads=1
            )
    # what absorbs maps
    if limits is None or kv_heads >= layer.kv_heads:
        return
    constraints = {family.query: limits.key_constraint, family.output: limits.value_constraint}
    for projection, constraint in constraints.items():
        for kind in ("weight", "bias"):
            name = f"{layer.module}.{projection}.{kind}"
            if name in entries and (method.trains or not constraint):
                shape = entries[name].shape
                yield TensorChange(name, shape, TensorEntry(finder.dtype(name), shape), method.name)


def _kept_files(checkpoint: Checkpoint, dropped: Set[str]) -> Iterator[OutputFile]:
    """A file of the result for each of the source's, of the same name, without the tensors that the
    result has no more; none for a file of which nothing is left.
    """
    is_stored = checkpoint.weights_format == "safetensors" and checkpoint.rewritten_from is None
    for number, shard in enumerate(checkpoint.shards):
        names = [name for name in shard.tensors if name not in dropped]
        if names:
            copied = number if is_stored and len(names) == len(shard.tensors) else None
            yield OutputFile(safetensors_name(shard.file), names, shard.metadata, copied)


def safetensors_name(file: str) -> str:
    """The name of the safetensors file that has the tensors of a weight file."""
    if not file.endswith(".bin"):
        return file
    return file.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"


# Config and notes


def _form(
    checkpoint: Checkpoint, finder: AttentionFinder, counts: tuple[int, ...]
) -> tuple[Modeling | None, JsonObject, list[str]]:
    """The modelling file of the result, if it needs one; its config; and notes."""
    family, config = finder.family, checkpoint.config
    kv_heads, *others = set(counts)
    if not others and not family.is_layerwise:
        unchanged = all(layer.kv_heads == kv_heads for layer in finder.layers)
        modeling = None if unchanged and not family.is_converted else family.modeling
        return modeling, converted_config(config, family, modeling, kv_heads), []
    form = find_form(family, finder.config)
    assert not isinstance(form, str), form  # layer_kv_heads has refused it
    notes = []
    if form != family.layerwise[0]:  # which comes first
        reason = decilm.why_not(finder.config)
        notes.append(
            f"vLLM and llama.cpp don't run the result, which can't become a DeciLM, since {reason}"
        )
    return form, restate(form, config, counts) | modeling_keys(config, form), notes


def _constraint_notes(limits: Sequence[AbsorptionLimits], method: MergeMethod) -> Iterator[str]:
    """Which heads are averaged, since nothing can absorb their maps, and why."""
    treatment = "start from their mean" if method.trains else "are averaged"
    keys = [each.key_constraint for each in limits if each.key_constraint]
    values = [each.value_constraint for each in limits if each.value_constraint]
    for heads, reasons in (("keys", keys), ("values", values)):
        if reasons:
            yield (
                f"{heads} {treatment} in {len(reasons)} of {len(limits)} attention layers, since "
                f"{reasons[0]}"
            )


def _warnings(checkpoint: Checkpoint, family: Family, modeling: Modeling | None) -> Iterator[str]:
    skipped = checkpoint.left_behind
    if skipped:
        yield (
            f"{len(skipped)} file(s) with weights in other formats or training state are not "
            f"copied: {some([*skipped])}"
        )
    yield from checkpoint.notes
    if not family.listed:
        yield (
            f"model type {family.model_type} is on no list: it is converted like a Llama, and the "
            "result appears only if it computes what the source with merged heads computes"
        )
    has_files = any(name.endswith(".py") for name in checkpoint.carried)
    if not family.native and not family.modeling:
        keys = ", ".join(family.kv_heads_keys)
        yield (
            f"transformers loads it with the checkpoint's own code, which reads {keys}; that code "
            "is copied and never run here"
        )
    elif modeling is None and (has_files or "auto_map" in checkpoint.config):
        yield (
            "the checkpoint contains Python code, which is copied and never run: check that it "
            "reads num_key_value_heads"
        )
