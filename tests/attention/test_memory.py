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
def test_another_memory_of_the_same_shape_is_refused(
    mode: Callable[[], torch.inference_mode], batch_first: bool
) -> None:
    with mode():
        layer, cache, queries, memory = (
            cross(batch_first=batch_first),
            KVCache(),
            numbers(3, 3, EMBED_DIM),
            numbers(3, 3, EMBED_DIM),
        )
        expected = layer(queries, memory)
        torch.testing.assert_close(layer(queries, memory, cache=cache), expected)
        one_number_off = memory.clone()
        one_number_off[2, 1, 5] += 1
        for other in (numbers(3, 3, EMBED_DIM), one_number_off, memory.flip(0), memory.transpose(0, 1), memory.float()):
            with pytest.raises(OptionError, match="another memory"):
                layer(queries, other, cache=cache)
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
            memory[1, 3, 4] = torch.nextafter(memory[1, 3, 4], torch.tensor(9.0, dtype=torch.float64))
            with pytest.raises(OptionError, match="changed in place"):
                layer(queries, memory, cache=cache)
            torch.testing.assert_close(layer(queries, memory, cache=KVCache()), layer(queries, memory))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch_first", [True, False])
@torch.inference_mode()
def test_a_buffer_that_was_filled_anew_is_noticed_without_counted_writes(dtype: torch.dtype, batch_first: bool) -> None:
    layer = cross(batch_first=batch_first).to(dtype)
    queries, memory = numbers(3, 3, EMBED_DIM).to(dtype), numbers(3, 3, EMBED_DIM).to(dtype)
    for write in (
        lambda: memory.copy_(numbers(3, 3, EMBED_DIM)),
        lambda: memory[2, 1].copy_(numbers(EMBED_DIM)),
        lambda: memory.copy_(memory.flip(0)),
        lambda: memory.copy_(memory.flip(1)),
        lambda: memory.copy_(memory.flip(2)),
    ):
        cache = KVCache()
        layer(queries, memory, cache=cache)
        layer(queries, memory, cache=cache)
        write()
        with pytest.raises(OptionError, match="changed in place"):
            layer(queries, memory, cache=cache)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_memory_is_accepted_in_any_form_and_may_be_left_out(mode: Callable[[], torch.inference_mode]) -> None:
    with mode():
        layer, cache, memory = cross(), KVCache(), numbers(2, 7, EMBED_DIM)
        layer(numbers(2, 1, EMBED_DIM), memory, cache=cache)
        for same in (memory, memory[:], memory.detach(), memory.clone(), None):
            queries = numbers(2, 1, EMBED_DIM)
            torch.testing.assert_close(layer(queries, same, cache=cache), layer(queries, memory))
        queries = numbers(2, 1, EMBED_DIM)
        torch.testing.assert_close(layer(queries, memory, cache=copy.deepcopy(cache)), layer(queries, memory))


def test_values_of_their_own_are_remembered_too() -> None:
    with torch.no_grad():
        layer, cache = cross(kdim=10, vdim=10), KVCache()
        queries, memory, values = numbers(2, 1, EMBED_DIM), numbers(2, 7, 10), numbers(2, 7, 10)
        expected = layer(queries, memory, values, cache=cache)
        torch.testing.assert_close(layer(queries, memory, values, cache=cache), expected)
        torch.testing.assert_close(layer(queries, cache=cache), expected)
        for other in (values + 1, memory, None):
            with pytest.raises(OptionError, match="another memory"):
                layer(queries, memory, other, cache=cache)
        with pytest.raises(OptionError, match="without memory"):
            layer(queries, memory_values=values, cache=cache)
        cache = KVCache()
        layer(queries, memory, cache=cache)  # which is the values' memory too
        layer(queries, memory, memory.clone(), cache=cache)
        with pytest.raises(OptionError, match="another memory"):
            layer(queries, memory, values, cache=cache)


def test_the_same_memory_is_not_read_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        layer, cache, memory = cross(), KVCache(), numbers(2, 7, EMBED_DIM)
        layer(numbers(2, 1, EMBED_DIM), memory, cache=cache)
        monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("the memory was read"))
        layer(numbers(2, 1, EMBED_DIM), memory, cache=cache)
        layer(numbers(2, 1, EMBED_DIM), memory[:], cache=cache)


def test_a_memory_is_held_while_its_cache_lives() -> None:
    # a freed memory would give its address to the next one
    with torch.no_grad():
        layer, cache, queries = cross(), KVCache(), numbers(2, 1, EMBED_DIM)
        layer(queries, numbers(2, 7, EMBED_DIM), cache=cache)
        for _ in range(20):
            with pytest.raises(OptionError, match="another memory"):
                layer(queries, numbers(2, 7, EMBED_DIM), cache=cache)


@torch.no_grad()
def test_a_cache_serves_one_kind_of_attention() -> None:
    inputs, memory, of_tokens, of_memory = numbers(2, 7, EMBED_DIM), numbers(2, 7, EMBED_DIM), KVCache(), KVCache()
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


@torch.no_grad()
def test_a_memory_is_kept_or_forgotten_as_a_whole() -> None:
    layer, cache, queries = cross(), KVCache(), numbers(2, 1, EMBED_DIM)
    for length in (7, 7, 5):
        memory = numbers(2, length, EMBED_DIM)
        torch.testing.assert_close(layer(queries, memory, cache=cache), layer(queries, memory))
        cache.truncate(length)
        assert cache.holds_memory
        with pytest.raises(OptionError, match="cannot be cut"):
            cache.truncate(3)
        cache.truncate(0)
        assert not cache.holds_memory
    empty = numbers(2, 0, EMBED_DIM)
    for _ in range(2):
        assert not layer(queries, empty, cache=cache).any()
