"""Causal attention for training in bfloat16 on a CPU: torch's kernel in float32 is the reference."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gqa_convert.attention.causal_training import LENGTHS, causal_attention, trains_fast


def tensors(
    heads: int, groups: int, length: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * length)
    shapes = [(2, heads, length, head_dim), (2, groups, length, head_dim), (2, groups, length, value_dim)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("heads", "groups", "length", "head_dim", "value_dim"),
    [(6, 2, 256, 16, 24), (6, 1, 300, 8, 8), (3, 3, 385, 40, 16)],
)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_and_gradients(
    heads: int, groups: int, length: int, head_dim: int, value_dim: int, scale: float | None, autocast: bool
) -> None:
    own = tensors(heads, groups, length, head_dim, value_dim, torch.bfloat16)
    exact = [tensor.detach().float().requires_grad_() for tensor in own]
    repeated = [exact[0], *(tensor.repeat_interleave(heads // groups, 1) for tensor in exact[1:])]
    wanted = scaled_dot_product_attention(*repeated, is_causal=True, scale=scale)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = causal_attention(*own, scale=scale)
    assert found.dtype == torch.bfloat16
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted.backward(weights.float())
    found.backward(weights)
    for ours, theirs in [(found, wanted), *((a.grad, b.grad) for a, b in zip(own, exact, strict=True))]:
        error = (ours.float() - theirs).norm() / theirs.norm()
        assert error < 0.012, "roundings of bfloat16 alone"


def test_no_query_sees_a_later_token() -> None:
    own = tensors(2, 1, 300, 8, 8, torch.bfloat16)
    for place in (127, 128, 200):
        for tensor in own:
            tensor.grad = None
        causal_attention(*own)[:, :, place].float().sum().backward()
        for tensor in own:
            assert (tensor.grad[:, :, place + 1 :] == 0).all()
            assert (tensor.grad[:, :, place] != 0).any()


def test_where_it_runs() -> None:
    query, key, value = tensors(4, 2, 256, 8, 8, torch.float32)
    assert trains_fast(query, key, value)
    assert trains_fast(query.detach(), key.detach(), value)
    assert not trains_fast(query.detach(), key.detach(), value.detach())
    with torch.no_grad():
        assert not trains_fast(query, key, value)
    assert not trains_fast(query[:, :, :255], key[:, :, :255], value[:, :, :255])
    assert not trains_fast(query[:, :, 1:], key, value)
    long = torch.empty(1, 1, LENGTHS.stop, 1, requires_grad=True)
    assert not trains_fast(long, long, long)
