"""What a checkpoint's config and tensors say of the maps that its projections can absorb."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.errors import ConfigError
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.rotary import rotary_pairs
from gqa_convert.families.table import FAMILIES
from gqa_convert.merging.absorption_limits import find_absorption_limits
from tests.helpers.checkpoints import llama_arrays, refused, write_llama


@pytest.mark.parametrize(
    ("tail", "keeps"),
    [
        ("rotary_emb.inv_freq", False),
        ("masked_bias", False),
        ("sinks", True),
        ("k_norm.scale", True),
    ],
)
def test_unknown_tensors_keep_heads_in_order(tail: str, keeps: bool, tmp_path: Path) -> None:
    """They may belong to heads by their numbers; buffers of old checkpoints do not."""
    arrays = llama_arrays() | {f"model.layers.0.self_attn.{tail}": np.ones(12, np.float32)}
    finder = AttentionFinder(
        open_checkpoint(write_llama(tmp_path / "source", arrays=arrays)), FAMILIES["llama"]
    )
    assert (find_absorption_limits(finder, finder.layers[0]).order_constraint is not None) == keeps
    assert find_absorption_limits(finder, finder.layers[1]).order_constraint is None


@pytest.mark.parametrize(
    ("model_type", "config", "rotated"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, 16),
        ("phi3", {"partial_rotary_factor": 0.75}, 12),
        ("gpt_neox", {"rotary_pct": 0.5}, 8),
        (
            "gqa_gpt_neox",
            {"rope_parameters": {"partial_rotary_factor": 0.5}, "rotary_pct": 0.25},
            8,
        ),
        ("minimax_m2", {"rotary_dim": 4}, 4),
        ("minimax_m2", {"rotary_dim": 4, "partial_rotary_factor": 0.5}, 8),
        ("minimax_m2", {"rotary_dim": None}, 16),
        ("falcon", {"alibi": True}, 0),
        ("zamba2", {}, 0),
        ("zamba2", {"use_mem_rope": True}, 16),
        ("granitemoehybrid", {"position_embedding_type": "rope"}, 16),
        ("granitemoehybrid", {}, 0),
        ("chatglm", {}, 8),
    ],
)
def test_rotary_dimensions(model_type: str, config: dict[str, Any], rotated: int) -> None:
    """Of 16, by configs as they lie on the Hub."""
    real, imaginary = rotary_pairs(FAMILIES[model_type], config, 16)
    assert sorted([*real, *imaginary]) == list(range(rotated))
    step = 1 if FAMILIES[model_type].rotary == "interleaved" else rotated // 2
    assert np.array_equal(imaginary, real + step)
    assert np.all(np.diff(real) > 0)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("minimax_m2", {"rotary_dim": 5}),
        ("minimax_m2", {"rotary_dim": "6"}),
        ("phi3", {"partial_rotary_factor": -0.5}),
    ],
)
def test_rotary_dimensions_that_make_no_pairs(model_type: str, config: dict[str, Any]) -> None:
    with refused(ConfigError, "repair it"):
        rotary_pairs(FAMILIES[model_type], config, 16)
