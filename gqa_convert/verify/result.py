"""What OUT turned out to be: its tensors, its heads, and the method by whose rules it is judged."""

from collections import Counter
from functools import cached_property

from gqa_convert.families.composite import config_value
from gqa_convert.families.layerwise import heads_text, is_run
from gqa_convert.verify.geometry import Module, Role, read_modules
from gqa_convert.verify.inputs import Inputs, Weights

PLAIN = ("mean", "first")
"""Methods whose K/V heads follow from SOURCE's K/V heads alone and are proven bit for bit."""
FACTORED = "factor"
"""The method that also changes queries and outputs; without a text, only of heads that may absorb
maps.
"""
FITTED = "fit"
"""The method that depends on a text."""


class Result:
    """A converted checkpoint whose heads were found.

    Args:
        inputs: the checkpoints.
        weights: the tensors of OUT.

    Attributes:
        modules: the attention modules.
        kinds: the number of modules of each kind.
        decoder: the modules of the decoder's self-attention, in the order of the layers.
        counts: K/V heads of OUT in each layer of the decoder.
        groups: the same; one number where all layers have it.
        changed: the modules with another number of K/V heads in OUT than in SOURCE.
        merged: the modules with fewer.
        method: the claimed method, unless the heads show another: heads that do not become fewer
            are copied or repeated, whatever was asked for.
        folds: whether the method changes queries and outputs too; it is measured against mean
            pooling.
        has_text: whether the method measured on a text.
        modeling: the modelling file that it must come with.

    Raises:
        ConfigError, Failure: as `read_modules` does.
    """

    def __init__(self, inputs: Inputs, weights: Weights) -> None:
        self.inputs = inputs
        self.weights = weights
        self.modules = read_modules(inputs, inputs.source.tensors, weights.tensors)
        self.kinds = Counter(module.kind for module in self.modules)
        decoder = [module for module in self.modules if module.kind == "decoder"]
        self.decoder = sorted(decoder, key=_layer_number)
        self.counts = [module.after for module in self.decoder]
        self.groups = self.counts if len(set(self.counts)) > 1 else self.counts[0]
        self.changed = [module for module in self.modules if module.before != module.after]
        self.merged = [module for module in self.modules if module.after < module.before]
        self.method = inputs.claims.get("method") if self.merged else "repeat"
        self.modeling = inputs.modeling
        if not self.changed:
            self.method = "copy"
            if self.modeling is inputs.family.modeling and not inputs.family.is_converted:
                self.modeling = None  # stock classes load it
        self.folds = self.method in (FACTORED, FITTED)
        self.has_text = inputs.claims.get("calibration") is not None

    @cached_property
    def foldable(self) -> dict[str, set[Role]]:
        """By module, the roles whose heads the method may make anything of; empty for plain
        methods.

        `fit` may change all of them. `factor` folds maps of keys into queries unless a norm or
        clipping lies between them, and maps of values into outputs unless a gate, a norm or
        clipping does; otherwise they are means, as they are in layers that transformers leaves out.
        """
        family, config = self.inputs.family, self.inputs.decoder_config
        merged = [module.name for module in self.merged] if self.folds else []
        run = [name for name in merged if is_run(family, config, name)]
        found: dict[str, set[Role]] = {name: set() for name in merged}
        clips = (config_value(config, key) for key in ("clip_qkv", "attn_config.clip_qkv"))
        is_clipped = any(clips)
        is_normed = family.gainless_key_norm is not None and config.get(*family.gainless_key_norm)
        for name in run or merged:  # as in the converter, where the names of layers tell nothing
            if self.method == FITTED:
                found[name] |= {"query", "key", "value", "output", "output_bias"}
                continue
            gains = f"{name}.{family.key_norm_name}."
            stated = [tensor for tensor in self.inputs.source.tensors if tensor.startswith(gains)]
            has_gains = family.key_norm != "none" and bool(stated)
            if not (is_clipped or is_normed or has_gains or family.key_constraint):
                found[name] |= {"query", "key"}
            if not (is_clipped or family.value_constraint):
                found[name] |= {"value", "output"}
        return found


def read_result(inputs: Inputs, weights: Weights) -> tuple[Result, str]:
    """Find the heads of OUT, and say which they are."""
    result = Result(inputs, weights)
    before = heads_text([module.before for module in result.decoder])
    kinds = [f"{count} modules of {kind} attention" for kind, count in result.kinds.items()]
    return result, (
        f"{result.decoder[0].heads} query heads, {before} -> {heads_text(result.counts)} K/V heads "
        f"in {', '.join(kinds)}"
    )


def _layer_number(module: Module) -> int:
    """The first number in a module's name."""
    return int(next(filter(str.isdigit, module.name.split("."))))
