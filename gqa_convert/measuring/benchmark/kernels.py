"""Finds out which attention function a model calls."""

from collections.abc import Sequence
from typing import Any

from gqa_convert.errors import OptionError
from gqa_convert.measuring.benchmark.subject import UnknownAttentionError
from gqa_convert.measuring.benchmark.versions import Version

OWN = "the model's own"


def running_attention(versions: Sequence[Version], *, asked: str | None) -> str:
    """The name of the attention function that every version's decode step calls.

    Some models of transformers have separate attention code and ignore the name.

    Args:
        versions: built with that name.
        asked: by the user; None for the default.

    Returns:
        The function's name, or a statement that the model has separate attention code.

    Raises:
        UnknownAttentionError: a version does not run with it, or another function runs than the one asked for.
    """
    model_type, name = versions[0].plan.family.model_type, str(versions[0].model.config._attn_implementation)
    try:
        called = [_calls(version.model) for version in versions]
    except (OptionError, AttributeError, TypeError, ValueError) as problem:
        raise UnknownAttentionError(
            f"--attention {name}: this {model_type} does not run with it ({problem}): choose another"
        ) from None
    if all(called):
        return name
    if asked in (None, "eager"):
        return OWN
    raise UnknownAttentionError(
        f"--attention {asked}: transformers' {model_type} has separate attention code: leave it out"
    )


def _calls(model: Any) -> bool:
    """Whether a decode step goes through transformers' table of attention functions."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from gqa_convert.measuring.benchmark.decoding import Decoder

    name = model.config._attn_implementation
    if name == "eager":
        return True
    before, calls = ALL_ATTENTION_FUNCTIONS[name], []

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return before(*arguments, **options)

    ALL_ATTENTION_FUNCTIONS[name] = counting
    try:
        config = model.config
        decoder = Decoder(
            model, 1, 1, (getattr(config, "max_source_positions", None) or 2) if config.is_encoder_decoder else None
        )
        decoder.fill()
        calls.clear()
        decoder.step()
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = before
    return bool(calls)
