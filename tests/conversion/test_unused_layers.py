"""Layers that transformers leaves out, such as those for multi-token prediction behind a
decoder.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GroupsError
from gqa_convert.measuring.sensitivity.inspection import inspect_checkpoint
from gqa_convert.verify.run import verify_checkpoint
from tests.helpers.tiny import HEADS
from tests.helpers.wrappers import make_wrapper

BEHIND, APART = "model.layers.3.", "mtp.layers.0."


def with_unused_layer(source: Path, folder: Path, place: str) -> Path:
    """A copy of a checkpoint with its last layer once more."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    last = "model.layers.2."
    more = {
        place + name.removeprefix(last): weight.flip(0)
        for name, weight in weights.items()
        if name.startswith(last)
    }
    more[f"{place}eh_proj.weight"] = torch.ones(3, 3)
    save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("place", [BEHIND, APART])
@pytest.mark.parametrize("method", ["factor", "fit"])
def test_their_heads_are_averaged_and_the_others_merged_as_without_them(
    method: str, place: str, small: Path, text: Path, tmp_path: Path
) -> None:
    source = with_unused_layer(small, tmp_path / "source", place)
    stated = {"tokens": 640, "sequence_length": 64, "mix": method != "fit"}
    if method == "fit":
        stated |= {"steps": 1, "kl_steps": 1}
    options = ConversionOptions(method=method, calibration=CalibrationOptions(str(text), **stated))
    made, plain = (
        convert_checkpoint(each, tmp_path / name, 3, options)
        for each, name in ((source, "a"), (small, "b"))
    )
    assert made.plan.cache_bytes() == plain.plan.cache_bytes()
    assert len(made.plan.layers) == 3
    (note,) = [note for note in made.plan.warnings if "transformers leaves out" in note]
    assert f"{place}self_attn" in note
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    before = load_file(source / "model.safetensors")
    for name, weight in found.items():
        if not name.startswith(place):
            assert torch.equal(weight, expected[name]), name
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = before[name].unflatten(0, (3, HEADS // 3, -1)).double().mean(1).flatten(0, 1)
            assert torch.allclose(weight.double(), heads, atol=1e-7), name
        else:
            assert torch.equal(weight, before[name]), name
    assert verify_checkpoint(tmp_path / "a", source).passed


def test_those_of_a_composite_stand_outside_its_decoder(tmp_path: Path) -> None:
    source = make_wrapper("llava", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    (first, *_) = [
        name
        for name in weights
        if name.endswith("layers.0.self_attn.k_proj.weight") and "vision" not in name
    ]
    place = first.partition("self_attn")[0]
    more = {
        APART + name.removeprefix(place): each + 1
        for name, each in weights.items()
        if name.startswith(place)
    }
    save_file(weights | more, source / "model.safetensors", {"format": "pt"})
    plan = convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean")).plan
    assert f"{APART}self_attn" not in [layer.module for layer in plan.layers]
    after = load_file(tmp_path / "out" / "model.safetensors")
    name = f"{APART}self_attn.k_proj.weight"
    assert torch.allclose(
        after[name], more[name].unflatten(0, (3, HEADS // 3, -1)).mean(1).flatten(0, 1), atol=1e-6
    )
    assert verify_checkpoint(tmp_path / "out", source, logits=False).passed


def test_no_list_is_taken(small: Path, tmp_path: Path) -> None:
    source = with_unused_layer(small, tmp_path / "source", BEHIND)
    with pytest.raises(
        GroupsError, match=r"it holds model\.layers\.3\.self_attn.*one number for all layers"
    ):
        make_plan(open_checkpoint(source), [1, 3, 6])


def test_more_heads_and_inspection(small: Path, text: Path, tmp_path: Path) -> None:
    source = with_unused_layer(small, tmp_path / "source", BEHIND)
    found = inspect_checkpoint(
        source, calibration=str(text), calibration_tokens=640, candidates=[3]
    )
    assert found.layers == 3
    halved = make_plan(open_checkpoint(source), 6, method="mean")
    assert {change.method for change in halved.changes} == {"mean"}
    copied = make_plan(open_checkpoint(source), HEADS)
    assert {change.method for change in copied.changes} == {"copy"}
