"""How fast a CPU computes, from one product of matrices in numpy: a rough rate for `plan`, which does not import torch."""

from pathlib import Path

from gqa_convert.conversion.fit.rates import LayerSizes, Rates, double_rate, product_rate

_SIZE = 512
"""Rows and columns of the timed matrices."""

# Seconds of each computation in torch per operation of its products, over those of the product in numpy: the middle of
# `measured_rates` over five sizes from 192 to 8,192 hidden units, on one core with AVX-512 and its bfloat16.
_FULL = {"attention": 1.3, "attention_gradient": 4.2, "feed_forward": 1.2, "logits": 1.3, "logits_gradient": 2.9}
_REDUCED = {"attention": 0.75, "attention_gradient": 2.1, "feed_forward": 0.55, "logits": 0.55, "logits_gradient": 1.2}
_BOTH_WAYS = 2.4
"""Of the feed-forward, over its forward pass: with gradients to the states alone."""
_SINGLE = 1.35
"""Of a product of a batch's states with themselves."""


def probed_rates(sizes: LayerSizes, *, reduced: bool) -> Rates:
    """Rate a layer's computations on the CPU by the operations of their products.

    Args:
        sizes: of the layer.
        reduced: whether products with activations are made in bfloat16.
    """
    rate = product_rate("float32", _SIZE)
    share = _REDUCED if reduced else _FULL
    head_dims = sizes.key_head_dim + sizes.value_head_dim
    scores = sizes.block * sizes.heads * head_dims

    def attention(kv_heads: int) -> int:
        return 2 * head_dims * sizes.hidden_size * (sizes.heads + kv_heads) + scores

    feed_forward = 2 * sizes.feed_forward * share["feed_forward"] * rate
    logits = 2 * sizes.hidden_size * sizes.vocabulary * rate
    return Rates(
        attention=attention(sizes.kv_heads) * share["attention"] * rate,
        attention_gradient=attention(sizes.trained_kv_heads) * share["attention_gradient"] * rate,
        feed_forward=feed_forward,
        feed_forward_gradient=_BOTH_WAYS * feed_forward,
        logits=logits * share["logits"],
        logits_gradient=logits * share["logits_gradient"],
        single=_SINGLE * rate,
        double=double_rate(),
    )


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16, by what Linux says of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not {"avx512_bf16", "bf16"}.isdisjoint(flags.split())
