"""Decides whether a conversion begins with a rewriting, and plans it from headers: all that can be refused is refused."""

from collections.abc import Sequence
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.rewriting.gpt2 import rewrite_gpt2
from gqa_convert.conversion.rewriting.gpt_neox import rewrite_gpt_neox
from gqa_convert.conversion.rewriting.stock_config import STOCK_TYPES, NoStockClassError
from gqa_convert.errors import OptionError
from gqa_convert.families.table import FAMILIES
from gqa_convert.runtime.json_objects import Config


def plan_rewriting(
    checkpoint: Checkpoint, groups: int | Sequence[int] = 1, *, native: bool | None = None
) -> Checkpoint:
    """The source in the form in which it is converted: as it is, or with recipes for the tensors of another form.

    Args:
        checkpoint: the source.
        groups: K/V heads per layer in the result.
        native: rewrite types without a K/V-head count for a stock class that has one (True), never (False), or where
            there is one and the number of heads changes (None).

    Raises:
        ConfigError: the tensors do not belong to the config.
        UnsupportedFormatError: a tensor has a type that can't be read in numbers.
        OptionError: `native`, and no stock class computes the same.
    """
    config = checkpoint.config
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if (
        family is None
        or family.is_converted
        or family.modeling is None
        or not isinstance(groups, int)
    ):
        return checkpoint
    is_copy = groups == config.get(family.heads_key, config.get("num_attention_heads"))
    if native is False or (native is None and is_copy):
        return checkpoint
    try:
        if "auto_map" in config:
            raise NoStockClassError(
                f"the checkpoint contains modelling code for {model_type}, which may compute something else"
            )
        if model_type == "gpt_neox":
            return rewrite_gpt_neox(checkpoint)
        if model_type != "gpt2":
            raise NoStockClassError(
                f"no stock class is known to compute what {model_type} does with fewer K/V heads"
            )
        if groups != 1:
            raise NoStockClassError(
                "gpt_bigcode, which is GPT-2 otherwise, has either one K/V head or as many as query heads"
            )
        return rewrite_gpt2(checkpoint)
    except NoStockClassError as problem:
        if native:
            raise OptionError(
                f"--native: no stock class computes the same as this {model_type}: {problem}; leave the option out to get a "
                "modelling file"
            ) from None
        return checkpoint


def needs_rewriting(config: Config, result_type: Any) -> bool:
    """Whether a conversion to a result of this model type begins with a rewriting.

    Args:
        config: the source's.
        result_type: the model type that the result's config states.
    """
    return any(
        (known.model_type, known.stock) == (config.get("model_type"), result_type)
        for known in STOCK_TYPES
    )
