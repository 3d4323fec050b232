"""Logits of some rows are those of the whole model, and most models never make more."""

import numpy as np
import pytest
import torch

from gqa_convert.text.scoring import forward
from gqa_convert.text.scoring.forward import score
from gqa_convert.text.scoring.output_head import OutputHead
from gqa_convert.text.scoring.texts import WindowBatches
from gqa_convert.text.scoring.windows import cut_windows
from tests.helpers.tiny import VOCAB, make_config, make_model

PLAIN = ("llama", "gpt2", "gemma", "qwen3", "gpt_neox")
MORE_THAN_PROJECTED = ("gemma2", "cohere", "granite")
"""Caps, or scales, what the head projects."""


@pytest.mark.parametrize("model_type", [*PLAIN, *MORE_THAN_PROJECTED])
def test_rows_are_those_of_the_model(model_type: str) -> None:
    scaled = {"logits_scaling": 3.0} if model_type == "granite" else {}
    model = make_model(make_config(model_type, **scaled))
    seen: list[int] = []
    ids = torch.randint(3, VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = model(input_ids=ids).logits.flatten(0, 1)
        head = OutputHead(model)
        head.rows({"input_ids": ids})
        counted = model.get_output_embeddings().register_forward_hook(
            lambda _, __, logits: seen.append(logits.shape[:-1].numel())
        )
        rows = head.rows({"input_ids": ids})
        some = torch.tensor([0, 7, 31, 59])
        torch.testing.assert_close(rows(some), wanted[some], rtol=1e-5, atol=1e-6)
        counted.remove()
    assert max(seen) == (4 if model_type in PLAIN else ids.numel())


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("referenced", [False, True])
def test_scores_do_not_depend_on_the_number_of_rows(
    model_type: str, referenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlapping windows, of which a part is scored."""
    model, reference = (make_model(make_config(model_type), seed=seed) for seed in (1, 2))
    ids = np.random.default_rng(0).integers(3, VOCAB, 100)
    batches = WindowBatches(ids, cut_windows([(0, 100)], 32, 20), 2)
    found = []
    for size in (5, 1000):
        monkeypatch.setattr(forward, "_ROWS", size)
        found.append(score(model, batches, 100, reference=reference if referenced else None).arrays())
    for few, many in zip(*found, strict=True):
        np.testing.assert_allclose(few, many, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(ids[None, :32])).logits[0, :-1]
        wanted = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[1:32]), reduction="none")
    np.testing.assert_allclose(found[0][0][1:32], wanted.numpy(), rtol=1e-4, atol=1e-5)
