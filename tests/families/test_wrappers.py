"""Wrappers of a decoder, such as vision-language models: the decoder is converted, the rest stays byte for byte."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import gqa_convert
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit.defaults import plan_conversion
from gqa_convert.conversion.fit.model_loading import find_modules
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import OptionError, UnsupportedFamilyError
from gqa_convert.families.table import COMPOSITES, FAMILIES, INNER, family_of, find_family
from gqa_convert.verify.run import verify_checkpoint
from tests.helpers.wrappers import WRAPPER_TYPES, image_inputs, load_wrapper, make_wrapper, merge_decoder_heads

GROUPS = 3
DEMO = Path(gqa_convert.__file__).parent / "demo_checkpoint"
REPRESENTATIVE = ("llava", "idefics2", "qwen2_vl", "gemma3")
"""Names in the files of transformers 4, of transformers 5, without a prefix, and with a norm of keys."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny wrapper of a type, once."""
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = make_wrapper(model_type, tmp_path_factory.mktemp(model_type) / "source")
        return made[model_type]

    return make


def converted(folder: Path, method: str = "mean") -> Path:
    out = folder.parent / f"out-{method}"
    if not out.exists():
        convert_checkpoint(folder, out, GROUPS, ConversionOptions(method=method))
    return out


def config_of(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize(
    "model_type",
    WRAPPER_TYPES,
)
def test_result_is_the_source_with_merged_heads(model_type: str, source: Callable[[str], Path]) -> None:
    """With an image among the inputs; and only keys and values of the decoder differ in the files."""
    folder = source(model_type)
    out = converted(folder)
    theirs, ours = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert theirs.keys() == ours.keys()
    differ = {name for name in theirs if not torch.equal(theirs[name], ours[name])}
    assert differ
    for name in differ:
        assert not name.removeprefix("model.").startswith(("vis", "image", "video", "connector", "multi_modal")), name
        assert name.split(".")[-3] in ("self_attn", "cross_attn"), name
        assert name.split(".")[-2] in ("k_proj", "v_proj"), name
        assert ours[name].shape[0] == GROUPS * 8
    model, inputs = load_wrapper(out), image_inputs(model_type)
    expected = load_wrapper(folder)
    merge_decoder_heads(expected, GROUPS)
    with torch.no_grad():
        found, wanted = model(**inputs).logits, expected(**inputs).logits
        without = model(**inputs | {key: -each for key, each in inputs.items() if each.is_floating_point()}).logits
    assert float((found - wanted).abs().max() / wanted.std()) < 2e-5
    assert float((found - without).abs().max() / wanted.std()) > 1e-3, "the image has no effect on the logits"


@pytest.mark.parametrize("model_type", REPRESENTATIVE)
def test_only_the_nested_config_changes(model_type: str, source: Callable[[str], Path]) -> None:
    before, after = config_of(source(model_type)), config_of(converted(source(model_type)))
    nested, stated = after.pop("text_config"), before.pop("text_config")
    assert isinstance(nested, dict)
    assert isinstance(stated, dict)
    assert after.pop("torch_dtype") == before["dtype"]
    assert after == before
    counts = {"num_key_value_heads": GROUPS, "multi_query_attention": True, "multi_query_group_num": GROUPS}
    assert {key: nested[key] for key in nested if key in counts} == counts
    assert {key: nested[key] for key in stated if key not in counts} == {
        key: stated[key] for key in stated if key not in counts
    }


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_verify_passes_and_finds_a_changed_vision_tensor(
    model_type: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    folder, out = source(model_type), converted(source(model_type))
    report = verify_checkpoint(out, folder)
    assert report.passed, [check for check in report.checks if not check.passed]
    tensors = load_file(out / "model.safetensors")
    name = next(each for each in tensors if each.startswith("vis") and each.endswith("weight"))
    tensors[name][0] += 1
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in out.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    found = verify_checkpoint(damaged, folder, logits=False)
    assert [check.name for check in found.checks if not check.passed] == ["untouched tensors"]


def test_early_configs_state_the_decoder_beside_the_wrapper(tmp_path: Path) -> None:
    folder = make_wrapper("qwen2_vl", tmp_path / "source", flat=True)
    out = converted(folder)
    config = config_of(out)
    assert "text_config" not in config
    assert config["num_key_value_heads"] == config["multi_query_group_num"] == GROUPS
    report = verify_checkpoint(out, folder)
    assert report.passed, [check for check in report.checks if not check.passed]


def test_the_table_of_composites_is_complete() -> None:
    assert set(WRAPPER_TYPES) == set(COMPOSITES), "add a tiny model to tests/helpers/wrappers.py"
    for wrapper, decoder in COMPOSITES.items():
        assert decoder in FAMILIES or decoder in INNER
        assert family_of({"model_type": wrapper}).wrapped


@pytest.mark.parametrize(
    ("decoder", "reason"), [("opt", "modelling file"), ("mamba", "no attention"), ("no_such_type", "unknown")]
)
def test_a_decoder_that_cannot_be_converted_is_refused(decoder: str, reason: str) -> None:
    config = {"model_type": "llava", "text_config": {"model_type": decoder}}
    with pytest.raises(UnsupportedFamilyError, match=reason) as caught:
        family_of(config)
    assert "\n" not in str(caught.value)
    assert "llava" in str(caught.value)
    with pytest.raises(UnsupportedFamilyError, match="wraps a decoder"):
        find_family("llava")


def test_the_layer_walk_finds_the_decoder(source: Callable[[str], Path]) -> None:
    """Not the vision tower, whose attention modules have names that end alike."""
    for model_type, inside in (("llava", "language_model"), ("idefics2", "text_model"), ("qwen2_vl", "language_model")):
        modules = [layer.module for layer in make_plan(open_checkpoint(source(model_type)), GROUPS).layers]
        found = find_modules(load_wrapper(source(model_type)), modules)
        assert list(found.values()) == [f"model.{inside}.layers.{number}.self_attn" for number in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_methods_that_read_text_convert_the_decoder(model_type: str, tmp_path: Path) -> None:
    folder = make_wrapper(model_type, tmp_path / "source", vocabulary=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    text = tmp_path / "text.txt"
    text.write_text("Grouped-query attention has fewer key and value heads than query heads. " * 60)
    out = tmp_path / "out"
    fitting = CalibrationOptions(source=text, tokens=256, sequence_length=64, steps=2, kl_steps=0)
    result = convert_checkpoint(folder, out, GROUPS, ConversionOptions(calibration=fitting))
    assert result.calibration is not None
    theirs, ours = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    differ = {name for name in theirs if not torch.equal(theirs[name], ours[name])}
    assert differ
    assert all(".self_attn." in name and ".layers." in name and "vis" not in name for name in differ)
    report = verify_checkpoint(out, folder)
    # random weights make the fit no better than the mean on other tokens
    assert {check.name for check in report.checks if not check.passed} <= {"better than mean", "module outputs"}


def test_text_is_refused_where_only_images_run_the_cross_attention(source: Callable[[str], Path]) -> None:
    folder = source("mllama")
    out = folder.parent / "out-of-text"
    with pytest.raises(OptionError, match="runs on images alone"):
        convert_checkpoint(
            folder, out, GROUPS, ConversionOptions(method="fit", calibration=CalibrationOptions(source="python-stdlib"))
        )
    assert not out.exists()
    assert plan_conversion(open_checkpoint(folder), GROUPS, ConversionOptions())[0].method == "mean"
    report = verify_checkpoint(converted(folder), folder)
    assert report.passed, [check for check in report.checks if not check.passed]
