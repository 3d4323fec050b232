"""What OUT turned out to be: its tensors, its heads, and the method by whose rules it is judged."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gqa_convert.families.composite import config_value
from gqa_convert.families.family import Modeling
from gqa_convert.families.layerwise import is_run
from gqa_convert.verify.geometry import Geometry, Role
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.weights import Weights

PLAIN = ("mean", "first")
"""Methods whose K/V heads are computed from SOURCE's K/V heads alone and are proven bit for bit."""
FACTORED = "factor"
"""The method that also changes queries and outputs; without a text, only of heads that may absorb maps."""
FITTED = "fit"
"""The method that depends on a text."""


@dataclass(frozen=True)
class Result:
    """A converted checkpoint whose heads were found."""

    inputs: Inputs
    weights: Weights
    geometry: Geometry
    modeling: Modeling | None
    """The modelling file that it must come with."""

    @property
    def method(self) -> Any:
        """The claimed method, unless the heads show another: heads that do not become fewer are copied or repeated,
        whatever was asked for.
        """
        if not self.geometry.changed:
            return "copy"
        return self.inputs.claims.get("method") if self.geometry.merged else "repeat"

    @property
    def folds(self) -> bool:
        """Whether the method changes queries and outputs too; it is measured against mean pooling."""
        return self.method in (FACTORED, FITTED)

    @property
    def has_text(self) -> bool:
        """Whether the method measured on a text."""
        return self.inputs.claims.get("calibration") is not None

    @cached_property
    def foldable(self) -> dict[str, set[Role]]:
        """By module, the roles whose heads the method may make anything of; empty for plain methods.

        `fit` may change all of them. `factor` folds maps of keys into queries unless a norm or clipping lies between them,
        and maps of values into outputs unless a gate, a norm or clipping does; otherwise they are means, as they are in layers that
        transformers leaves out.
        """
        family = self.inputs.family
        config = self.inputs.decoder_config
        merged = [module.name for module in self.geometry.merged] if self.folds else []
        run = [name for name in merged if is_run(family, config, name)]
        names = run or merged  # as in the converter, where the names of layers tell nothing
        left_out: dict[str, set[Role]] = {name: set() for name in merged if name not in names}
        if self.method == FITTED:
            return left_out | {name: {"query", "key", "value", "output", "output_bias"} for name in names}
        is_clipped = config_value(config, "clip_qkv") or config_value(config, "attn_config.clip_qkv")
        is_normed = family.gainless_key_norm is not None and config.get(*family.gainless_key_norm)
        found = left_out
        for name in names:
            gains = f"{name}.{family.key_norm_name}."
            has_gains = family.key_norm != "none" and any(each.startswith(gains) for each in self.inputs.source.tensors)
            found[name] = set()
            if not (is_clipped or is_normed or has_gains or family.key_constraint):
                found[name] |= {"query", "key"}
            if not (is_clipped or family.value_constraint):
                found[name] |= {"value", "output"}
        return found


def read_result(inputs: Inputs, weights: Weights) -> tuple[Result, str]:
    """Find the heads of OUT, and say which they are; raises as `Geometry` does."""
    family = inputs.family
    modeling = inputs.modeling
    geometry = Geometry(inputs, inputs.source.tensors, weights.tensors)
    if modeling is family.modeling and not geometry.changed and not family.is_converted:
        modeling = None  # stock classes load it
    return Result(inputs, weights, geometry, modeling), geometry.describe()
