"""Stretched blocks: spans that return, and positions that skip as every rotary model of
transformers reads them.
"""

import numpy as np
import pytest
import torch

from gqa_convert.conversion.calibration.stretched_blocks import SHORTEST, SPAN, stretched
from gqa_convert.families.context_length import FARTHEST, reachable_context
from tests.helpers.tiny import VOCAB, make_config, make_model

LENGTH, CONTEXT = 640, 5000
BEGIN = LENGTH - LENGTH // 4
ROTARY = (
    "llama",
    "mistral",
    "qwen3",
    "glm",
    "phi",
    "phi3",
    "stablelm",
    "cohere",
    "gemma2",
    "gpt_oss",
)
"""Different ways of rotating heads, and of masks with windows."""


LONGROPE = {"rope_scaling": {"type": "longrope"}}


def blocks(count: int) -> np.ndarray:
    return np.arange(count * LENGTH).reshape(count, LENGTH)


def test_every_second_block_is_stretched() -> None:
    ids = blocks(6)
    before = ids.copy()
    batch = stretched(ids, 1, CONTEXT, 7, [True] * len(ids))
    assert (ids == before).all(), "the text itself stays as it is"
    assert (batch["attention_mask"] == 1).all()
    for row in (1, 3, 5):
        assert (batch["input_ids"][row] == ids[row]).all()
        assert (batch["position_ids"][row] == np.arange(LENGTH)).all()
    for row in (0, 2, 4):
        found, positions = batch["input_ids"][row], batch["position_ids"][row]
        assert (found[:BEGIN] == ids[row, :BEGIN]).all()
        for place in range(BEGIN, LENGTH, SPAN):
            span = found[place : place + SPAN]
            assert (np.diff(span) == 1).all(), "one piece"
            assert ids[row, 0] <= span[0] <= span[-1] < ids[row, BEGIN], "of the rest of the block"
        steps = np.diff(positions)
        assert positions[0] == 0
        assert (steps > 1).sum() == 1
        assert positions[-1] < CONTEXT


def test_what_is_not_stretched() -> None:
    short = np.arange(SHORTEST - 1)[None]
    assert stretched(short, 1, CONTEXT, 0, [True] * len(short)).keys() == {"input_ids"}
    assert (stretched(short, 1, CONTEXT, 0, [True] * len(short))["input_ids"] == short).all()
    for context in (None, LENGTH):
        assert stretched(blocks(2), 0, context, 0, [True] * 2).keys() == {"input_ids"}
    assert stretched(blocks(2), 0, LENGTH + 1, 0, [True] * 2)["position_ids"][1, -1] == LENGTH


@pytest.mark.parametrize(
    ("config", "reached"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 1 << 20}, FARTHEST),
        ({"max_position_embeddings": 4096, "sliding_window": 512}, 512),
        (
            {"max_position_embeddings": 4096, "sliding_window": 512, "use_sliding_window": False},
            4096,
        ),
        (
            {"max_position_embeddings": 1 << 17, "original_max_position_embeddings": 4096}
            | LONGROPE,
            4096,
        ),
        ({}, 2048),
    ],
)
def test_how_far_a_model_reaches(config: dict[str, object], reached: int | None) -> None:
    assert reachable_context({"model_type": "llama"} | config) == reached


@pytest.mark.parametrize("model_type", ROTARY)
def test_a_skip_is_read_as_the_distance(model_type: str) -> None:
    """The same model reads a text with a masked gap in the place of the skip."""
    config = make_config(model_type)
    if getattr(config, "sliding_window", None):
        config.sliding_window = 64  # a context ends there
    model = make_model(config)
    before, gap, after = 9, 7, 6
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, VOCAB, (1, before + gap + after)))
    kept = torch.tensor([*range(before), *range(before + gap, before + gap + after)])
    mask = torch.ones_like(ids)
    mask[:, before : before + gap] = 0
    with torch.inference_mode():
        wanted = model(
            input_ids=ids, attention_mask=mask, position_ids=torch.arange(ids.shape[1])[None]
        ).logits
        found = model(
            input_ids=ids[:, kept], attention_mask=mask[:, kept], position_ids=kept[None]
        ).logits
        plain = model(input_ids=ids[:, kept]).logits
    torch.testing.assert_close(found, wanted[:, kept], atol=2e-4, rtol=1e-4)
    assert not torch.allclose(plain, found, atol=1e-3), "the skip has an effect"
