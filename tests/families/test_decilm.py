"""DeciLM: what its config can state, and what its modelling file computes where gqa-convert is not
installed.
"""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import ConfigError, UnsupportedFamilyError
from gqa_convert.families import decilm
from gqa_convert.families.layerwise import kv_heads_by_layer
from gqa_convert.families.loading import load_model
from gqa_convert.families.modeling.gqa_decilm import DeciLMConfig
from gqa_convert.families.records import DECILM_SOURCES
from gqa_convert.verify import verify_checkpoint
from tests.helpers.elsewhere import WAYS, Elsewhere, measure
from tests.helpers.native import distance
from tests.helpers.tiny import HEADS, make_checkpoint
from tests.helpers.verification import failed

SIZES: dict[str, Any] = {"head_dim": 8, "intermediate_size": 256, "num_hidden_layers": 4}
COUNTS = [12, 4, 3, 1]
CONFIG: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": HEADS, "intermediate_size": 256}


@pytest.mark.parametrize("model_type", DECILM_SOURCES)
def test_it_computes_what_the_stock_class_computes_with_the_heads_repeated(
    model_type: str, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    options = SIZES | ({} if model_type == "llama" else {"sliding_window": None})
    source, out = make_checkpoint(model_type, tmp_path / "source", **options), tmp_path / "out"
    convert_checkpoint(source, out, COUNTS, ConversionOptions(method="factor"))
    found = elsewhere.measure(
        folder=str(out), auto="AutoModelForCausalLM", ways=list(WAYS), saved=True, thorough=True
    )
    assert not isinstance(found, str), found
    assert found["class"].startswith("transformers_modules.")
    assert found["class"].endswith("gqa_decilm.DeciLMForCausalLM")
    assert found["info"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    assert failed(verify_checkpoint(out, source)) == {}
    expected = measure(load_model(out, torch.float32)[0], list(WAYS))
    assert distance(found["logits"], expected["logits"]) < 1e-5
    assert distance(found["logits in parts"], expected["logits"]) < 1e-5
    assert distance(found["eager"]["logits"], expected["logits"]) < 1e-5
    assert found["tokens"] == expected["tokens"]
    assert found["tokens"]["greedy"] == found["tokens"]["without a cache"]
    assert found["heads"] == {"self": sorted(COUNTS)}
    assert found["saved"]["differing"] == []
    assert torch.equal(found["saved"]["logits"], found["logits"])
    blocks = found["saved"]["config"]["block_configs"]
    assert [HEADS // block["attention"]["n_heads_in_group"] for block in blocks] == COUNTS


def test_engines_read_the_config_by_attributes() -> None:
    """vLLM reads entries of `block_configs` as attributes, asks which there are, and sends configs
    to other processes.
    """
    config = DeciLMConfig(**decilm.restate(CONFIG, (12, 3)))
    for read in (config, pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        first, second = read.block_configs
        assert (first.attention.n_heads_in_group, second.attention.n_heads_in_group) == (1, 4)
        assert (first.attention.no_op, first.ffn.no_op) == (False, False)
        assert first.ffn.ffn_mult == 4.0
        assert not hasattr(first.ffn, "intermediate_size")
    assert (
        json.loads(config.to_json_string())["block_configs"]
        == decilm.restate(CONFIG, (12, 3))["block_configs"]
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"intermediate_size": 40}, "here 256"),
        ({"head_dim": 16}, "here 8"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"sliding_window": 4096}, "4096 tokens"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_a_decilm_cannot_state(changes: dict[str, Any], word: str) -> None:
    assert decilm.why_not(CONFIG) is None
    assert decilm.why_not(CONFIG | {"sliding_window": 4096, "use_sliding_window": False}) is None
    assert (
        decilm.why_not(CONFIG | {"sliding_window": 4096, "layer_types": ["full_attention"]}) is None
    )
    assert word in str(decilm.why_not(CONFIG | changes))


def test_the_heads_of_each_layer() -> None:
    is_decilm = {"model_type": "nemotron-nas", "num_hidden_layers": 2}
    stated = decilm.restate(CONFIG, (12, 3)) | is_decilm
    assert kv_heads_by_layer(stated, "config.json") == (12, 3)
    assert "block_configs" not in CONFIG
    for changes in ({"block_configs": None}, {"num_hidden_layers": 3}):
        with pytest.raises(ConfigError, match="has block_configs = "):
            kv_heads_by_layer(stated | changes, "config.json")
    wrong = copy.deepcopy(stated)
    wrong["block_configs"][1]["attention"]["n_heads_in_group"] = 5
    with pytest.raises(ConfigError, match="'n_heads_in_group': 5"):
        kv_heads_by_layer(wrong, "config.json")
    without = copy.deepcopy(stated)
    without["block_configs"][0]["attention"] = {"n_heads_in_group": None, "no_op": True}
    with pytest.raises(UnsupportedFamilyError, match=r"layer 0 .* leaves out attention or MLP"):
        kv_heads_by_layer(without, "config.json")
