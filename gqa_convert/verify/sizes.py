"""The counts of a source that was translated, read as transformers reads its config."""

import math
from dataclasses import dataclass
from typing import Any

from gqa_convert.errors import ConfigError
from gqa_convert.verify.report import Failure
from gqa_convert.verify.target_architectures import TargetArchitecture


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the config says of shapes and positions."""

    heads: int
    layers: int
    hidden: int
    inner: int
    rotated: int
    """Rows of each head that turn with the position; 0 without rotary positions."""
    theta: float
    scaling: dict[str, Any]
    """Of rotary positions, beyond their base; `rope_type` is `default` where there is none."""

    @property
    def width(self) -> int:
        """Rows of a head."""
        return self.hidden // self.heads


def first_of(config: dict[str, Any], keys: str, default: Any = None) -> Any:
    """The value of the first of several keys that is there at all."""
    return next((config[key] for key in keys.split() if key in config), default)


def _count(config: dict[str, Any], keys: str, default: Any = None) -> int:
    value = next((config[key] for key in keys.split() if config.get(key) is not None), default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"the config of SOURCE has {keys.split()[0]} = {value!r} where a count belongs: repair it")
    return value


def read_sizes(config: dict[str, Any], target_architecture: TargetArchitecture) -> Sizes:
    """The counts in SOURCE's config.

    Raises:
        ConfigError: they contradict one another.
        Failure: OUT's type can't have such positions.
    """
    hidden = _count(config, "n_embd hidden_size")
    heads = _count(config, "n_head num_attention_heads")
    layers = _count(config, "n_layer num_hidden_layers")
    inner = (
        _count(config, "intermediate_size")
        if target_architecture.source == "gpt_neox"
        else _count(config, "n_inner", 4 * hidden)
    )
    if hidden % heads:
        raise ConfigError(f"the config of SOURCE has {heads} heads on a width of {hidden}: repair it")
    width = hidden // heads
    rotated, theta, scaling = 0, 10000.0, {"rope_type": "default"}
    if target_architecture.source == "gpt_neox":
        rotated, theta, scaling = _neox_positions(config, width)
    elif target_architecture.source != "gpt2":
        rotated = config.get("rotary_dim", 64)
    if type(rotated) is not int or rotated % 2 or not (0 < rotated <= width or target_architecture.source == "gpt2"):
        raise Failure(f"SOURCE turns {rotated!r} rows of a head of {width}, which {target_architecture.out} can't")
    if target_architecture.out == "starcoder2" and rotated != width:
        raise Failure(f"SOURCE turns {rotated} of {width} rows of a head, where starcoder2 turns all")
    return Sizes(heads, layers, hidden, inner, rotated, theta, scaling)


def _neox_positions(config: dict[str, Any], width: int) -> tuple[int, float, dict[str, Any]]:
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = stated.get("rope_type", stated.get("type", "default"))
    theta = stated.get("rope_theta", config.get("rotary_emb_base", 10000))
    part = stated.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if not all(type(value) in (int, float) and math.isfinite(value) for value in (theta, part)):
        raise ConfigError(f"the config of SOURCE has a rotary base of {theta!r} on a part of {part!r}: repair it")
    others = {} if kind == "default" else stated
    rest = {
        key: value
        for key, value in others.items()
        if key not in ("rope_theta", "partial_rotary_factor", "rope_type", "type")
    }
    return int(width * part), theta, {"rope_type": kind} | rest


def query_scale(config: dict[str, Any], sizes: Sizes, layer: int) -> float:
    """What OUT's queries are SOURCE's times: OUT divides scores by the root of a head's width, and by nothing else."""
    if config.get("model_type") != "gpt2":
        return 1.0
    scale = 1.0 if config.get("scale_attn_weights", True) else math.sqrt(sizes.width)
    return scale / (layer + 1) if config.get("scale_attn_by_inverse_layer_idx") else scale
