"""The attention function that models of transformers run under `attn_implementation="gqa"`.

transformers checks its own attention functions against what a class declares, but accepts every
registered name for every class. A class that never calls the registered function would still
receive that function's masks, and would compute something else without an error: `checked_mask`
refuses it.

Shape legend: b batch, H query heads, N key/value heads, q queries, k keys, c head_dim, e head_dim
of the values.
"""

from typing import Any

import torch
from torch import Tensor

from gqa_convert.errors import OptionError, UnsupportedAttentionError

from .core import grouped_query_attention

REFUSED = {
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "cache": "a paged cache",
    "output_attentions": "returned attention weights",
}
"""Arguments that change the result and that this function cannot honour."""
VERIFIED = frozenset({"longt5", "gqa_longt5", "switch_transformers", "gqa_switch_transformers"})
"""Model types that rule out transformers' sdpa attention, and whose logits here equal those of
eager attention all the same.
"""


def register(name: str = "gqa") -> None:
    """Make `name` an attention implementation of transformers: `from_pretrained(...,
    attn_implementation="gqa")`.

    The function of the masks is registered beside it: without one, transformers would pass no mask
    and padding would be attended to. A model that would compute something else than with eager
    attention is refused in its first forward pass, by an `UnsupportedAttentionError`: models with
    attention code of their own (BLOOM, CodeGen, Falcon, GPT-J, GPT-Neo and MPT in transformers),
    with capped scores, or with attention sinks.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, checked_mask)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer; its `is_causal` counts where the argument is None.
        query: [b, H, q, c].
        key: [b, N, k, c].
        value: [b, N, k, e].
        attention_mask: [b|1, H|1, q, k], boolean or added to the scores. None means no padding.
            Then a prefill is causal from the first key on (a static cache is longer than what it
            holds), and a single query sees every key.
        dropout: probability.
        scaling: factor of the scores; by default 1 / sqrt(c).
        is_causal: whether a query sees earlier keys only, where there is no mask.
        position_bias: [b|1, H, q, k], added to the scores.
        sliding_window: how many keys a query sees, including its own. The mask must contain it,
            unless there are no more keys than that.
        options: what else the model passes.

    Returns:
        [b, q, H, e] and None.

    Raises:
        OptionError: the model asks for something that this function would ignore.
    """
    for option, meaning in REFUSED.items():
        if options.get(option) is not None and options[option] is not False:
            raise OptionError(
                f"the model asks for {meaning} ({option}), which this attention lacks: "
                "load it with attn_implementation='eager'"
            )
    # where transformers passes no mask, the order of tokens is all there is to it
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if (
        attention_mask is None
        and sliding_window is not None
        and causal
        and key.shape[2] > sliding_window
    ):
        raise OptionError(
            f"the model leaves its window of {sliding_window} out of the mask of {key.shape[2]} "
            "keys: load it with attn_implementation='eager'"
        )
    causal = bool(causal) and query.shape[2] > 1 and attention_mask is None
    out = grouped_query_attention(
        query,
        key,
        value,
        mask=attention_mask,
        bias=position_bias,
        causal=causal,
        cached=0 if causal else None,
        scale=scaling,
        dropout=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def why_unsupported(model_class: Any, config: Any) -> str | None:
    """Why a model would not compute the same under this attention as under eager attention.

    Args:
        model_class: a `PreTrainedModel`.
        config: of the model.

    Returns:
        The reason, as a clause whose subject is the class; None if there is none.
    """
    name = model_class.__name__
    if getattr(config, "alibi", False) and str(config.model_type).removeprefix("gqa_") == "falcon":
        return (
            f"{name} adds ALiBi twice in transformers' eager attention "
            "and once in its sdpa attention"
        )
    if not model_class._can_set_attn_implementation():
        return f"{name} has custom attention code"
    if model_class._supports_sdpa or config.model_type in VERIFIED:
        return None
    if not hasattr(config, "attn_logit_softcapping"):
        return (
            f"{name} rules out scaled dot-product attention "
            "(for example because of attention sinks or an attention bias)"
        )
    cap = config.attn_logit_softcapping
    if cap is None:
        return None
    return f"{name} caps its attention scores (attn_logit_softcapping is {cap})"


def checked_mask(*arguments: Any, config: Any = None, **options: Any) -> Any:
    """transformers' mask for sdpa attention, which is None where causality is all there is to it,
    with two checks.

    Gemma's modules call themselves bidirectional even where its masks are causal, so that there the
    mask must not be None.

    Raises:
        UnsupportedAttentionError: the config's model would not compute the same as under eager
            attention.
    """
    from transformers.masking_utils import sdpa_mask
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if type(config) in MODEL_MAPPING and not torch.compiler.is_compiling():
        found = MODEL_MAPPING[type(config)]
        reason = why_unsupported(found[0] if isinstance(found, tuple) else found, config)
        if reason is not None:
            raise UnsupportedAttentionError(
                f"{reason}, so that '{config._attn_implementation}' attention would change its "
                "results: omit attn_implementation"
            )
    # getattr takes long on configs that lack it
    if config is not None and vars(config).get("use_bidirectional_attention"):
        options["allow_is_causal_skip"] = False
    return sdpa_mask(*arguments, config=config, **options)
