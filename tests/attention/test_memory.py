"""A cache of cross-attention never answers for another memory."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gqa_convert.attention import GroupedQueryAttention, KVCache, Rotary
from gqa_convert.errors import OptionError
from tests.helpers.attention import numbers

EMBED_DIM = 24
MODES = [torch.no_grad, torch.inference_mode]


def cross(**options: object) -> GroupedQueryAttention:
    return GroupedQueryAttention(EMBED_DIM, 6, 2, dtype=torch.float64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_first", [True, False])
def test_another_memory_of_the_same_shape_is_refused(
    mode: Callable[[], torch.inference_mode], batch_first: bool
) -> None:
    with mode():
        layer, cache = cross(batch_first=batch_first), KVCache()
        queries, memory = numbers(3, 3, EMBED_DIM), numbers(3, 3, EMBED_DIM)
        expected = layer(queries, memory)
        torch.testing.assert_close(layer(queries, memory, cache=cache), expected)
        one_number_off = memory.clone()
        one_number_off[2, 1, 5] += 1
        others = [numbers(3, 3, EMBED_DIM), one_number_off, memory.flip(0), memory.transpose(0, 1)]
        for other in (*others, memory.float(), memory[:, :2], memory[:2]):
            with pytest.raises(OptionError, match="another memory"):
                layer(queries, other, cache=cache)
        with pytest.raises(OptionError, match="another memory"):
            layer(queries, memory, numbers(3, 3, EMBED_DIM), cache=cache)  # of the values alone
        # the refusals leave the cache as it was
        torch.testing.assert_close(layer(queries, memory, cache=cache), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_memory_that_was_written_to_is_refused(mode: Callable[[], torch.inference_mode]) -> None:
    outside = numbers(2, 7, EMBED_DIM)
    with mode():
        layer, queries = cross(), numbers(2, 1, EMBED_DIM)
        for memory in (numbers(2, 7, EMBED_DIM), outside):
            cache = KVCache()
            layer(queries, memory, cache=cache)
            memory[1, 3, 4] = torch.nextafter(
                memory[1, 3, 4], torch.tensor(9.0, dtype=torch.float64)
            )
            with pytest.raises(OptionError, match="changed in place"):
                layer(queries, memory, cache=cache)
            torch.testing.assert_close(
                layer(queries, memory, cache=KVCache()), layer(queries, memory)
            )


@pytest.mark.parametrize("mode", MODES)
def test_the_same_memory_is_accepted_in_any_form_and_may_be_left_out(
    mode: Callable[[], torch.inference_mode],
) -> None:
    with mode():
        layer, cache, memory = (
            cross(kdim=10, vdim=14),
            KVCache(),
            (numbers(2, 7, 10), numbers(2, 7, 14)),
        )
        layer(numbers(2, 1, EMBED_DIM), *memory, cache=cache)
        assert (cache.keys.shape, cache.values.shape) == ((2, 2, 7, 4), (2, 2, 7, 4))
        for same in (lambda x: x, lambda x: x[:], Tensor.detach, Tensor.clone, lambda _: None):
            queries = numbers(2, 1, EMBED_DIM)
            torch.testing.assert_close(
                layer(queries, *map(same, memory), cache=cache), layer(queries, *memory)
            )
        queries = numbers(2, 1, EMBED_DIM)
        torch.testing.assert_close(
            layer(queries, *memory, cache=copy.deepcopy(cache)), layer(queries, *memory)
        )


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
    with pytest.raises(OptionError, match="self-attention"):
        of_tokens.check_memory(memory, memory)
