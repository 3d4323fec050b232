"""More K/V heads than the source has, for an engine on more devices: each is repeated, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert import convert_checkpoint
from gqa_convert.families.loading import load_causal_lm
from tests.helpers.tiny import VOCAB, make_checkpoint


def load(folder: Path, kv_heads: int) -> Any:
    model, absent = load_causal_lm(folder, torch.float32)
    assert (model.config.num_key_value_heads, absent) == (kv_heads, [])
    return model


@pytest.mark.parametrize(("heads", "source", "more"), [(16, 8, 16), (12, 3, 6)])
@pytest.mark.parametrize(("model_type", "projection", "width"), [("llama", "v_proj", 18), ("phi3", "qkv_proj", None)])
def test_repeated_heads_compute_the_same(
    tmp_path: Path, model_type: str, projection: str, width: int | None, heads: int, source: int, more: int
) -> None:
    """Phi-3 has no key for the head width, and its values come last in the fused projection."""
    wide = {} if width is None else {"head_dim": width}
    folder = make_checkpoint(model_type, tmp_path / "source", kv_heads=source, num_attention_heads=heads, **wide)
    convert_checkpoint(folder, tmp_path / "more", more)
    before, after = load(folder, source), load(tmp_path / "more", more)
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(after(input_ids=ids).logits, before(input_ids=ids).logits, atol=2e-5, rtol=1e-5)
    values = [
        model.get_submodule(f"model.layers.1.self_attn.{projection}").weight.unflatten(0, (-1, width or 96 // heads))[
            -count:
        ]
        for model, count in ((before, source), (after, more))
    ]
    for head in range(more):
        assert torch.equal(values[1][head], values[0][head * source // more])
