"""Whether the layers and their attention are where transformers will look for them: it fills what it misses with fresh
numbers and a mere warning. Tensors of other shapes it refuses itself, and further layers it leaves out.
"""

import re
from collections import defaultdict

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import ConfigError
from gqa_convert.families.geometry import AttentionFinder, config_value


def check_layers(checkpoint: Checkpoint, finder: AttentionFinder) -> None:
    """Check that every layer and its attention are there.

    Args:
        checkpoint: the opened source.
        finder: its attention.

    Raises:
        ConfigError: a layer or its attention is missing, or is where transformers does not look.
    """
    family = finder.family
    for place, keys in family.layers:
        layers = _find_layers(finder, place)
        is_encoder = family.encoder is not None and place.startswith(family.encoder)
        if not layers and is_encoder and not finder.config.get("is_encoder_decoder", True):
            continue  # the decoder alone
        if not layers:
            prefix = next(filter(None, family.prefixes), "")
            raise ConfigError(
                f"{checkpoint.source_id} has no tensors {prefix}{place}.0..., where transformers looks for the layers of a "
                f"{family.model_type}; attention is at {finder.layers[0].module}: rename the tensors, or save the "
                "model with save_pretrained"
            )
        key, count = _stated_count(finder, keys)
        for number in range(count or max(layers) + 1):
            if number not in layers:
                raise ConfigError(
                    f"{finder.where} states {key} = {count}, and the weights hold {len(layers)} of {place} and none of "
                    f"layer {number}: correct the config, or complete the weights"
                )
        missing = _missing_attention(finder, layers, count or max(layers) + 1)
        if missing:
            raise ConfigError(
                f"{checkpoint.source_id} has no tensor {place}.{missing}, which transformers looks for: the checkpoint is "
                "incomplete, download or copy it again"
            )


def _find_layers(finder: AttentionFinder, place: str) -> dict[int, set[str]]:
    """By the number of a layer at a place, the names in it that belong to attention or to what stands in its place. There
    may be thousands of experts beside them.
    """
    family = finder.family
    prefixes = "|".join(map(re.escape, family.prefixes))
    in_layer = re.compile(rf"(?:{prefixes}){re.escape(place)}\.(\d+)\.(.+)")
    kept = (*family.attention, *family.without_attention)
    layers: dict[int, set[str]] = defaultdict(set)
    for name in finder.entries:
        match = in_layer.fullmatch(name)
        if match:
            names = layers[int(match[1])]
            if _is_inside(match[2], kept):
                names.add(match[2])
    return layers


def _stated_count(finder: AttentionFinder, keys: tuple[str, ...]) -> tuple[str, int | None]:
    """The config's number of layers, if it states one, and its key."""
    for key in keys:
        value = config_value(finder.config, key)
        if isinstance(value, int | list):
            return key, value if isinstance(value, int) else len(value)
    return keys[0], None


def _missing_attention(finder: AttentionFinder, layers: dict[int, set[str]], count: int) -> str | None:
    """The number and name of a projection that a layer lacks and another one has, unless the layer has something else in
    the place of attention.
    """
    family = finder.family
    reused = config_value(finder.config, family.shared_layers_key) if family.shared_layers_key else None
    own = count - (reused or 0)  # the layers after them have no keys and values
    projections = (family.fused or family.query, family.key, family.value, family.output)
    ends = [f".{module}.{projection}.weight" for module in family.attention for projection in projections]
    expected = set()
    for names in layers.values():
        expected |= {name for name in names if f".{name}".endswith(tuple(ends))}
    for number in range(count):
        missing = sorted(expected - layers[number])
        if number >= own:
            missing = [name for name in missing if name.split(".")[-2] in (family.query, family.output)]
        if missing and not any(_is_inside(name, family.without_attention) for name in layers[number]):
            return f"{number}.{missing[0]}"
    return None


def _is_inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(f".{module}." in f".{name}" for module in modules)
