"""Which models of transformers may run under `attn_implementation="gqa"`.

transformers checks its own attention functions against what a class declares, but accepts every registered name for
every class. A class that never calls the registered function would still receive that function's masks, and would
compute something else without an error.
"""

from typing import Any

import torch

from gqa_convert.errors import UnsupportedAttentionError

VERIFIED = frozenset({"longt5", "gqa_longt5", "switch_transformers", "gqa_switch_transformers"})
"""Model types that rule out transformers' sdpa attention, and whose logits here equal those of eager attention all the
same.
"""


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
        return f"{name} adds ALiBi twice in transformers' eager attention and once in its sdpa attention"
    if not model_class._can_set_attn_implementation():
        return f"{name} has custom attention code"
    if model_class._supports_sdpa or config.model_type in VERIFIED:
        return None
    if hasattr(config, "attn_logit_softcapping"):
        cap = config.attn_logit_softcapping
        return (
            None
            if cap is None
            else f"{name} caps its attention scores (attn_logit_softcapping is {cap})"
        )
    return f"{name} rules out scaled dot-product attention (for example because of attention sinks or an attention bias)"


def checked_mask(*arguments: Any, config: Any = None, **options: Any) -> Any:
    """transformers' mask for sdpa attention, which is None where causality is all there is to it, with two checks.

    Gemma's modules call themselves bidirectional even where its masks are causal, so that there the mask must not be None.

    Raises:
        UnsupportedAttentionError: the config's model would not compute the same as under eager attention.
    """
    from transformers.masking_utils import sdpa_mask
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if type(config) in MODEL_MAPPING and not torch.compiler.is_compiling():
        found = MODEL_MAPPING[type(config)]
        reason = why_unsupported(found[0] if isinstance(found, tuple) else found, config)
        if reason is not None:
            raise UnsupportedAttentionError(
                f"{reason}, so that '{config._attn_implementation}' attention would change its results: omit attn_implementation"
            )
    # getattr takes long on configs that lack it
    if config is not None and vars(config).get("use_bidirectional_attention"):
        options["allow_is_causal_skip"] = False
    return sdpa_mask(*arguments, config=config, **options)
