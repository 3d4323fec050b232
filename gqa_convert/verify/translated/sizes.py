"""The sizes of a translated source, read from its config as transformers reads it."""

import math
from dataclasses import dataclass
from typing import Any

from gqa_convert.errors import ConfigError
from gqa_convert.verify.report import Failure
from gqa_convert.verify.translated.target_architectures import TargetArchitecture


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes and rotary positions."""

    heads: int
    layers: int
    hidden_size: int
    intermediate_size: int
    rotary_dim: int
    """Rows of each head that rotate with the position; 0 without rotary positions."""
    theta: float
    scaling: dict[str, Any]
    """The rotary parameters beyond the base; `rope_type` is `default` without scaling."""

    @property
    def head_dim(self) -> int:
        """Rows of a head."""
        return self.hidden_size // self.heads


def first_of(config: dict[str, Any], keys: str, default: Any = None) -> Any:
    """The value of the first of several keys, separated by spaces, that the config has."""
    return next((config[key] for key in keys.split() if key in config), default)


def _count(config: dict[str, Any], keys: str, default: Any = None) -> int:
    value = next((config[key] for key in keys.split() if config.get(key) is not None), default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"SOURCE's config has {keys.split()[0]} = {value!r}, expected a positive integer: repair it")
    return value


def read_sizes(config: dict[str, Any], target: TargetArchitecture) -> Sizes:
    """The sizes in SOURCE's config.

    Raises:
        ConfigError: they contradict one another.
        Failure: OUT's type does not support SOURCE's rotary positions.
    """
    hidden = _count(config, "n_embd hidden_size")
    heads = _count(config, "n_head num_attention_heads")
    layers = _count(config, "n_layer num_hidden_layers")
    inner = (
        _count(config, "intermediate_size") if target.source == "gpt_neox" else _count(config, "n_inner", 4 * hidden)
    )
    if hidden % heads:
        raise ConfigError(
            f"SOURCE's config has {heads} heads for a hidden size of {hidden}, which they must divide: repair it"
        )
    head_dim = hidden // heads
    rotated, theta, scaling = 0, 10000.0, {"rope_type": "default"}
    if target.source == "gpt_neox":
        rotated, theta, scaling = _neox_positions(config, head_dim)
    elif target.source != "gpt2":
        rotated = config.get("rotary_dim", 64)
    if type(rotated) is not int or rotated % 2 or not (0 < rotated <= head_dim or target.source == "gpt2"):
        raise Failure(f"SOURCE rotates {rotated!r} of {head_dim} rows of a head, which {target.out} does not support")
    if target.out == "starcoder2" and rotated != head_dim:
        raise Failure(f"SOURCE rotates {rotated} of {head_dim} rows of a head, but starcoder2 rotates all")
    return Sizes(heads, layers, hidden, inner, rotated, theta, scaling)


def _neox_positions(config: dict[str, Any], head_dim: int) -> tuple[int, float, dict[str, Any]]:
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = stated.get("rope_type", stated.get("type", "default"))
    theta = stated.get("rope_theta", config.get("rotary_emb_base", 10000))
    part = stated.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if not all(type(value) in (int, float) and math.isfinite(value) for value in (theta, part)):
        raise ConfigError(f"SOURCE's config has a rotary base of {theta!r} and a rotary share of {part!r}: repair it")
    others = {} if kind == "default" else stated
    rest = {
        key: value
        for key, value in others.items()
        if key not in ("rope_theta", "partial_rotary_factor", "rope_type", "type")
    }
    return int(head_dim * part), theta, {"rope_type": kind} | rest


def query_scale(config: dict[str, Any], sizes: Sizes, layer: int) -> float:
    """The factor between SOURCE's queries and OUT's. OUT scales scores by 1 / sqrt(head_dim) and by nothing else."""
    if config.get("model_type") != "gpt2":
        return 1.0
    scale = 1.0 if config.get("scale_attn_weights", True) else math.sqrt(sizes.head_dim)
    return scale / (layer + 1) if config.get("scale_attn_by_inverse_layer_idx") else scale
