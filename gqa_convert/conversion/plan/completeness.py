"""Whether the layers and their attention are where transformers will look for them: it fills what it misses with fresh
numbers and a mere warning. Tensors of other shapes it refuses itself, and further layers it leaves out.
"""

import re
from collections.abc import Iterator, Mapping

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import ConfigError
from gqa_convert.families.geometry import AttentionFinder, config_value

Layers = Mapping[int, frozenset[str]]
"""By the number of a layer, the names in it that belong to attention or to what stands in its place."""


def check_layers(checkpoint: Checkpoint, finder: AttentionFinder) -> None:
    """Check that every layer and its attention are there.

    Args:
        checkpoint: the opened source.
        finder: its attention.

    Raises:
        ConfigError: a layer or its attention is missing, or is where transformers does not look.
    """
    family, source = finder.family, checkpoint.source_id
    for place, keys in family.layers:
        layers = _find_layers(finder, place)
        is_encoder = family.encoder is not None and place.startswith(family.encoder)
        if not layers and is_encoder and not finder.config.get("is_encoder_decoder", True):
            continue  # the decoder alone
        if not layers:
            prefix = next(filter(None, family.prefixes), "")
            raise ConfigError(
                f"{source} has no tensors {prefix}{place}.0..., where transformers looks for the layers of a "
                f"{family.model_type}; attention is at {finder.layers[0].module}: rename the tensors, or save the "
                "model with save_pretrained"
            )
        key, count = _stated_count(finder, keys, max(layers) + 1)
        missing = set(range(count)) - layers.keys()
        if missing:
            raise ConfigError(
                f"{finder.where} states {key} = {count}, and the weights hold {len(layers)} of {place} and none of "
                f"layer {min(missing)}: correct the config, or complete the weights"
            )
        for number, name in _missing_attention(finder, layers, count):
            raise ConfigError(
                f"{source} has no tensor {place}.{number}.{name}, which transformers looks for: the checkpoint is "
                "incomplete, download or copy it again"
            )


def _find_layers(finder: AttentionFinder, place: str) -> Layers:
    """The layers at a place. There may be thousands of experts beside the names that are kept."""
    family = finder.family
    prefix = _any_of(family.prefixes)
    parts = _any_of((*family.attention, *family.without_attention))
    in_layer = re.compile(rf"{prefix}{re.escape(place)}\.(\d+)\.(.+)")
    is_kept = re.compile(rf"(?:.+\.)?{parts}\.")
    found: dict[int, set[str]] = {}
    for name in finder.entries:
        match = in_layer.fullmatch(name)
        if match:
            names = found.setdefault(int(match[1]), set())
            if is_kept.match(match[2]):
                names.add(match[2])
    return {number: frozenset(names) for number, names in found.items()}


def _stated_count(finder: AttentionFinder, keys: tuple[str, ...], found: int) -> tuple[str, int]:
    """The config's number of layers and its key; where it states none, as many as there are."""
    for key in keys:
        value = config_value(finder.config, key)
        if isinstance(value, list):
            return key, len(value)
        if isinstance(value, int):
            return key, value
    return keys[0], found


def _missing_attention(finder: AttentionFinder, layers: Layers, count: int) -> Iterator[tuple[int, str]]:
    """The projections that a layer lacks and another one has, with its number, unless it has something else in the
    place of attention.
    """
    family = finder.family
    reused = config_value(finder.config, family.shared_layers_key) if family.shared_layers_key else None
    own = count - (reused if type(reused) is int else 0)  # the layers after them have no keys and values
    inner = (family.fused,) if family.fused else (family.query, family.key, family.value)
    read = (family.query, family.output)
    is_projection = re.compile(rf"(?:.+\.)?{_any_of(family.attention)}\.{_any_of((*inner, family.output))}\.weight")
    expected = {name for names in layers.values() for name in names if is_projection.fullmatch(name)}
    instead = re.compile(rf"(?:.+\.)?{_any_of(family.without_attention)}\.") if family.without_attention else None
    for number in range(count):
        if instead and any(map(instead.match, layers[number])):
            continue
        for name in sorted(expected - layers[number]):
            if number < own or name.removesuffix(".weight").endswith(read):
                yield number, name


def _any_of(words: tuple[str, ...]) -> str:
    return f"(?:{'|'.join(map(re.escape, words))})"
