"""The compiled decoding kernel against attention written out in float64, in every form that this processor can run, and
without it.
"""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import StaticCache

from gqa_convert.attention import GroupedQueryAttention, KVCache, grouped_query_attention, register
from gqa_convert.attention import core as core_module
from gqa_convert.attention.decoding import compiling, operator
from gqa_convert.attention.decoding.compiling import Processor, processor
from gqa_convert.attention.decoding.shape import Shape

HOST = processor() or Processor(0, pairs=False)
FORMS = [
    None,  # llvmlite is missing: torch's kernel
    *(
        form
        for form in (Processor(16, pairs=True), Processor(16, pairs=False), Processor(8, pairs=False))
        if form.lanes <= HOST.lanes and form.pairs <= HOST.pairs
    ),
]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def use(form: Processor | None, patch: pytest.MonkeyPatch) -> list[Tensor]:
    """Compile for this form of the processor, for caches of any length; the list collects what the kernel computes."""
    made: list[Tensor] = []
    patch.setattr(operator, "PROCESSOR", form)
    patch.setattr(operator, "LEAST_KEYS", 1)
    operator._kernel.cache_clear()
    operator._partial_bytes.cache_clear()
    decode = core_module.decode
    patch.setattr(core_module, "decode", lambda *given: made.append(decode(*given)) or made[-1])
    return made


@pytest.fixture(autouse=True)
def own_kernels() -> Iterator[None]:
    yield
    operator._kernel.cache_clear()
    operator._partial_bytes.cache_clear()


def oracle(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """In float64, with repeated heads; rows that see nothing are zeros."""
    ratio = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(ratio, dim=1) for x in (key, value))
    scores = query.double() @ key.mT * query.shape[3] ** -0.5
    scores = scores if bias is None else scores + bias.double()
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value


