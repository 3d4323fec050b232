"""The attention of the gradient stages, where there is one that is faster than torch's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gqa_convert.attention.causal_training import causal_attention, trains_fast
from gqa_convert.conversion.fit.precision import Precision

_NAME = "sdpa"


def is_faster(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the gradient stages use `causal_attention` for these tensors: on a CPU, in bfloat16."""
    return torch.is_autocast_enabled("cpu") and trains_fast(query, key, value)


@contextmanager
def training_attention(precision: Precision) -> Iterator[None]:
    """A context of steps in this precision, in which models of transformers that run under `sdpa` use
    `causal_attention` wherever it computes the same: without a mask, in bfloat16, on a CPU.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS[_NAME]

    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        plain = attention_mask is None and not any(options.get(name) for name in ("dropout", "softcap"))
        plain = plain and options.get("position_bias") is None and options.get("cache") is None
        if causal and plain and is_faster(query, key, value):
            return causal_attention(query, key, value, options.get("scaling")).transpose(1, 2).contiguous(), None
        return before(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]

    ALL_ATTENTION_FUNCTIONS[_NAME] = forward
    try:
        with precision():
            yield
    finally:
        ALL_ATTENTION_FUNCTIONS[_NAME] = before
