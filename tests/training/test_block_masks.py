"""Masks of blocks (flex_attention) against dense masks and against documents alone: outputs, losses and gradients.

flex_attention refuses gradients on a CPU, although what it computes without a compiler has them; these tests lift the
refusal. Its compiled kernels need a GPU and did not run here.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch.nn.functional import cross_entropy
from transformers import masking_utils
from transformers.integrations import flex_attention as integration

from gqa_convert.errors import RecipeError
from gqa_convert.training import block_masks, memory
from gqa_convert.training.architecture import read_architecture
from gqa_convert.training.block_masks import FLEX, mask_bytes, uses_block_masks
from gqa_convert.training.documents import keep_apart
from gqa_convert.training.masks import model_inputs
from gqa_convert.training.memory import Setting
from tests.helpers import tiny

LENGTHS = [70, 1, 90, 39]
"""Of the documents in a row, which share the first of two blocks of 128 tokens."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "chunks": (
        "llama4_text",
        {"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "windows and capped scores": ("gemma2", {"sliding_window": 16}),
}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """flex_attention without a compiler, with gradients on the CPU, and used there."""
    create = masking_utils.create_block_mask
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda **keys: create(**keys | {"_compile": False}))
    monkeypatch.setattr(integration, "WrappedFlexAttention", lambda training: lambda: flex.flex_attention)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(block_masks, "_DEVICES", {"cpu"})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(case: str) -> Any:
    model_type, changes = CASES[case]
    sizes = {"max_position_embeddings": 256}
    return tiny.make_model(tiny.make_config(model_type, kv_heads=3, **sizes | changes))


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Two rows with the same cuts and other tokens."""
    ids = torch.randint(3, tiny.VOCAB, (2, sum(lengths)), generator=torch.Generator().manual_seed(3))
    places = torch.cat([torch.arange(length) for length in lengths])
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return {"input_ids": ids, "position_ids": places.expand(2, -1), "document_ids": numbers.expand(2, -1)}


def trained(model: Any, logits: list[torch.Tensor], ids: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """The loss of the next tokens within documents, and the gradients."""
    model.zero_grad()
    pairs = [
        (each[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten()) for each, part in zip(logits, ids, strict=True)
    ]
    loss = sum(cross_entropy(*pair, reduction="sum") for pair in pairs)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return float(loss.detach()), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_blocks_dense_masks_and_documents_alone_train_alike(case: str) -> None:
    model, batch = model_of(case), batch_of(LENGTHS)
    parts = list(batch["input_ids"].split(LENGTHS, dim=1))
    alone = trained(model, [model(input_ids=part, use_cache=False).logits for part in parts], parts)
    dense = model(**model_inputs(model, batch), use_cache=False).logits
    assert keep_apart("here", model, 0.0, autocast=False) is None
    assert model.config._attn_implementation == FLEX
    packed = model(**model_inputs(model, batch), use_cache=False).logits
    assert (packed - dense).abs().max() < 1e-5 * dense.std()
    for logits in (dense, packed):
        loss, gradients = trained(model, list(logits.split(LENGTHS, dim=1)), parts)
        assert loss == pytest.approx(alone[0], rel=1e-6)
        largest = max(each.abs().max() for each in alone[1])
        assert all((mine - other).abs().max() < 1e-5 * largest for mine, other in zip(gradients, alone[1], strict=True))


def test_the_estimate_is_the_masks_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, seen = model_of("llama"), batch_of(LENGTHS), []
    forward = integration.flex_attention

    def note(*tensors: Any, **keys: Any) -> Any:
        seen.append(keys["block_mask"])
        return forward(*tensors, **keys)

    monkeypatch.setattr(integration, "WrappedFlexAttention", lambda training: lambda: note)
    keep_apart("here", model, 0.0, autocast=False)
    seen.clear()
    with torch.no_grad():
        model(**model_inputs(model, batch), use_cache=False)
    first, *others = seen
    assert all(other is first for other in others)
    tensors = [each for each in first.as_tuple(flatten=False) if isinstance(each, torch.Tensor)]
    tables = sum(each.nbytes for each in tensors)
    rows = 2 * batch["input_ids"].numel() * 8  # positions and numbers of documents
    assert tables + rows == mask_bytes(2, sum(LENGTHS))
    # at 8,192 tokens, a dense mask is 67 MB of booleans and, in bfloat16, 134 MB for each layer
    sizes = read_architecture(model.config.to_dict() | {"num_attention_heads": 8, "num_key_value_heads": 2})
    assert sizes is not None
    setting = {"parameters": 10**6, "trained": 10**6, "sequence_length": 8192, "document_mask": True}
    masks = [memory.plan(sizes, Setting(**setting, block_masks=each))["document masks"] for each in (False, True)]
    assert masks[0] > 67e6 + sizes.layers * 134e6
    assert masks[1] == mask_bytes(1, 8192) < 2e5


def test_what_flex_attention_cannot_do_is_left_to_dense_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uses_block_masks({"model_type": "llama"}, "cpu")
    assert not uses_block_masks({"model_type": "llama"}, "cpu", dropout=0.1)
    assert not uses_block_masks({"model_type": "llama"}, "mps")
    for other in ("opt", "mpt", "gqa_opt", "none such", "persimmon_of_the_future"):
        assert not uses_block_masks({"model_type": other}, "cpu")
    monkeypatch.undo()
    assert uses_block_masks({"model_type": "llama"}, "cuda")
    assert not uses_block_masks({"model_type": "llama"}, "cpu")


def test_a_failure_of_flex_attention_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's compiler raises; but not the finding that documents mix."""
    model, batch = model_of("llama"), batch_of(LENGTHS)
    expected = model(**model_inputs(model, batch), use_cache=False).logits

    def fails(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("this GPU is too old\nsecond line")

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", fails)
    note = keep_apart("here", model, 0.0, autocast=True)
    assert note is not None
    assert "flex_attention failed (NotImplementedError: this GPU is too old): expect more memory" in note
    assert torch.equal(model(**model_inputs(model, batch), use_cache=False).logits, expected)
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", lambda query, *_, **__: query)
    mixing = tiny.make_model(tiny.make_config("jamba"))
    monkeypatch.setattr("gqa_convert.training.documents.uses_block_masks", lambda *_: True)
    with pytest.raises(RecipeError, match="one document changes what there"):
        keep_apart("there", mixing, 0.0, autocast=False)
