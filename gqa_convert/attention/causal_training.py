"""Causal attention with gradients in bfloat16 on a CPU, for prompts without padding.

torch's own kernel takes 1.5 to 2 times as long there: its backward pass multiplies blocks too small for the
processor's bfloat16 products. Here the rows of all query heads of a group that fall into a chunk of the sequence are one
matrix, which is multiplied with the keys up to the end of the chunk, and the probabilities are kept for the way back.
Scores are rounded to bfloat16 before the softmax, as in transformers' eager attention.

Shape legend: b batch, H query heads, N key/value heads, R = H / N, l length, n rows of a chunk, c head_dim, e head_dim
of the values.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK = 128
"""Rows of a chunk: of 64 to 512, the fastest at a length of 1024 with head dims of 64 and 128."""
LENGTHS = range(256, 2049)
"""Shorter sequences gain nothing, and the probabilities of longer ones take too much memory."""


def trains_fast(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `causal_attention` is made for these tensors: they are on a CPU, of one length in `LENGTHS`, and a
    gradient is wanted. Their types do not count.
    """
    heads, length = query.shape[1], query.shape[2]
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
    scale = query.shape[3] ** -0.5 if scale is None else scale
    with torch.autocast("cpu", enabled=False):
        out: Tensor = _CausalAttention.apply(query.bfloat16(), key.bfloat16(), value.bfloat16(), scale)
    return out


class _CausalAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        batch, heads, length, head_dim = query.shape
        groups = key.shape[1]
        rows = (query * scale).view(batch, groups, heads // groups, length, head_dim)
        key, value = key.reshape(-1, length, head_dim), value.reshape(batch * groups, length, -1)
        later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool).triu(1)
        out = query.new_empty(*rows.shape[:4], value.shape[2])
        kept = []
        for first, last in _chunks(length):
            count = last - first
            scores = torch.bmm(_chunk(rows, first, last), key[:, :last].transpose(1, 2))
            scores.unflatten(1, (-1, count))[..., first:].masked_fill_(later[:count, :count], -torch.inf)
            kept.append(scores.softmax(-1))
            out[:, :, :, first:last] = torch.bmm(kept[-1], value[:, :last]).view_as(out[:, :, :, first:last])
        ctx.save_for_backward(rows, key, value, *kept)
        ctx.scale = scale
        return out.view(batch, heads, length, -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows, key, value, *kept = ctx.saved_tensors
        batch, groups, ratio, length, head_dim = rows.shape
        gradient = gradient.bfloat16().view(batch, groups, ratio, length, -1)
        to_query = torch.empty_like(rows)
        to_key, to_value = torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32)
        for (first, last), probabilities in zip(_chunks(length), kept, strict=True):
            above = _chunk(gradient, first, last)
            to_value[:, :last] += torch.bmm(probabilities.transpose(1, 2), above)
            weighed = torch.bmm(above, value[:, :last].transpose(1, 2))
            scores = torch._softmax_backward_data(weighed, probabilities, -1, probabilities.dtype)
            to_query[:, :, :, first:last] = torch.bmm(scores, key[:, :last]).view_as(to_query[:, :, :, first:last])
            to_key[:, :last] += torch.bmm(scores.transpose(1, 2), _chunk(rows, first, last))
        return (
            to_query.mul_(ctx.scale).view(batch, groups * ratio, length, head_dim),
            to_key.bfloat16().view(batch, groups, length, head_dim),
            to_value.bfloat16().view(batch, groups, length, -1),
            None,
        )


def _chunks(length: int) -> list[tuple[int, int]]:
    return [(first, min(first + _CHUNK, length)) for first in range(0, length, _CHUNK)]


def _chunk(rows: Tensor, first: int, last: int) -> Tensor:
    """The rows of a chunk, [b, N, R, l, c] -> [b * N, R * n, c]."""
    return rows[:, :, :, first:last].flatten(2, 3).flatten(0, 1)
