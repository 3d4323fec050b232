"""Which layers of a model attend to a sliding window, and so cache fewer tokens than a text has."""

from gqa_convert.families.composite import decoder_config
from gqa_convert.runtime.json_objects import Config


def has_window(config: Config) -> bool:
    """Whether a layer attends to a sliding window, and so caches fewer tokens than a text has."""
    config = decoder_config(config)
    kinds = config.get("layer_types")
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return False
    return not isinstance(kinds, list) or "sliding_attention" in kinds


def window_of(config: Config, layer: int) -> int | None:
    """Return the tokens of the sliding window of a decoder layer; None if it attends to the whole text.

    Args:
        config: what config.json holds.
        layer: the number of the layer, from 0.
    """
    if not has_window(config):
        return None
    config = decoder_config(config)
    window = config["sliding_window"]
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return window if kinds[layer : layer + 1] == ["sliding_attention"] else None
    if layer < (config.get("max_window_layers") or 0):
        return None
    every = config.get("sliding_window_pattern")
    if isinstance(every, str):  # such as LLLG, where G is a layer that attends to the whole text
        every = len(every)
    return None if every and (layer + 1) % every == 0 else window
