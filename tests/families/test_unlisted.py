"""Types that stand in no table: those that work as a Llama does convert, and no result of the
others appears.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GQAConvertError, UnsupportedFamilyError
from gqa_convert.families.loading import load_model
from gqa_convert.families.records import ALL, FAMILIES, REFUSALS
from gqa_convert.verify.run import prove
from tests.helpers.checkpoints import digests, refused
from tests.helpers.tiny import make_checkpoint
from tests.helpers.verification import edit_json

HIDDEN: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True},
    "gemma2": {},
    "llama": {"attention_bias": True},
    "mixtral": {},
    "olmo2": {},
    "qwen3": {},
}
"""Types whose records are hidden, norms of keys of three kinds among them."""

LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
REFUSED: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "diffllama": {},
    "laguna": {"num_attention_heads_per_layer": [12, 24]},
}
"""Types that are refused for what no default record states."""


def hide(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a type out of all tables."""
    for table in (ALL, FAMILIES, REFUSALS):
        if model_type in table:
            monkeypatch.delitem(table, model_type)  # type: ignore[arg-type]


@pytest.mark.parametrize("model_type", HIDDEN)
def test_a_hidden_type_has_the_bytes_of_a_listed_one(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(model_type, tmp_path / "source", **HIDDEN[model_type])
    options = ConversionOptions(method="mean")
    convert_checkpoint(source, tmp_path / "listed", 3, options)
    hide(model_type, monkeypatch)
    result = convert_checkpoint(
        source, tmp_path / "hidden", 3, options, prove=partial(prove, source, None)
    )
    assert any("on no list" in warning for warning in result.plan.warnings)
    assert digests(tmp_path / "hidden") == digests(tmp_path / "listed")


@pytest.mark.parametrize("model_type", REFUSED)
def test_nothing_is_written_of_a_type_that_works_otherwise(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(model_type, tmp_path / "source", **REFUSED[model_type])
    with pytest.raises(UnsupportedFamilyError):
        make_plan(open_checkpoint(tmp_path / "source"), 3)
    hide(model_type, monkeypatch)
    options = ConversionOptions(method="mean")
    with pytest.raises(GQAConvertError) as caught:
        convert_checkpoint(
            tmp_path / "source",
            tmp_path / "out",
            3,
            options,
            prove=partial(prove, tmp_path / "source", None),
        )
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_result_without_a_proof_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint("qwen3", tmp_path / "source")
    hide("qwen3", monkeypatch)
    with pytest.raises(UnsupportedFamilyError, match="must be proved"):
        convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))

    def lie(folder: Path) -> None:
        """A wrong result."""
        edit_json(folder / "config.json", rms_norm_eps=0.5)
        prove(source, None, folder)

    with refused(UnsupportedFamilyError, "failed the proof"):
        convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"), prove=lie)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_config_without_the_key_is_unknown(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "source")
    edit_json(folder / "config.json", num_key_value_heads=None, model_type="no_such_type")
    with pytest.raises(UnsupportedFamilyError, match="is unknown, none of the"):
        make_plan(open_checkpoint(folder), 3)


def test_values_for_each_layer_are_never_ignored(tmp_path: Path) -> None:
    """transformers' Llama with them loads with all heads in every layer."""
    folder = make_checkpoint("llama", tmp_path / "source")
    layers = {"1": {"num_key_value_heads": 3}}
    edit_json(
        folder / "config.json",
        per_layer_config=layers,
        allow_global_per_layer_attribute_access=True,
    )
    for read in (lambda: make_plan(open_checkpoint(folder), 3), lambda: load_model(folder, "auto")):
        with refused(UnsupportedFamilyError, "per_layer_config"):
            read()
