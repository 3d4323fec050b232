"""Whether the layers and their attention are where transformers will look for them: it fills what
it misses with fresh numbers and a mere warning. Tensors of other shapes it refuses itself, and
further layers it leaves out.
"""

import re
from collections import defaultdict

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import ConfigError
from gqa_convert.families.composite import config_value
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.layerwise import stated_layers


def check_layers(checkpoint: Checkpoint, finder: AttentionFinder) -> None:
    """Check that every layer and its attention are there.

    No layer may lack a projection that another one has, unless it has something else in the place
    of attention. The last layers may have no keys and values of their own.

    Args:
        checkpoint: the opened source.
        finder: its attention.

    Raises:
        ConfigError: a layer or its attention is missing, or is where transformers does not look.
    """
    family, config = finder.family, finder.config
    reused = config_value(config, family.shared_layers_key) or 0
    kept = (family.query, family.output)
    for place, keys in family.layers:
        layers = _find_layers(finder, place)
        if not layers:
            is_encoder = place.startswith(family.encoder or " ")
            if is_encoder and not config.get("is_encoder_decoder", True):
                continue  # the decoder alone
            prefix = next(filter(None, family.prefixes), "")
            raise ConfigError(
                f"{checkpoint.source_id} has no tensors {prefix}{place}.0..., where transformers "
                f"looks for the layers of a {family.model_type}; attention is at "
                f"{finder.layers[0].module}: rename the tensors, or save the model with "
                "save_pretrained"
            )
        count = stated_layers(config, keys) or max(layers) + 1
        expected = _projections_of(finder, layers)
        for number in range(count):
            names = layers[number]
            missing = expected - names
            if number >= count - reused:
                missing = {name for name in missing if name.split(".")[-2] in kept}
            if missing and not any(_is_inside(name, family.without_attention) for name in names):
                raise ConfigError(
                    f"{checkpoint.source_id} has no tensor {place}.{number}.{min(missing)}, which "
                    f"transformers looks for in each of {count} layers ({keys[0]}): correct the "
                    "config, or download or copy the checkpoint again"
                )


def _find_layers(finder: AttentionFinder, place: str) -> dict[int, set[str]]:
    """By the number of a layer at a place, the names in it that belong to attention or to what
    stands in its place. There may be thousands of experts beside them.
    """
    family = finder.family
    prefixes = "|".join(map(re.escape, family.prefixes))
    in_layer = re.compile(rf"(?:{prefixes}){re.escape(place)}\.(\d+)\.(.+)")
    layers: dict[int, set[str]] = defaultdict(set)
    for match in filter(None, map(in_layer.fullmatch, finder.entries)):
        names = layers[int(match[1])]
        if _is_inside(match[2], (*family.attention, *family.without_attention)):
            names.add(match[2])
    return layers


def _projections_of(finder: AttentionFinder, layers: dict[int, set[str]]) -> set[str]:
    """The weights of attention's projections, by their names in a layer, that any layer has."""
    family = finder.family
    projections = (family.fused or family.query, family.key, family.value, family.output)
    ends = [f".{module}.{name}.weight" for module in family.attention for name in projections]
    every = set().union(*layers.values())
    return {name for name in every if f".{name}".endswith(tuple(ends))}


def _is_inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(f".{module}." in f".{name}" for module in modules)
