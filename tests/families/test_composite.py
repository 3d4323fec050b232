"""Models around a decoder, such as vision-language and speech models: the decoder is converted, the
rest stays byte for byte.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.layers.model_loading import find_modules
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.planning import plan_conversion
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import OptionError, UnsupportedFamilyError
from gqa_convert.families.table import COMPOSITES, FAMILIES, INNER, family_of, find_family
from gqa_convert.verify import verify_checkpoint
from tests.helpers.checkpoints import refused
from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.verification import failed
from tests.helpers.wrappers import (
    WRAPPER_TYPES,
    image_inputs,
    load_wrapper,
    make_wrapper,
    merge_decoder_heads,
)

GROUPS = 3
VERIFIED = ("llava", "idefics2", "qwen2_vl", "gemma3", "mllama", "canary", "t5gemma")
"""Names in the files of transformers 4, of transformers 5, without a prefix, with a norm of keys,
and cross-attention, to images and to an encoder's output.
"""


@pytest.fixture
def source(once: Callable[..., Path]) -> Callable[[str], Path]:
    """A tiny model of a type."""
    return lambda model_type: once(make_wrapper, model_type)


@pytest.mark.parametrize("model_type", WRAPPER_TYPES)
def test_result_is_the_source_with_merged_heads(
    model_type: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    """With an image among the inputs; only keys and values of the decoder differ in the files, and
    verify agrees.
    """
    folder, out = source(model_type), tmp_path / "out"
    convert_checkpoint(folder, out, GROUPS, ConversionOptions(method="mean"))
    assert failed(verify_checkpoint(out, folder, logits=model_type in VERIFIED)) == {}
    theirs, ours = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    differ = {name for name in theirs if not torch.equal(theirs[name], ours[name])}
    assert {name.split(".")[-2] for name in differ} == {"k_proj", "v_proj"}
    for name in differ:
        assert not name.removeprefix("model.").startswith(
            ("vis", "image", "video", "connector", "multi_modal", "encoder")
        ), name
        assert ours[name].shape[0] == GROUPS * 8
    model, inputs = load_wrapper(out), image_inputs(model_type)
    expected = load_wrapper(folder)
    merge_decoder_heads(expected, GROUPS)
    with torch.no_grad():
        found, wanted = model(**inputs).logits, expected(**inputs).logits
        without = model(
            **inputs | {key: -each for key, each in inputs.items() if each.is_floating_point()}
        ).logits
    assert float((found - wanted).abs().max() / wanted.std()) < 2e-5
    reads_numbers = any(each.is_floating_point() for each in inputs.values())
    assert not reads_numbers or float((found - without).abs().max() / wanted.std()) > 1e-3, (
        "the image has no effect on the logits"
    )


def test_early_configs_state_the_decoder_beside_the_rest(tmp_path: Path) -> None:
    folder, out = make_wrapper("qwen2_vl", tmp_path / "source", flat=True), tmp_path / "out"
    plan = convert_checkpoint(folder, out, GROUPS, ConversionOptions(method="mean")).plan
    assert "text_config" not in plan.config
    assert plan.config["num_key_value_heads"] == plan.config["multi_query_group_num"] == GROUPS
    assert failed(verify_checkpoint(out, folder)) == {}


def test_the_table_of_composites_is_complete() -> None:
    assert set(WRAPPER_TYPES) == set(COMPOSITES), "add a tiny model to tests/helpers/wrappers.yaml"
    for composite, decoder in COMPOSITES.items():
        assert decoder in FAMILIES or decoder in INNER
        assert family_of({"model_type": composite}).is_composite


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [("opt", "modelling file"), ("mamba", "no attention"), ("no_such_type", "unknown")],
)
def test_a_decoder_that_cannot_be_converted_is_refused(decoder: str, reason: str) -> None:
    with refused(UnsupportedFamilyError, "llava", reason):
        family_of({"model_type": "llava", "text_config": {"model_type": decoder}})
    with pytest.raises(UnsupportedFamilyError, match="wraps a decoder"):
        find_family("llava")


def test_the_layer_walk_finds_the_decoder(source: Callable[[str], Path]) -> None:
    """Not the vision tower, whose attention modules have names that end alike."""
    for model_type, inside in (
        ("llava", "language_model"),
        ("idefics2", "text_model"),
        ("qwen2_vl", "language_model"),
    ):
        modules = [
            layer.module for layer in make_plan(open_checkpoint(source(model_type)), GROUPS).layers
        ]
        found = find_modules(load_wrapper(source(model_type)), modules)
        assert list(found.values()) == [
            f"model.{inside}.layers.{number}.self_attn" for number in (0, 1)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_methods_that_read_text_convert_the_decoder(model_type: str, tmp_path: Path) -> None:
    folder, out = make_wrapper(model_type, tmp_path / "source", vocabulary=2048), tmp_path / "out"
    demo_tokenizer().save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("Grouped-query attention has fewer key and value heads than query heads. " * 60)
    fitting = CalibrationOptions(source=text, tokens=256, sequence_length=64, steps=2, kl_steps=0)
    assert (
        convert_checkpoint(folder, out, GROUPS, ConversionOptions(calibration=fitting)).calibration
        is not None
    )
    # random weights make the fit no better than the mean on other tokens
    assert failed(verify_checkpoint(out, folder)).keys() <= {"module outputs"}


def test_text_is_refused_where_only_images_run_the_cross_attention(
    source: Callable[[str], Path],
) -> None:
    folder = source("mllama")
    options = ConversionOptions(
        method="fit", calibration=CalibrationOptions(source="python-stdlib")
    )
    with pytest.raises(OptionError, match="runs on images alone"):
        convert_checkpoint(folder, folder.parent / "out-of-text", GROUPS, options)
    assert not (folder.parent / "out-of-text").exists()
    assert plan_conversion(open_checkpoint(folder), GROUPS, ConversionOptions())[0].method == "mean"
