"""Finds the model that a name in a file means, and whether a benchmark can have timed its shape."""

from dataclasses import dataclass, replace
from pathlib import Path

from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.families.layerwise import sources_of
from gqa_convert.measuring.results.configs import read_config
from gqa_convert.measuring.results.fields import is_there, parse_json
from gqa_convert.measuring.results.kv_heads import KVHeads, heads_in
from gqa_convert.measuring.results.parsing import located, read_conversion
from gqa_convert.measuring.results.records import Benchmark, Conversion

SOURCE = "source"
"""Label of a model that was not converted."""
_QUERY_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_SIZES = (
    "hidden_size",
    "n_embd",
    "d_model",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "decoder_layers",
    "vocab_size",
    "intermediate_size",
    "d_ff",
)
"""Config keys that no conversion changes."""


@dataclass(frozen=True)
class Identity:
    """What is known about a model besides its name.

    Attributes:
        groups: N, or that of each layer; None if unknown.
        label: the method, or `source`.
        conversion: that made the model.
        folder: of its checkpoint, None if only the last part of its name was found.
        heads: query heads per layer.
        types: model types that its config or its conversion states.
    """

    groups: KVHeads | None
    label: str
    conversion: Conversion | None = None
    folder: Path | None = None
    heads: int | None = None
    types: tuple[str, ...] = ()


def converted(conversion: Conversion, folder: Path | None = None) -> Identity:
    """The result of a conversion."""
    return Identity(
        conversion.groups,
        conversion.label,
        conversion,
        folder or conversion.folder,
        conversion.heads,
        conversion.model_types,
    )


def identify(model: str, named_in: Path, conversions: list[Conversion]) -> Identity:
    """Identify a model of an evaluation by the provenance or the config in its folder.

    Args:
        model: the name in the evaluation.
        named_in: file of the evaluation; names are also looked up in its folder.
        conversions: all that were found.
    """
    places = [Path(model), named_in.parent / model, named_in.parent / Path(model).name]
    folders = [place for place in dict.fromkeys(places) if is_there(place / "config.json")]
    by_folder = {each.folder.resolve(): each for each in conversions if each.folder}
    for folder in (*folders, Path(model)):
        known = by_folder.get(folder.resolve())
        if known:
            return converted(known, folder)
        if is_there(folder / PROVENANCE):
            path = folder / PROVENANCE
            content = parse_json(path)
            if isinstance(content, dict) and isinstance(content.get("groups"), int | list):
                return converted(read_conversion(content, path), folder)
    found = folders[0] if folders else None
    for each in conversions:
        if model == each.source or (
            found and is_there(Path(each.source)) and found.resolve() == Path(each.source).resolve()
        ):
            return Identity(each.source_kv_heads or each.heads, SOURCE, None, found, each.heads, each.model_types[:1])
    for folder in folders:
        config = read_config(folder)
        groups = heads_in(config, *_QUERY_COUNTS) if config else None
        if config and groups:
            label = "converted" if config.keys.get("multi_query_group_num") else SOURCE
            return Identity(groups, label, None, folder, config.count(*_QUERY_COUNTS), config.model_types)
    same_name = [each for each in conversions if each.folder and each.folder.resolve().name == Path(model).name]
    return replace(converted(same_name[0]), folder=None) if len(same_name) == 1 else Identity(None, "not known")


def misfit(identity: Identity, benchmark: Benchmark) -> str | None:
    """The reason why a benchmark can't be of a model's shape, None if it can."""
    if identity.heads and benchmark.heads and identity.heads != benchmark.heads:
        return f"it has {identity.heads} query heads, what was timed has {benchmark.heads}"
    if benchmark.model_type and identity.types and not _alike(benchmark.model_type, identity.types):
        return f"it is of type {identity.types[0]}, what was timed of {benchmark.model_type}"
    ours = read_config(identity.folder) if identity.folder else None
    timed = read_config(located(benchmark.model, benchmark.origin.path))
    for key in _SIZES if ours and timed else ():
        sizes = [config.keys.get(key) for config in (ours, timed) if config]
        if all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]:
            return f"its {key} is {sizes[0]}, that of what was timed {sizes[1]}"
    return None


def _alike(timed: str, types: tuple[str, ...]) -> bool:
    """Whether what was timed may have the shape of a model of these types; one whose layers differ has that of its
    source.
    """
    return timed in types or not sources_of(timed).isdisjoint(types)
