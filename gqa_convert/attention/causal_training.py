"""Causal attention with gradients in bfloat16 on a CPU, for prompts without padding.

torch's own kernel takes 1.5 to 2 times as long there: its backward pass multiplies blocks too small for the
processor's bfloat16 products. Here the rows of all query heads of a group that fall into a chunk of the sequence are one
matrix, which is multiplied with the keys up to the end of the chunk, and the probabilities are kept for the way back.
Scores are rounded to bfloat16 before the softmax, as in transformers' eager attention.

Shape legend: b batch, H query heads, N key/value heads, R = H / N, l length, n rows of a chunk, c head_dim, e head_dim
of the values.
"""

import torch
from torch import Tensor

_CHUNK = 128
"""Rows of a chunk: of 64 to 512, the fastest at a length of 1024 with head dims of 64 and 128."""
LENGTHS = range(256, 2049)
"""Shorter sequences gain nothing, and the probabilities of longer ones take too much memory."""


def trains_fast(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `causal_attention` is made for these tensors: they are on a CPU, of one length in `LENGTHS`, and a
    gradient is wanted. Their types do not count.
    """
    heads, length = query.shape[1:3]
    return (
        torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
        and query.is_cpu
        and length in LENGTHS
        and length == key.shape[2]
        and heads % key.shape[1] == 0
    )


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """softmax(scale * query key^T) value in bfloat16, where query i sees the keys up to i, and R consecutive query heads
    share a key/value head.

    Args:
        query: [b, H, l, c].
        key: [b, N, l, c].
        value: [b, N, l, e].
        scale: factor of the scores; by default 1 / sqrt(c).

    Returns:
        [b, H, l, e], bfloat16.
    """
    batch, heads, length, head_dim = query.shape
    groups = key.shape[1]
    ratio = heads // groups
    outputs = []
    with torch.autocast("cpu", enabled=False):
        rows = query.bfloat16().unflatten(1, (groups, ratio)) * (head_dim**-0.5 if scale is None else scale)
        # in float32, in which the gradients of all chunks are summed
        keys, values = key.bfloat16().float().flatten(0, 1), value.bfloat16().float().flatten(0, 1)
        for first in range(0, length, _CHUNK):
            last = min(first + _CHUNK, length)
            chunk = rows[:, :, :, first:last].flatten(2, 3).flatten(0, 1)  # [b * N, R * n, c]
            hidden = torch.full((last - first, last), -torch.inf, dtype=torch.bfloat16).triu(first + 1).repeat(ratio, 1)
            scores = torch.baddbmm(hidden, chunk, keys[:, :last].bfloat16().transpose(1, 2))
            out = torch.bmm(scores.softmax(-1), values[:, :last].bfloat16())
            outputs.append(out.view(batch, heads, last - first, -1))
    return torch.cat(outputs, dim=2)
