"""Decides whether a conversion begins with a rewriting, and plans it from headers: all that can be refused is refused."""

from collections.abc import Sequence
from typing import Any

from gqa_convert.checkpoint.quantised import quantisation_method
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.conversion.rewriting.conditions import NoStockClassError
from gqa_convert.conversion.rewriting.dequantising import dequantised
from gqa_convert.conversion.rewriting.stock_form import DECODERS, REMOTE_CODE, decoder_form
from gqa_convert.conversion.rewriting.stock_tensors import as_stock_type
from gqa_convert.errors import OptionError, UnsupportedFamilyError
from gqa_convert.families.table import FAMILIES


def plan_rewriting(
    checkpoint: Checkpoint, groups: int | Sequence[int] = 1, *, native: bool | None = None
) -> Checkpoint:
    """The source in the form in which it is converted: as it is, or with recipes for the tensors of another form.

    Args:
        checkpoint: the source, opened with `quantised`.
        groups: K/V heads per layer in the result.
        native: rewrite types without a K/V-head count for a stock class that has one (True), never (False), or where
            there is one and the number of heads changes (None). A type that has no modelling file is always rewritten.

    Raises:
        UnsupportedFamilyError: no stock class computes the same as a type that has no other form.
        ConfigError: the tensors do not belong to the config.
        UnsupportedFormatError: a tensor has a type that can't be read in numbers.
        OptionError: `native`, and no stock class computes the same; or not `native`, and there is no modelling file.
    """
    config = checkpoint.config
    if quantisation_method(config) is not None:
        return dequantised(checkpoint)
    model_type = str(config.get("model_type"))
    form, family = REMOTE_CODE.get(model_type), FAMILIES.get(model_type)
    can_stay = False
    if form is None:
        if (
            family is None
            or family.is_converted
            or not (family.becomes or family.modeling)
            or not isinstance(groups, int)
        ):
            return checkpoint
        if family.becomes and native is False:
            raise OptionError(
                f"--no-native: a {model_type} has no modelling file: leave the option out to get a {family.becomes}"
            )
        can_stay = not family.becomes
        is_copy = groups == config.get(family.heads_key, config.get("num_attention_heads"))
        if can_stay and (native is False or (native is None and is_copy)):
            return checkpoint
    try:
        return as_stock_type(checkpoint, form or decoder_form(config, groups), can_stay=can_stay)
    except NoStockClassError as problem:
        reason = f"no stock class computes the same as this {model_type}: {problem}"
        if not can_stay:
            raise UnsupportedFamilyError(reason) from None
        if native:
            raise OptionError(f"--native: {reason}; leave the option out to get a modelling file") from None
        return checkpoint


def needs_rewriting(config: Config, result_type: Any) -> bool:
    """Whether a conversion to a result of this model type begins with a rewriting.

    Args:
        config: the source's.
        result_type: the model type that the result's config states.
    """
    if quantisation_method(config) is not None or config.get("model_type") in REMOTE_CODE:
        return True
    return any((form.model_type, form.stock) == (config.get("model_type"), result_type) for form in DECODERS)
