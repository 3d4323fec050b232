"""The sizes and the rotary positions in the config of a source that may be translated to another architecture."""

import math
from dataclasses import dataclass
from typing import Any

from gqa_convert.checkpoint.strict_json import Config as Config
from gqa_convert.errors import ConfigError
from gqa_convert.families.target_architectures import NoTargetArchitecture

_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
"""Kinds of rotary scaling that source and target compute with the same function of transformers."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary positions of a source."""

    rotated: int
    """Rotary dimensions of a head."""
    factor: float
    """The same as a share of head_dim."""
    theta: float
    """The base."""
    scaling: tuple[tuple[str, Any], ...]
    """Further keys of `rope_parameters`, `rope_type` among them; none for the default type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The counts of a source's config."""

    heads: int
    layers: int
    head_dim: int
    hidden_size: int
    intermediate_size: int


def read_dimensions(config: Config) -> Dimensions:
    """The counts of a source's config.

    Raises:
        ConfigError: one is missing or absurd, or the heads do not divide the hidden size.
    """
    if config.get("model_type") == "gpt_neox":
        hidden, heads, layers, inner = (
            count(config, key)
            for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
        )
    else:
        hidden, heads, layers = (
            count(config, *keys)
            for keys in (("n_embd", "hidden_size"), ("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers"))
        )
        inner = 4 * hidden if config.get("n_inner") is None else count(config, "n_inner")
    if hidden % heads:
        raise ConfigError(
            f"config.json has {heads} heads, which do not divide the hidden size {hidden}: repair the config"
        )
    return Dimensions(heads=heads, layers=layers, head_dim=hidden // heads, hidden_size=hidden, intermediate_size=inner)


def read_rotary(config: Config, dimensions: Dimensions) -> Rotary | NoTargetArchitecture:
    """The rotary positions of a source, read as transformers reads them, or why no target can have them."""
    head_dim = dimensions.head_dim
    if config.get("model_type") != "gpt_neox":
        rotated = config.get("rotary_dim", 64)
        if type(rotated) is not int or not 0 < rotated <= head_dim or rotated % 2:
            return NoTargetArchitecture(
                f"rotary_dim = {rotated!r} is no even count of up to {head_dim} dimensions of a head"
            )
        return Rotary(rotated, _factor(rotated, head_dim), 10000.0, ())
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        return NoTargetArchitecture("its rotary parameters differ between layers")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROPE_TYPES:
        return NoTargetArchitecture(f"rotary scaling of type {kind!r} is not known to be computed in the same way")
    theta: Any = parameters.get("rope_theta", config.get("rotary_emb_base", 10000))
    factor: Any = parameters.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if (
        not all(type(value) in (int, float) and math.isfinite(value) and value > 0 for value in (theta, factor))
        or factor > 1
    ):
        return NoTargetArchitecture(f"a rotary base of {theta!r} on a share of {factor!r} of each head makes no sense")
    rotated = int(head_dim * factor)
    if not rotated or rotated % 2:
        return NoTargetArchitecture(f"{rotated} rotary dimensions of {head_dim} in a head make no pairs")
    base = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
    scaling = {key: value for key, value in parameters.items() if key not in base}
    return Rotary(rotated, factor, theta, () if kind == "default" else tuple(({"rope_type": kind} | scaling).items()))


def _factor(rotated: int, head_dim: int) -> float:
    """The share from which software computes `rotated` as int(head_dim * share)."""
    factor = rotated / head_dim
    return factor if int(head_dim * factor) == rotated else math.nextafter(factor, 1.0)


def count(config: Config, *keys: str) -> int:
    """The first of these config keys that is stated.

    Raises:
        ConfigError: none is, or its value is no count.
    """
    value = next((config[key] for key in keys if config.get(key) is not None), None)
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json has {keys[0]} = {value!r} where a count belongs: repair the config")
    return value


def query_scale(config: Config, dimensions: Dimensions, layer: int) -> float:
    """The factor of a layer's queries, which is needed because the target scales its scores only by 1 / sqrt(head_dim).

    gpt_bigcode has a switch for that scale, which only transformers reads.
    """
    scale = 1.0
    if config.get("model_type") == "gpt2":
        if not config.get("scale_attn_weights", True):
            scale *= math.sqrt(dimensions.head_dim)
        if config.get("scale_attn_by_inverse_layer_idx"):
            scale /= layer + 1
    return scale
