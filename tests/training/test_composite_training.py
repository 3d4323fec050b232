"""Vision-language models, of which text trains the decoder alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from gqa_convert.training.estimate import estimate
from gqa_convert.training.models import load_student, target_modules
from gqa_convert.training.recipe import make_recipe
from tests.helpers.ranks import Job, uptrain
from tests.helpers.uptrain_runs import DEMO, losses, make_student, recipe, run
from tests.helpers.wrappers import PICTURE_TYPES, load_wrapper, make_wrapper

QUICK = ("llava", "mllama", "qwen2_vl")
"""Mllama has layers that text passes by inside its decoder."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Llava in the place of the student."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        make_student(folder)
        (folder / "student").rename(folder / "decoder")
        tokenizer = AutoTokenizer.from_pretrained(DEMO)
        tokenizer.save_pretrained(
            make_wrapper("llava", folder / "student", vocabulary=len(tokenizer))
        )
        yield folder


def used_by_text(model: Any) -> set[str]:
    """The parameters that get a gradient from text."""
    model.train()(
        input_ids=torch.arange(2, 14)[None], use_cache=False
    ).logits.square().mean().backward()
    return {name for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow)
        for kind in PICTURE_TYPES
    ],
)
def test_what_is_trained_is_what_text_uses(kind: str, tmp_path: Path) -> None:
    folder = make_wrapper(kind, tmp_path / "model")
    made = make_recipe(
        {"model": str(folder), "data": "d", "output": str(tmp_path / "o"), "tokens": "10M"}
    )
    model = load_student(made, folder)
    used = used_by_text(load_wrapper(folder))
    assert {name for name, each in model.named_parameters() if each.requires_grad} == used
    targets = {f"{name}.weight" for name in target_modules(model)}
    assert targets
    assert targets < used


@pytest.mark.parametrize(
    "keys", [{"weight_decay": 1.0}, {"lora": {"rank": 2}}], ids=["weights", "adapters"]
)
def test_towers_stay_as_they_are(home: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    run(home, tmp_path / "run", **keys, learning_rate=1e-2)
    before = load_file(home / "student" / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        is_same = torch.equal(tensor, after[name])
        is_tower = "vision_tower" in name or "projector" in name
        assert (
            is_same
            if is_tower
            else not is_same or tensor.dim() == 1 or "embed" in name or "lm_head" in name
        ), name


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicate", "full"])
def test_two_processes_train_as_one_does(home: Path, tmp_path: Path, sharding: str) -> None:
    run(home, tmp_path / "one")
    path = recipe(home, tmp_path / "two", sharding=sharding)
    job = Job(uptrain, (str(path),), tmp_path / "logs", 2)
    assert job.wait(120) == [0, 0], job.text()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two")
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_estimate_counts_what_is_trained(home: Path, tmp_path: Path) -> None:
    model = load_wrapper(home / "student")
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    found = estimate(recipe(home, tmp_path / "run"), [], 1, "h100")
    assert found.parameters["all"] == sum(sizes.values())
    assert found.parameters["trained"] == sum(sizes[name] for name in used_by_text(model))
    assert found.memory["weights"] == 4 * found.parameters["all"]
    assert found.memory["moments"] == 8 * found.parameters["trained"]