def assert_near(result: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[result.dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=limit)


def masks(kind: str, batch: int, heads: int, queries: int, keys: int) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    if "padding" in kind:
        made["mask"] = torch.rand(batch, 1, 1, keys) < 0.5
        made["mask"][0, :, :, : keys * 3 // 4] = False  # whole blocks
    if "order" in kind:
        made["mask"] = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    if "bias" in kind:
        made["bias"] = torch.randn(1, heads, queries, keys)
    if "added" in kind:
        made["bias"] = torch.zeros(batch, 1, 1, keys).masked_fill(torch.rand(batch, 1, 1, keys) < 0.5, -torch.inf)
    return made


CASES = [
    # b, N, R, q, k, c, e, masks
    (1, 1, 1, 1, 1, 64, 64, ""),
    (2, 3, 1, 1, 17, 16, 32, "padding"),
    (2, 2, 2, 1, 513, 32, 16, "padding"),
    (1, 2, 3, 1, 300, 80, 80, ""),
    (2, 1, 5, 1, 130, 48, 16, "added"),
    (2, 2, 4, 2, 257, 16, 16, "order"),
    (1, 2, 8, 1, 4097, 128, 128, ""),
    (2, 1, 7, 2, 140, 16, 16, "bias, padding"),
    (1, 1, 16, 1, 128, 192, 16, "padding"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_function_equals_attention_written_out(
    form: Processor | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, groups, ratio, queries, keys, head_dim, value_head_dim, kind = CASES[number]
    pairs = form is not None and form.pairs
    dtype = torch.bfloat16 if pairs else list(TOLERANCE)[number % 3]
    made = use(form, monkeypatch)
    query = torch.randn(batch, groups * ratio, queries, head_dim).to(dtype)
    # views of a longer buffer, as a static cache makes them, in which the rest is NaN
    key, value = (torch.randn(batch, groups, keys + 5, size).to(dtype) for size in (head_dim, value_head_dim))
    key[:, :, keys:] = value[:, :, keys:] = torch.nan
    key, value = key[:, :, :keys], value[:, :, :keys]
    given = masks(kind, batch, groups * ratio, queries, keys)
    result = grouped_query_attention(query, key, value, **given)
    assert len(made) == (form is not None)
    assert_near(result, oracle(query, key, value, given.get("mask"), given.get("bias")))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_of_keys_are_joined(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = use(processor(), monkeypatch)
    monkeypatch.setattr(operator, "_chunks", lambda heads, keys, threads: (128, -(-keys // 128)))
    query, key, value = (torch.randn(2, heads, length, 32).to(dtype) for heads, length in ((12, 1), (4, 700), (4, 700)))
    mask = torch.rand(2, 1, 1, 700) < 0.5
    mask[0, :, :, :300] = False  # the first chunks see nothing
    mask[1] = False
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        results = [grouped_query_attention(query, key, value, mask=mask) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    for result in results:
        assert_near(result, oracle(query, key, value, mask, None))
        assert not result[1].any()
    assert len(made) == (5 if processor() else 0)


def test_threads_share_the_keys_of_few_heads() -> None:
    for heads, keys, threads, expected in (
        (1, 4096, 1, 1),  # nothing to share
        (4, 4096, 2, 1),
        (1, 4096, 2, 2),
        (3, 16384, 2, 2),
        (1, 300, 8, 1),  # too few keys
    ):
        chunk, chunks = operator._chunks(heads, keys, threads)
        assert chunks == expected
        assert chunk * (chunks - 1) < keys <= chunk * chunks


def test_a_bias_of_the_lowest_number_everywhere_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use(processor(), monkeypatch)
    query, key, value = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    bias = torch.full((1, 1, 1, 40), torch.finfo(torch.float32).min)
    expected = value.mean(2, keepdim=True).repeat_interleave(2, dim=1)
    torch.testing.assert_close(grouped_query_attention(query, key, value, bias=bias), expected, rtol=0, atol=1e-6)


def test_large_scores_and_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    use(processor(), monkeypatch)
    query, key, value = 30 * torch.randn(1, 4, 1, 16), 30 * torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    expected = oracle(query * 2.0, key, value, None, None)  # 0.5 is twice 1 / sqrt(16)
    result = grouped_query_attention(query, key, value, scale=0.5)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-3)


def test_gradients_take_the_other_path(monkeypatch: pytest.MonkeyPatch) -> None:
    made = use(processor(), monkeypatch)
    query, key, value = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 140, 16), torch.randn(1, 2, 140, 16)
    for number in range(3):
        tensors = [x.clone().requires_grad_(number == which) for which, x in enumerate((query, key, value))]
        grouped_query_attention(*tensors).sum().backward()
        grad = tensors[number].grad
        assert grad is not None
        assert grad.any()
    bias = torch.zeros(1, 1, 1, 140, requires_grad=True)
    grouped_query_attention(query, key, value, bias=bias).square().sum().backward()
    assert bias.grad is not None
    assert bias.grad.any()
    assert not made


@pytest.mark.parametrize(
    ("head_dim", "value_head_dim", "dtype"),
    [(24, 24, torch.float32), (16, 272, torch.float32), (16, 16, torch.float64)],
)
def test_other_shapes_take_the_other_path(
    head_dim: int, value_head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use(processor(), monkeypatch)
    query, key, value = (
        torch.randn(1, heads, length, size, dtype=dtype)
        for heads, length, size in ((4, 1, head_dim), (2, 140, head_dim), (2, 140, value_head_dim))
    )
    result = grouped_query_attention(query, key, value)
    torch.testing.assert_close(result.double(), oracle(query, key, value, None, None), rtol=0, atol=1e-5)
    assert not made


def test_keys_that_are_not_laid_out_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    use(processor(), monkeypatch)
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 16, 2, 140), torch.randn(2, 140, 2, 16)
    key, value = key.permute(0, 2, 3, 1), value.transpose(1, 2)
    assert_near(grouped_query_attention(query, key, value), oracle(query, key, value, None, None))
    key = key.contiguous()
    mask = (torch.rand(140, 2) < 0.5).T[:, None, None]
    assert_near(grouped_query_attention(query, key, value, mask=mask), oracle(query, key, value, mask, None))


def test_it_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    calls: list[Any] = []

    def backend(graph: Any, _: list[Tensor]) -> Any:
        calls.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(grouped_query_attention, fullgraph=True, backend=backend)
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 140, 16), torch.randn(2, 2, 140, 16)
    mask = torch.rand(2, 1, 1, 140) < 0.5
    with torch.no_grad():
        assert_near(compiled(query, key, value, mask=mask), oracle(query, key, value, mask, None))
    assert any("gqa_convert" in str(call) for call in calls) == (processor() is not None)


def test_torch_knows_what_the_operator_returns() -> None:
    if processor() is None:
        assert operator.PROCESSOR is None
        return
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 140, 16), torch.randn(2, 2, 140, 16)
    torch.library.opcheck(
        torch.ops.gqa_convert.decode.default,
        (query, key, value, torch.rand(2, 1, 1, 140) < 0.5, 0.25),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_without_llvmlite_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert processor.__wrapped__() is None


def test_an_old_llvmlite_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = SimpleNamespace(llvm_version_info=(15, 0, 7), get_host_cpu_features=lambda: pytest.fail("not asked"))
    monkeypatch.setitem(sys.modules, "llvmlite", SimpleNamespace(binding=binding))
    monkeypatch.setitem(sys.modules, "llvmlite.binding", binding)
    assert processor.__wrapped__() is None


def test_a_processor_without_avx2_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.platform, "machine", lambda: "aarch64")
    assert processor.__wrapped__() is None


def test_a_kernel_is_compiled_once() -> None:
    if processor() is not None:
        shape = Shape("float32", 2, 2, 16, 16, "none", False, 8, False)
        assert compiling.compiled(shape) is compiling.compiled(Shape("float32", 2, 2, 16, 16, "none", False, 8, False))


@torch.no_grad()
def test_a_layer_with_a_cache_decodes_what_one_pass_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    made = use(processor(), monkeypatch)
    attention = GroupedQueryAttention(32, 4, 2, head_dim=16, causal=True)
    inputs, cache = torch.randn(2, 30, 32), KVCache(capacity=64)
    expected = attention(inputs)
    made.clear()
    outputs = [attention(inputs[:, :24], cache=cache), attention(inputs[:, 24:27], cache=cache)]
    outputs += [attention(inputs[:, place : place + 1], cache=cache) for place in range(27, 30)]
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=1e-5)
    assert len(made) == (4 if processor() else 0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_a_model_generates_the_tokens_that_sdpa_gives(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = use(processor(), monkeypatch)
    register()
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=97,
        initializer_range=0.3,
    )
    tokens = torch.randint(3, 97, (2, 11))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    model = AutoModelForCausalLM.from_config(config).eval()
    found = {}
    for implementation in ("sdpa", "gqa"):
        model.set_attn_implementation(implementation)
        options = {"past_key_values": StaticCache(config=config, max_cache_len=40)} if cache == "static" else {}
        found[implementation] = model.generate(
            tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, **options
        )
    assert torch.equal(found["gqa"], found["sdpa"])
    assert len(made) >= 2 * 11 if processor() else not made
