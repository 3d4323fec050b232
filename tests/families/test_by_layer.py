"""Layers that differ in transformers' own classes: each type of the table computes what its stock
class computes with the merged heads repeated, and a result is proven, loaded elsewhere and
converted again.
"""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gqa_convert.attention import register
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.families.modeling import gqa_by_layer
from gqa_convert.families.table import FAMILIES
from gqa_convert.verify import verify_checkpoint
from tests.helpers.checkpoints import read_weights
from tests.helpers.elsewhere import WAYS, generated, logits, logits_in_parts, measure
from tests.helpers.native import distance
from tests.helpers.selection import slow_but
from tests.helpers.tiny import make_checkpoint, make_config, randomise
from tests.helpers.verification import details, failed

pytestmark = pytest.mark.usefixtures("modeling_files_registered")

COUNTS = [12, 4, 3, 1]
TYPES = sorted(family.stock_type for family in FAMILIES.values() if family.kv_heads == "listed")
EVERY_RUN = (
    "cohere2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "nemotron",
    "phi3",
    "qwen2",
    "stablelm",
)


def by_layer(config: Any, counts: list[int]) -> Any:
    """The config of the same model with a number of K/V heads for each layer."""
    made = getattr(gqa_by_layer, f"GQA{type(config).__name__}")
    return made.from_dict({**config.to_dict(), "num_key_value_heads": counts})


@pytest.mark.parametrize("model_type", slow_but(EVERY_RUN, TYPES))
def test_it_computes_what_the_stock_class_computes_with_the_heads_repeated(
    model_type: str, tmp_path: Path
) -> None:
    source, out = (
        make_checkpoint(model_type, tmp_path / "source", num_hidden_layers=4),
        tmp_path / "out",
    )
    convert_checkpoint(source, out, COUNTS, ConversionOptions(method="mean"))
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    assert "1 to 12 heads in each of 4 layers" in details(report)["cache heads"]


@pytest.mark.parametrize(
    ("model_type", "kinds"), [("gemma2", ["eager"]), ("gemma3_text", ["eager", "gqa"])]
)
def test_windows_masks_and_caches(model_type: str, kinds: list[str]) -> None:
    """Tokens of every cache, with layers of two kinds, are those of a model without one; gqa, sdpa
    and eager agree.
    """
    register()
    layer_types = ["sliding_attention", "full_attention"] * 2
    config = make_config(model_type, num_hidden_layers=4, layer_types=layer_types)
    made = getattr(gqa_by_layer, f"GQA{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]}")
    result = made(by_layer(config, COUNTS)).eval()
    randomise(result)
    found = measure(result, list(WAYS))
    assert found["heads"] == {"self": sorted(COUNTS)}
    tokens = {way: found["tokens"][way] for way in ("greedy", "without a cache", "static cache")}
    assert tokens["greedy"] == tokens["without a cache"] == tokens["static cache"], tokens
    for kind in kinds:
        result.set_attn_implementation(kind)
        assert distance(logits(result), found["logits"]) < 1e-5
        assert distance(logits_in_parts(result), found["logits"]) < 1e-5
        assert generated(result) == tokens["greedy"]


def test_the_config_holds_a_list_and_the_object_a_number() -> None:
    config = by_layer(make_config("qwen3", num_hidden_layers=4), COUNTS)
    for read in (config, pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert (read.num_key_value_heads, read.multi_query_group_num) == (12, COUNTS)
        assert json.loads(read.to_json_string())["num_key_value_heads"] == COUNTS
    assert type(config).__module__ == gqa_by_layer.__name__
    assert by_layer(make_config("qwen3", num_hidden_layers=4), 3).multi_query_group_num == [3] * 4  # type: ignore[arg-type]
    for wrong in ([12, 4], [12, 5, 3, 1]):
        with pytest.raises(ValueError, match="expected a divisor of 12 for each of 4 layers"):
            by_layer(make_config("qwen3", num_hidden_layers=4), wrong)
    for name in ("GQANothing", "GQA", "LlamaConfig", "GQAAutoModel"):
        assert not hasattr(gqa_by_layer, name)


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("llama", "mean"),
        ("llama", "first"),
        *((name, "factor") for name in ("llama", "phi3", "stablelm", "olmo2", "cohere")),
    ],
)
def test_each_layer_is_that_of_the_conversion_with_its_number(
    model_type: str, method: str, tmp_path: Path
) -> None:
    """Fused projections, and norms over all heads, per head and in a list."""
    options = {"use_qk_norm": True} if model_type == "cohere" else {}
    options |= {"qk_layernorm": True} if model_type == "stablelm" else {}
    source = make_checkpoint(model_type, tmp_path / "source", num_hidden_layers=2, **options)
    convert_checkpoint(source, tmp_path / "list", [4, 1], ConversionOptions(method=method))
    ours = read_weights(tmp_path / "list")
    for layer, count in enumerate([4, 1]):
        convert_checkpoint(source, tmp_path / str(count), count, ConversionOptions(method=method))
        theirs = read_weights(tmp_path / str(count))
        names = {name for name in theirs if f".{layer}.self_attn." in name}
        assert names == {name for name in ours if f".{layer}.self_attn." in name}
        for name in names:
            assert ours[name].tobytes() == theirs[name].tobytes(), name
    assert failed(verify_checkpoint(tmp_path / "list", source)) == {}
