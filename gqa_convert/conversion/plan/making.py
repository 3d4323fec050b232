"""Makes a plan, or refuses."""

from collections.abc import Iterator, Sequence

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan.completeness import check_layers
from gqa_convert.conversion.plan.configs import converted_config, modeling_keys
from gqa_convert.conversion.plan.files import keep_files
from gqa_convert.conversion.plan.layer_changes import constraint_notes, layer_changes
from gqa_convert.conversion.plan.layer_groups import layer_groups
from gqa_convert.conversion.plan.model import Plan, TensorChange
from gqa_convert.errors import OptionError
from gqa_convert.families import decilm
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.layerwise import find_form, restate
from gqa_convert.families.loading import check_language_model
from gqa_convert.families.table import Family, Modeling, family_of
from gqa_convert.merging.absorption_limits import find_absorption_limits
from gqa_convert.merging.methods import COPY, MEAN, choose_method
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.messages import some


def make_plan(
    checkpoint: Checkpoint,
    groups: int | Sequence[int],
    *,
    method: str = MEAN.name,
    seed: int = 0,
    encoder: bool = False,
    native: bool | None = None,
) -> Plan:
    """Plan a conversion.

    Args:
        checkpoint: the opened source.
        groups: K/V heads per layer in the result (the paper's GQA-N); or those of each attention layer, in the order of
            the layers' numbers.
        method: `mean` or `first`; `factor` or `fit`, which change queries and outputs too. The default is the method that
            reads nothing but weights; `plan_conversion` makes the plan that `convert` carries out by default.
        seed: of the order of batches in `fit`.
        encoder: convert an encoder's self-attention too. It keeps no cache, and the paper leaves it alone (section 2).
        native: as the user asked for it; refused where it does not fit the family. A source that is rewritten for a stock
            class is planned as one of that type.

    Raises:
        UnsupportedFamilyError: the model type is unknown or cannot be converted.
        ConfigError: the tensors' names or shapes contradict the config.
        GroupsError: `groups` does not fit the heads, or the family has no form in which layers differ.
        NoLanguageModelError: the checkpoint was saved without a language-model head.
        UnsupportedFormatError: the K/V projections have a type that can't be merged.
        OptionError: an unknown method, no encoder to convert, or a route that there is not.
    """
    merge_method = choose_method(method)
    family = family_of(checkpoint.config)
    if family.native or family.modeling is not None:
        check_language_model(
            checkpoint.source_id, checkpoint.config, "a K/V cache serves to generate text"
        )
    if family.modeling is None and native is False:
        raise OptionError(
            f"--no-native: stock classes load a {family.model_type} with fewer K/V heads directly: leave the option out"
        )
    if family.modeling is not None and native:
        raise OptionError(
            f"--native: a {family.model_type} is not rewritten for a stock class: leave the option out to get a modelling file"
        )
    finder = AttentionFinder(checkpoint, family, encoder=encoder)
    check_layers(checkpoint, finder)
    counts = layer_groups(finder, groups)
    limits = {}
    if merge_method.merges_layers:
        limits = {layer.module: find_absorption_limits(finder, layer) for layer in finder.layers}
    changes: list[TensorChange] = []
    for layer in sorted(finder.layers, key=lambda layer: layer.number):
        changes += layer_changes(
            finder, layer, counts[layer.module], merge_method, limits.get(layer.module)
        )
    # other engines run these with the number that the config states
    needs_no_run = MEAN if merge_method.merges_layers else merge_method
    for layer in finder.unused_layers:
        changes += layer_changes(finder, layer, min(counts.values()), needs_no_run, None)
    regrouped = {
        change.name: change for change in changes if change.sources and change.method != COPY.name
    }
    dropped = {name for change in regrouped.values() for name in change.sources} - regrouped.keys()
    modeling, config, notes = _form(checkpoint, finder, tuple(counts.values()), encoder=encoder)
    if any(counts[layer.module] < layer.kv_heads for layer in finder.layers):
        notes = [*constraint_notes([*limits.values()], merge_method), *notes]
    if finder.unused_layers:
        names = some([layer.module for layer in finder.unused_layers])
        notes.append(f"transformers leaves out {names}: there, method {needs_no_run.name} applies")
    return Plan(
        checkpoint=checkpoint,
        family=family,
        modeling=modeling,
        layers=finder.layers,
        layer_groups=counts,
        limits=limits,
        method=method,
        seed=seed,
        heads=finder.heads,
        source_kv_heads=finder.kv_heads,
        changes=tuple(changes),
        regrouped=regrouped,
        files=tuple(keep_files(checkpoint, dropped)),
        config=config,
        warnings=(*notes, *_warnings(checkpoint, family, modeling)),
    )


def _form(
    checkpoint: Checkpoint, finder: AttentionFinder, counts: tuple[int, ...], *, encoder: bool
) -> tuple[Modeling | None, JsonObject, list[str]]:
    """The modelling file of the result, if it needs one; its config; and notes."""
    family, config = finder.family, checkpoint.config
    groups, *others = set(counts)
    if others or family.is_layerwise:
        form = find_form(family, finder.config)
        assert not isinstance(form, str), form  # layer_groups has refused it
        reason = (
            None if form == family.layerwise[0] else decilm.why_not(finder.config)
        )  # that form comes first
        notes = [
            f"vLLM and llama.cpp don't run the result, which can't become a DeciLM, since {reason}"
        ]
        return (
            form,
            restate(form, config, counts) | modeling_keys(config, form),
            notes if reason else [],
        )
    unchanged = all(layer.kv_heads == groups for layer in finder.layers)
    modeling = None if unchanged and not family.is_converted else family.modeling
    return modeling, converted_config(config, family, modeling, groups, encoder=encoder), []


def _warnings(checkpoint: Checkpoint, family: Family, modeling: Modeling | None) -> Iterator[str]:
    skipped = checkpoint.left_behind
    if skipped:
        yield f"{len(skipped)} file(s) with weights in other formats or training state are not copied: {some([*skipped])}"
    yield from checkpoint.notes
    if not family.listed:
        yield (
            f"model type {family.model_type} is on no list: it is converted like a Llama, and the result appears only if "
            "it computes what the source with merged heads computes"
        )
    has_code = (
        any(name.endswith(".py") for name in checkpoint.carried) or "auto_map" in checkpoint.config
    )
    if not family.native and not family.modeling:
        keys = ", ".join(family.kv_heads_keys)
        yield f"transformers loads it with the checkpoint's own code, which reads {keys}; that code is copied and never run here"
    elif has_code and modeling is None:
        yield "the checkpoint contains Python code, which is copied and never run: check that it reads num_key_value_heads"
