"""How many tokens a config says that a model reads, against the tables of positions that
transformers makes of it.
"""

from typing import Any

import pytest

from gqa_convert.families.context_length import (
    LONGEST,
    block_length,
    intended_length,
    stated_positions,
    window_of,
)
from tests.helpers.own_files import make_source_model


@pytest.mark.parametrize(
    ("model_type", "changes", "table"),
    [
        ("gpt2", {"n_positions": 23}, "transformer.wpe"),
        ("bart", {"max_position_embeddings": 23}, "model.decoder.embed_positions"),
        (
            "whisper",
            {"max_target_positions": 23, "max_position_embeddings": None},
            "model.decoder.embed_positions",
        ),
    ],
)
def test_learned_positions_are_as_many_as_stated(
    model_type: str, changes: dict[str, Any], table: str
) -> None:
    model: Any = make_source_model(model_type, **changes)
    rows = model.get_submodule(table).weight.shape[0] - getattr(
        model.get_submodule(table), "offset", 0
    )
    assert stated_positions(model.config.to_dict()) == rows == 23


@pytest.mark.parametrize(
    ("config", "stated", "block"),
    [
        ({"max_position_embeddings": 5000}, 5000, LONGEST),
        ({"max_position_embeddings": None, "n_positions": 7}, 7, 7),
        ({"max_seq_len": 7}, 7, 7),
        ({"seq_length": 7}, 7, 7),
        ({"text_config": {"max_position_embeddings": 9}}, 9, 9),
        ({"max_position_embeddings": True}, None, LONGEST),
        ({"max_position_embeddings": 0}, None, LONGEST),
        ({}, None, LONGEST),
        ({"n_positions": 512, "model_type": "gqa_t5"}, None, LONGEST),
    ],
)
def test_what_a_config_states(config: dict[str, Any], stated: int | None, block: int) -> None:
    assert (stated_positions(config), block_length(config)) == (stated, block)


WINDOWED = ["mistral", "qwen2", "gemma2", "gemma3_text", "cohere2", "olmo3", "gpt_oss", "phi3"]


@pytest.mark.parametrize("model_type", WINDOWED)
def test_windows_by_layer_are_those_of_transformers(model_type: str) -> None:
    """With the list of kinds of layers that newer configs have, and without it where older configs
    have none.
    """
    from transformers import CONFIG_MAPPING

    asked = {"use_sliding_window": True, "max_window_layers": 5} if model_type == "qwen2" else {}
    config = CONFIG_MAPPING[model_type](num_hidden_layers=12, sliding_window=64, **asked)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 12
    wanted = [64 if kind == "sliding_attention" else None for kind in kinds]
    stated = config.to_dict() | {"model_type": model_type}
    assert [window_of(stated, layer) for layer in range(12)] == wanted
    if model_type in ("qwen2", "gemma2", "gemma3_text"):
        del stated["layer_types"]
        assert [window_of(stated, layer) for layer in range(12)] == wanted
    assert window_of(stated | {"sliding_window": None}, 0) is None


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "t5"}, 512),
        ({"model_type": "longt5", "n_positions": 4096}, 4096),
        ({"model_type": "llama", "max_position_embeddings": 99}, 99),
        ({"model_type": "bloom"}, None),
    ],
)
def test_a_t5_was_made_for_the_length_of_its_training(
    config: dict[str, Any], length: int | None
) -> None:
    assert intended_length(config) == length
