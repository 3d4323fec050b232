"""What OUT turned out to be: its tensors, its heads, and the method by whose rules it is judged."""

from functools import cached_property

from gqa_convert.families.composite import config_value
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


class Result:
    """A converted checkpoint whose heads were found.

    Args:
        inputs: the checkpoints.
        weights: the tensors of OUT.

    Attributes:
        geometry: the heads.
        method: the claimed method, unless the heads show another: heads that do not become fewer are copied or repeated,
            whatever was asked for.
        folds: whether the method changes queries and outputs too; it is measured against mean pooling.
        has_text: whether the method measured on a text.
        modeling: the modelling file that it must come with.

    Raises:
        ConfigError, Failure: as `Geometry` does.
    """

    def __init__(self, inputs: Inputs, weights: Weights) -> None:
        self.inputs = inputs
        self.weights = weights
        self.geometry = Geometry(inputs, inputs.source.tensors, weights.tensors)
        self.method = inputs.claims.get("method") if self.geometry.merged else "repeat"
        self.modeling = inputs.modeling
        if not self.geometry.changed:
            self.method = "copy"
            if self.modeling is inputs.family.modeling and not inputs.family.is_converted:
                self.modeling = None  # stock classes load it
        self.folds = self.method in (FACTORED, FITTED)
        self.has_text = inputs.claims.get("calibration") is not None

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
        found: dict[str, set[Role]] = {name: set() for name in merged}
        if self.method == FITTED:
            return found | {
                name: {"query", "key", "value", "output", "output_bias"} for name in names
            }
        is_clipped = config_value(config, "clip_qkv") or config_value(
            config, "attn_config.clip_qkv"
        )
        is_normed = family.gainless_key_norm is not None and config.get(*family.gainless_key_norm)
        for name in names:
            gains = f"{name}.{family.key_norm_name}."
            has_gains = family.key_norm != "none" and any(
                each.startswith(gains) for each in self.inputs.source.tensors
            )
            if not (is_clipped or is_normed or has_gains or family.key_constraint):
                found[name] |= {"query", "key"}
            if not (is_clipped or family.value_constraint):
                found[name] |= {"value", "output"}
        return found


def read_result(inputs: Inputs, weights: Weights) -> tuple[Result, str]:
    """Find the heads of OUT, and say which they are."""
    result = Result(inputs, weights)
    return result, result.geometry.describe()
