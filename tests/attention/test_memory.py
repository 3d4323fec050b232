"""A cache of cross-attention never answers for another memory."""

import copy
from collections.abc import Callable

import pytest
import torch

from gqa_convert.attention import GroupedQueryAttention, KVCache, Rotary
from gqa_convert.errors import OptionError
from tests.helpers.attention import numbers

EMBED_DIM = 24
MODES = [torch.no_grad, torch.inference_mode]


def cross(**options: object) -> GroupedQueryAttention:
    return GroupedQueryAttention(EMBED_DIM, 6, 2, dtype=torch.float64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_second_memory_is_refused(
    mode: Callable[[], torch.inference_mode], batch_first: bool
) -> None:
    with mode():
        layer, cache = cross(batch_first=batch_first), KVCache()
        queries, memory = numbers(3, 3, EMBED_DIM), numbers(3, 3, EMBED_DIM)
        expected = layer(queries, memory)
        torch.testing.assert_close(layer(queries, memory, cache=cache), expected)
        for other in (numbers(3, 3, EMBED_DIM), memory):
            with pytest.raises(OptionError, match="leave out a memory that the cache holds"):
                layer(queries, other, cache=cache)
        # the refusals leave the cache as it was
        torch.testing.assert_close(layer(queries, cache=cache), expected)


@pytest.mark.parametrize("mode", MODES)
def test_the_memory_in_a_cache_is_left_out(mode: Callable[[], torch.inference_mode]) -> None:
    with mode():
        layer, cache = cross(kdim=10, vdim=14), KVCache()
        memory = (numbers(2, 7, 10), numbers(2, 7, 14))
        layer(numbers(2, 1, EMBED_DIM), *memory, cache=cache)
        assert (cache.keys.shape, cache.values.shape) == ((2, 2, 7, 4), (2, 2, 7, 4))
        for held in (cache, copy.deepcopy(cache)):
            queries = numbers(2, 1, EMBED_DIM)
            torch.testing.assert_close(layer(queries, cache=held), layer(queries, *memory))


@torch.no_grad()
def test_a_cache_serves_one_kind_of_attention() -> None:
    inputs, memory, of_tokens, of_memory = (
        numbers(2, 7, EMBED_DIM),
        numbers(2, 7, EMBED_DIM),
        KVCache(),
        KVCache(),
    )
    cross()(inputs, cache=of_tokens)
    with pytest.raises(OptionError, match="holds 7 keys already"):
        cross()(inputs, memory, cache=of_tokens)
    cross()(inputs, memory, cache=of_memory)
    for options in ({"causal": True}, {"rotary": Rotary()}):
        with pytest.raises(OptionError, match="cross-attention"):
            cross(**options)(inputs, cache=of_memory)
    with pytest.raises(OptionError, match="another cache"):
        of_memory.append(of_memory.keys, of_memory.values)
