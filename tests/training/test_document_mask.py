"""Documents packed into one row, against the same documents alone: logits of every model type, with windows, chunks and
convolutions.
"""

from typing import Any

import pytest
import torch

from gqa_convert.errors import RecipeError
from gqa_convert.families.table import FAMILIES
from gqa_convert.training.document_mask import check_apart
from tests.helpers import own_files, tiny

LENGTHS = [9, 1, 14, 8]
"""Of the documents in a row: more and less than a window of 4."""
WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
FULL = {"layer_types": ["full_attention", "full_attention"]}

NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name, family in FAMILIES.items() if family.native
} | {
    "llama4_text, chunks": (
        "llama4_text",
        {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "qwen2, window": ("qwen2", WINDOWED),
    "qwen2_moe, window": ("qwen2_moe", WINDOWED),
    "qwen3, window": ("qwen3", WINDOWED),
    "qwen3_moe, window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
    "smollm3, window": (
        "smollm3",
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "dots1, window": ("dots1", {"layer_types": ["full_attention", "sliding_attention"]}),
    "mellum, window": ("mellum", {"layer_types": ["full_attention", "sliding_attention"]}),
    "afmoe, both kinds": ("afmoe", {"layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss, windows only": ("gpt_oss", {"layer_types": ["sliding_attention", "sliding_attention"]}),
    "granitemoehybrid, attention only": ("granitemoehybrid", FULL | {"position_embedding_type": "rope"}),
}
"""Model types, and variants with the windows, chunks or layers that the type's tiny config lacks."""

OWN = {
    case: (name, changes)
    for case, (name, changes) in own_files.CASES.items()
    if own_files.auto_class(name) == "AutoModelForCausalLM" and case != "gpt2, cross-attention"
}
REFUSED = (
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "lfm3", "minimax", "nemotron_h"),
    *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "zamba"),
    *("zamba2", "bloom", "falcon", "mpt", "opt", "biogpt", "afmoe", "gpt_oss"),
)
"""The types that are refused: those with recurrences and convolutions, and those whose classes make no such masks."""


def model_of(case: str) -> Any:
    if case in NATIVE:
        model_type, changes = NATIVE[case]
        return tiny.make_model(tiny.make_config(model_type, kv_heads=3, **changes))
    model_type, changes = OWN[case]
    return own_files.make_source_model(model_type, **changes)


@torch.no_grad()
def distance(model: Any, lengths: list[int] = LENGTHS) -> float:
    """The largest difference between logits of packed documents and of the documents alone, over the spread of the
    latter.
    """
    ids = torch.randint(3, tiny.VOCAB, (2, sum(lengths)), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    alone = [model(input_ids=part, use_cache=False).logits.float() for part in ids.split(lengths, dim=1)]
    expected = torch.cat(alone, dim=1)
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    return float((packed - expected).abs().max() / expected.std())


@pytest.mark.parametrize("case", [*NATIVE, *OWN])
def test_packed_documents_are_as_they_are_alone_or_refused(case: str) -> None:
    model = model_of(case)
    try:
        check_apart("here", model, sum(LENGTHS))
    except RecipeError:
        assert case.split(",")[0] in REFUSED
        return
    assert distance(model) < 2e-5
    assert distance(model, [32]) < 2e-5
