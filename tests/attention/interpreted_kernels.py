"""The Triton kernels in Triton's interpreter, on tensors in memory, against attention written out in float64.

`test_decoding_cuda.py` runs this file in a process of its own: Triton reads TRITON_INTERPRET when it is imported, for good.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from gqa_convert.attention import core as core_module
from gqa_convert.attention import grouped_query_attention
from gqa_convert.attention.decoding import cuda

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
BLOCK = 32  # keys, in float32


@pytest.fixture(autouse=True, scope="session")
def products_of_bfloat16() -> Iterator[None]:
    """The interpreter keeps bfloat16 as integers, and multiplies those."""
    stock = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpreterBuilder, "create_dot", lambda self, a, b, *rest: stock(self, widened(a), widened(b), *rest)
        )
        yield


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """`grouped_query_attention` takes the way that it takes on a GPU with room for four programs; what came out of it."""
    made: list[Tensor] = []
    monkeypatch.setattr(cuda, "ready", True)
    monkeypatch.setattr(cuda, "LEAST_KEYS", 1)
    monkeypatch.setattr(cuda, "_room", lambda device: 4)
    monkeypatch.setattr(cuda, "_prove", lambda form: True)
    monkeypatch.setattr(cuda, "_give_up", lambda error: pytest.fail(repr(error)))
    monkeypatch.setattr(
        core_module, "supports", lambda query, key, value, _, masked: cuda.supports(query, key, value, masked)
    )
    monkeypatch.setattr(core_module, "decode", lambda *given: made.append(cuda.decode(*given)) or made[-1])
    return made


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None = None,
    added: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Head by head in float64, from the keys that a query sees and no others. Rows that see none are zeros."""
    batch, heads, queries, head_dim = query.shape
    ratio, keys = heads // key.shape[1], key.shape[2]
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool) if seen is None else seen
    added = torch.zeros(1, 1, 1, 1) if added is None else added
    seen, added = (x.expand(batch, heads, queries, keys) for x in (seen, added))
    out = torch.zeros(batch, heads, queries, value.shape[3], dtype=torch.float64)
    for b, h, q in np.ndindex(batch, heads, queries):
        of_use = (seen[b, h, q] & (added[b, h, q] != -torch.inf)).nonzero()[:, 0]
        scores = key[b, h // ratio, of_use].double() @ query[b, h, q].double()
        scores = scores * (head_dim**-0.5 if scale is None else scale) + added[b, h, q, of_use].double()
        weights = (scores - scores.max()).exp() if len(of_use) else scores
        if len(of_use):
            out[b, h, q] = weights @ value[b, h // ratio, of_use].double() / weights.sum()
    return out


def assert_near(result: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[result.dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=limit)


def numbers(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("batch", "groups", "queries", "keys", "head_dim", "value_head_dim", "splits", "dtype"),
    [
        (1, 3, 1, 1, 24, 24, 1, torch.float32),
        (2, 4, 1, 70, 40, 24, 1, torch.float32),
        (1, 3, 2, 64, 80, 80, 2, torch.float32),
        (3, 1, 1, 33, 24, 40, 4, torch.float32),
        (1, 4, 4, 100, 24, 80, 1, torch.bfloat16),
        (1, 3, 2, 131, 40, 40, 2, torch.float16),
        (1, 12, 1, 70, 80, 24, 2, torch.float32),
        (1, 1, 1, 260, 40, 136, 3, torch.bfloat16),
        (1, 2, 1, 37, 200, 256, 2, torch.float16),
    ],
)
def test_twelve_heads(
    batch: int,
    groups: int,
    queries: int,
    keys: int,
    head_dim: int,
    value_head_dim: int,
    splits: int,
    dtype: torch.dtype,
) -> None:
    """Where there are more programs than blocks, some see nothing at all."""
    query, key, value = numbers(
        (batch, 12, queries, head_dim),
        (batch, groups, keys, head_dim),
        (batch, groups, keys, value_head_dim),
        dtype=dtype,
    )
    result = cuda.launch(query, key, value, None, head_dim**-0.5, splits)
    assert result.dtype == dtype
    assert_near(result, oracle(query, key, value))


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2), (2, 3, 2), (2, 1, 2)],
    ids=lambda shape: "x".join(map(str, shape)),
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_every_form(kind: str, shape: tuple[int, int, int]) -> None:
    keys = 2 * BLOCK + 11
    query, key, value = numbers((2, 3, 2, 24), (2, 1, keys, 24), (2, 1, keys, 40))
    if kind == "bool":
        mask = torch.rand(*shape, keys) < 0.6
        result = cuda.launch(query, key, value, mask, 0.3, 2)
        assert_near(result, oracle(query, key, value, seen=mask, scale=0.3))
    else:
        bias = torch.randn(*shape, keys).masked_fill(torch.rand(*shape, keys) < 0.3, -torch.inf)
        result = cuda.launch(query, key, value, bias, 0.3, 2)
        assert_near(result, oracle(query, key, value, added=bias, scale=0.3))


def test_a_mask_per_head_where_no_head_is_shared() -> None:
    query, key, value = numbers((1, 3, 1, 24), (1, 3, 70, 24), (1, 3, 70, 24))
    mask = torch.rand(1, 3, 1, 70) < 0.5
    assert_near(cuda.launch(query, key, value, mask, 0.2, 2), oracle(query, key, value, mask, scale=0.2))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("per_row", [False, True])
def test_hidden_keys_are_never_read_into_a_result(splits: int, kind: str, per_row: bool) -> None:
    """The end of a static cache is NaN, and so is padding; a sequence sees nothing; programs see parts or nothing."""
    keys, capacity = 7 * BLOCK + 3, 8 * BLOCK
    query = torch.randn(3, 4, 1, 24)
    buffers = numbers((3, 1, capacity, 24), (3, 1, capacity, 40))
    seen = torch.zeros(3, 4 if per_row else 1, 1, keys, dtype=torch.bool)
    seen[0, ..., 5 : 3 * BLOCK + 7] = True
    seen[1, ..., 4 * BLOCK + 1] = True
    key, value = buffers[0][:, :, :keys], buffers[1][:, :, :keys]
    expected = oracle(query, key, value, seen)
    for buffer in buffers:
        buffer[:, :, keys:] = torch.nan
        buffer[:, :, :keys][~seen[:, :1, 0]] = torch.nan
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    result = cuda.launch(query, key, value, mask, 24**-0.5, splits)
    assert_near(result, expected)
    assert not result[2].any()


def test_a_nan_that_is_seen_stays() -> None:
    for splits in (1, 3):
        query, key, value = numbers((1, 4, 1, 24), (1, 2, 70, 24), (1, 2, 70, 24))
        key[0, 1, 40] = torch.nan
        result = cuda.launch(query, key, value, None, 0.2, splits)
        assert result[0, 2:].isnan().all()
        assert_near(result[:, :2], oracle(query[:, :2], key[:, :1], value[:, :1], scale=0.2))


def test_only_rows_of_which_a_row_sees_anything() -> None:
    """Queries of one head see different keys, one of them none, and programs see some rows' keys only."""
    query, key, value = numbers((1, 6, 4, 24), (1, 2, 100, 24), (1, 2, 100, 24))
    mask = torch.zeros(1, 6, 4, 100, dtype=torch.bool)
    mask[:, :, 1, :20], mask[:, :, 2, 70:], mask[:, 1::2, 3, 33] = True, True, True
    for splits in (1, 4):
        result = cuda.launch(query, key, value, mask, 0.2, splits)
        assert_near(result, oracle(query, key, value, mask, scale=0.2))
        assert not result[:, :, 0].any()


@pytest.mark.parametrize("layout", ["rows of heads", "slices"])
def test_keys_and_values_are_read_where_they_lie(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(2, 5, 3, 24).transpose(1, 2)[:, :, 1:3]
    if layout == "rows of heads":  # [b, k, N, c]
        key, value = (x.transpose(1, 2) for x in numbers((2, 70, 3, 24), (2, 70, 3, 40)))
    else:  # of one buffer, with gaps in each axis
        buffer = torch.randn(4, 7, 150, 70)
        key, value = buffer[::2, 1:4, 5:145:2, 3:27], buffer[1::2, ::3, 10:80, 30:70]
    monkeypatch.setattr(Tensor, "contiguous", lambda self: pytest.fail("copied"))
    result = cuda.launch(query, key, value, None, 0.2, 2)
    assert_near(result, oracle(query, key, value, scale=0.2))


def test_rows_with_gaps_are_copied() -> None:
    """As torch.compile may lay them out."""
    query, key, value = (x.mT for x in numbers((1, 4, 24, 1), (1, 2, 24, 50), (1, 2, 40, 50)))
    assert_near(cuda.launch(query, key, value, None, 0.2, 2), oracle(query, key, value, scale=0.2))


def test_strided_masks() -> None:
    query, key, value = numbers((1, 6, 2, 24), (1, 2, 70, 24), (1, 2, 70, 24))
    mask = (torch.rand(70, 2, 6) < 0.5).permute(2, 1, 0)[None]
    bias = torch.randn(1, 140, 2).transpose(1, 2)[None, :, :, ::2]
    row = torch.randn(1, 1, 1, 140)[..., ::2].expand(1, 6, 2, 70)
    assert_near(cuda.launch(query, key, value, mask, 0.2, 1), oracle(query, key, value, mask, scale=0.2))
    for added in (bias, row):
        assert_near(cuda.launch(query, key, value, added, 0.2, 1), oracle(query, key, value, None, added, 0.2))


@pytest.mark.parametrize("splits", [1, 3])
def test_extreme_scores(splits: int) -> None:
    query, key, value = numbers((1, 4, 1, 24), (1, 2, 100, 24), (1, 2, 100, 24))
    query, key = 40 * query, 40 * key
    assert_near(cuda.launch(query, key, value, None, 0.5, splits), oracle(query, key, value, scale=0.5))
    assert_near(cuda.launch(query, key, value, None, -1e-5, splits), oracle(query, key, value, scale=-1e-5))
    lowest = torch.full((1, 1, 1, 100), torch.finfo(torch.float32).min)  # hides nothing, where it is everywhere
    expected = value.mean(2, keepdim=True).repeat_interleave(2, dim=1)
    assert_near(cuda.launch(query, key, value, lowest, 1e-3, splits), expected.double())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_function_on_this_path(dtype: torch.dtype, results: list[Tensor]) -> None:
    query, key, value = numbers((1, 6, 1, 24), (1, 2, 200, 24), (1, 2, 200, 24), dtype=dtype)
    mask = torch.rand(1, 1, 1, 200) < 0.5
    bias = torch.randn(1, 6, 1, 200).to(dtype)
    assert_near(
        grouped_query_attention(query, key, value, mask=mask, bias=bias, scale=0.3),
        oracle(query, key, value, mask, bias, 0.3),
    )
    queries = torch.randn(1, 6, 3, 24).to(dtype)
    order = torch.ones(3, 200, dtype=torch.bool).tril(200 - 3)[None, None]
    assert_near(grouped_query_attention(queries, key, value, causal=True), oracle(queries, key, value, order))
    assert len(results) == 2
    grouped_query_attention(query, key, value)
    assert len(results) == 2 + (dtype == torch.float32)  # torch has a kernel for half precision without a mask


@pytest.mark.parametrize(
    ("kind", "per_row", "split", "dtype"),
    [
        ("none", False, True, torch.float32),
        ("bool", True, False, torch.bfloat16),
        ("bool", False, True, torch.float16),
        ("float", True, True, torch.bfloat16),
        ("float", False, False, torch.float32),
    ],
)
def test_a_form_proves_itself(
    kind: str, per_row: bool, split: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, made = cuda.launch, []
    monkeypatch.setattr(cuda, "_proven", set())
    monkeypatch.setattr(cuda, "launch", lambda *given: made.append((given, launch(*given))) or made[-1][1])
    form = cuda._Form(torch.device("cpu"), dtype, 3, 2, 24, 40, kind, per_row, split)
    before = torch.get_rng_state()
    assert cuda._prove(form)
    assert torch.equal(torch.get_rng_state(), before)
    assert cuda._proven == {form}
    (((query, key, value, mask, _, splits), found),) = made
    assert cuda._form(query, key, value, mask, splits > 1) == form
    cuda._proven.clear()
    for wrong in (1.1, torch.nan):
        monkeypatch.setattr(cuda, "launch", lambda *_, wrong=wrong: found * wrong)
        with pytest.raises(ArithmeticError, match="differ from attention"):
            cuda._prove(form)
    assert not cuda._proven
