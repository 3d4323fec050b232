"""Sources as the Hub has them: planned, converted, verified, fitted, and loaded with transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GQAConvertError
from gqa_convert.families.loading import load_any_model
from gqa_convert.verify import verify_checkpoint
from tests.helpers.fitting import fitted
from tests.helpers.hub_sources import HUB_SOURCES, write_hub_source
from tests.helpers.verification import failed

pytestmark = pytest.mark.usefixtures("modeling_files_registered")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a repository's folder, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_hub_source(HUB_SOURCES[name], tmp_path_factory.mktemp("hub") / "source")
        return made[name]

    return make


@pytest.mark.parametrize("name", HUB_SOURCES)
def test_the_result_computes_what_the_source_computes_with_repeated_heads(
    name: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source, row, out = folder(name), HUB_SOURCES[name], tmp_path / "out"
    convert_checkpoint(source, out, row.groups, ConversionOptions(method="mean"))
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == (row.type_of_copy or row.config["model_type"])
    assert failed(verify_checkpoint(out, source)) == {}


@pytest.mark.parametrize("name", [name for name, source in HUB_SOURCES.items() if source.fit])
def test_two_steps_of_fit(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    fitted(folder(name), out, HUB_SOURCES[name].groups, steps=2, max_shard_size=1_000_000)
    assert load_any_model(out, torch.float32).missing == []


def test_a_snapshot_of_links_in_the_cache_of_the_hub(folder: Callable[[str], Path], tmp_path: Path) -> None:
    name = "meta-llama/Llama-2-7b-hf"
    blobs, snapshot = tmp_path / "models--org--model" / "blobs", tmp_path / "models--org--model" / "snapshots" / "4d7a"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder(name).iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    convert_checkpoint(snapshot, tmp_path / "out", 3, ConversionOptions(method="mean"))
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert failed(verify_checkpoint(tmp_path / "out", snapshot, logits=False)) == {}
    assert "pytorch_model.bin" not in {path.name for path in (tmp_path / "out").iterdir()}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], int, str]] = {
    "mosaicml/mpt-7b-8k with grouped heads": (
        {
            "model_type": "mpt",
            "architectures": ["MPTForCausalLM"],
            "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 4, "alibi": True},
            "d_model": 96,
            "n_heads": 12,
            "n_layers": 1,
        },
        {"transformer.blocks.0.attn.Wqkv.weight": (160, 96)},
        2,
        (
            "HERE/config.json has attn_config.attn_type = 'grouped_query_attention', and so it can't be converted: its attention has grouped K/V "
            "heads (attn_config.kv_n_heads) already, which only llm-foundry's own code loads; transformers' Mpt has as many K/V heads as query heads"
        ),
    ),
    "bigcode/starcoder": (
        {"model_type": "gpt_bigcode", "n_head": 48, "n_embd": 6144, "n_layer": 40, "multi_query": True},
        {"transformer.h.0.attn.c_attn.weight": (6, 4)},
        1,
        "model type gpt_bigcode can't be converted: in transformers it has one K/V head or as many as query heads, and nothing between",
    ),
    "a base model without its config's layers": (
        HUB_SOURCES["meta-llama/Llama-2-7b-hf"].config,
        {"model.embed_tokens.weight": (96, 96)},
        3,
        (
            "HERE holds no tensor that ends in self_attn.k_proj.weight, though its model type llama has them: the config and the weights do not "
            "belong together"
        ),
    ),
}
"""Config, shapes of tensors, N, and the line."""


@pytest.mark.parametrize("name", REFUSED)
def test_the_line_of_a_source_that_cannot_be_converted(name: str, tmp_path: Path) -> None:
    config, shapes, groups, expected = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    with pytest.raises(GQAConvertError) as caught:
        make_plan(open_checkpoint(tmp_path), groups)
    assert str(caught.value).replace(str(tmp_path), "HERE") == expected
