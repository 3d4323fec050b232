"""What OUT turned out to be: its tensors, its heads, and the method by whose rules it is judged."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from gqa_convert.families.composite import config_value
from gqa_convert.families.family import Modeling
from gqa_convert.verify.geometry import Geometry, Role, read_geometry
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.weights import Weights

PLAIN: Final = ("mean", "first")
"""Methods whose K/V heads are computed from SOURCE's K/V heads alone and are proven bit for bit."""
FACTORED: Final = "factor"
"""The method that also changes queries and outputs, and whose heads are proven to be the best possible; with a text, its
result is judged as that of a fit."""
FITTED: Final = "fit"
"""The method that depends on a text and is measured against mean pooling."""


@dataclass(frozen=True)
class Result:
    """A converted checkpoint whose heads were found."""

    inputs: Inputs
    weights: Weights
    geometry: Geometry
    claims: dict[str, Any]
    """Its provenance record; empty if that cannot be read."""
    modeling: Modeling | None
    """The modelling file that it must come with."""

    @property
    def shown_method(self) -> Any:
        """The claimed method, unless the heads show another: heads that do not become fewer are copied or repeated,
        whatever was asked for.
        """
        if not self.geometry.changed:
            return "copy"
        return self.claims.get("method") if self.geometry.merged else "repeat"

    @cached_property
    def method(self) -> Any:
        """The method by whose rules the tensors are judged."""
        has_text = self.claims.get("calibration") is not None
        return FITTED if self.shown_method == FACTORED and has_text else self.shown_method

    @property
    def folds(self) -> bool:
        """Whether the method changes queries and outputs too."""
        return self.method in (FACTORED, FITTED)

    @property
    def encoder(self) -> bool:
        """Whether an encoder was converted; as claimed where the tensors are the same either way."""
        return self.claims.get("encoder") is True if self.geometry.encoder is None else self.geometry.encoder

    @cached_property
    def foldable(self) -> dict[str, set[Role]]:
        """By module, the roles whose heads the method may make anything of; empty for plain methods.

        A fit may change all of them. Factoring folds maps of keys into queries unless a norm or clipping lies between
        them, and maps of values into outputs unless a gate, a norm or clipping does; otherwise they are means.
        """
        every: set[Role] = {"query", "key", "value", "output", "output_bias"}
        names = [module.name for module in self.geometry.merged] if self.folds else []
        if self.method == FITTED:
            return dict.fromkeys(names, every)
        family, config = self.inputs.family, self.inputs.decoder_config
        clipped = config_value(config, "clip_qkv") or config_value(config, "attn_config.clip_qkv")
        normed = family.gainless_key_norm is not None and config.get(*family.gainless_key_norm)
        found: dict[str, set[Role]] = {}
        for name in names:
            gains = f"{name}.{family.key_norm_name}."
            has_gains = family.key_norm != "none" and any(each.startswith(gains) for each in self.inputs.source.tensors)
            found[name] = set()
            if not (clipped or normed or has_gains or family.key_constraint):
                found[name] |= {"query", "key"}
            if not (clipped or family.value_constraint):
                found[name] |= {"value", "output"}
        return found


def read_result(inputs: Inputs, weights: Weights, claims: dict[str, Any]) -> tuple[Result, str]:
    """Find the heads of OUT, and say which they are.

    Raises:
        ConfigError: SOURCE contradicts itself.
        Failure: OUT's numbers of K/V heads cannot be determined, or do not fit SOURCE's.
    """
    family, modeling = inputs.family, inputs.modeling
    may_differ = modeling in family.layerwise or family.reads_per_layer_config
    tensors = inputs.source.tensors, weights.tensors
    geometry = read_geometry(family, inputs.decoder_config, *tensors, may_differ=may_differ)
    if modeling is family.modeling and not geometry.changed and not family.is_converted:
        modeling = None  # stock classes load it
    return Result(inputs, weights, geometry, claims, modeling), geometry.describe()
