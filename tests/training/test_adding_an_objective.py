"""A new objective is one file and one entry: everything else finds it there."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gqa_convert.data.objectives import OBJECTIVES
from gqa_convert.errors import RecipeError
from gqa_convert.families.loading import load_model
from gqa_convert.training.estimate import estimate
from gqa_convert.training.opening import tokenize_recipe
from gqa_convert.training.recipe import make_recipe
from tests.helpers.data_helpers import demo_tokenizer, open_samples
from tests.helpers.toy_objective import BackwardsSampler
from tests.helpers.uptrain_runs import losses, metrics, recipe, run, student_home, weights


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with student_home(tmp_path_factory.mktemp("home")) as folder:
        yield folder


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "backwards", BackwardsSampler)


def test_a_second_objective_of_decoders_trains_and_resumes(home: Path, tmp_path: Path) -> None:
    """The first loss and the norm of its gradient are those of text that is read backwards, by
    independent arithmetic.
    """
    keys = {
        "objective": "backwards",
        "schedule": "constant",
        "warmup_steps": 0,
        "evaluation_data": str(home / "other.txt"),
    }
    run(home, tmp_path / "run", **keys, tokens=192)
    run(home, tmp_path / "run", **keys)
    run(home, tmp_path / "whole", **keys)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    forwards = open_samples(
        [str(home / "text.txt")], demo_tokenizer(), objective="causal", sequence_length=32
    )
    batch = forwards.batch([0, 1])
    text = np.concatenate([batch["input_ids"], batch["labels"][:, -1:]], axis=1)[:, ::-1].copy()
    model, _ = load_model(home / "student", torch.float32)
    expected = model(input_ids=torch.from_numpy(text), labels=torch.from_numpy(text)).loss
    expected.backward()
    norm = torch.cat([each.grad.flatten() for each in model.parameters()]).norm()
    first = metrics(tmp_path / "run")[0]
    assert first["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert first["gradient_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_the_default_and_estimates_and_tokenising_and_refusals_know_it(
    home: Path, tmp_path: Path
) -> None:
    run(home, tmp_path / "auto", tokens=64)
    run(home, tmp_path / "causal", tokens=64, objective="causal")
    assert losses(tmp_path / "auto") == losses(
        tmp_path / "causal"
    )  # the first entry remains the default
    path = recipe(home, tmp_path / "run", objective="backwards")
    other = recipe(home, tmp_path / "other")
    assert estimate(path, [], 1, "h100") == estimate(other, [], 1, "h100")
    assert tokenize_recipe(path).samples == 12
    keys = {"model": "m", "output": "o", "tokens": "10M", "objective": "backwards"}
    with pytest.raises(
        RecipeError,
        match=r"objective is backwards, and data\[0\] holds conversations: name running text",
    ):
        make_recipe(keys | {"data": {"source": "d", "format": "chat"}})
    with pytest.raises(
        RecipeError, match="it must be auto, causal, span_corruption, pairs, backwards"
    ):
        make_recipe(keys | {"data": "d", "objective": "forwards"})
