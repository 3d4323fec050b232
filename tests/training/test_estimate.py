"""Estimates of a run, against what torch counts on small models and against what a run takes."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from gqa_convert.cli import app
from gqa_convert.families.loading import load_model
from gqa_convert.training.estimate import Estimate, estimate
from gqa_convert.training.optimizers import build_optimizer
from gqa_convert.training.recipe import read_recipe
from tests.helpers.data_helpers import span_tokenizer
from tests.helpers.documents import ROOT
from tests.helpers.uptrain_runs import DEMO, recipe, student_home

LENGTH = 32


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with student_home(tmp_path_factory.mktemp("estimates")) as folder:
        (folder / "text.txt").write_text((folder / "text.txt").read_text() * 4)
        yield folder


def estimated(home: Path, output: Path, **keys: Any) -> Estimate:
    return estimate(recipe(home, output, **keys), [], 1, "h100")


def counted(model: Any) -> int:
    """The operations that torch counts for one sample on a real model, forwards and backwards."""
    model.set_attn_implementation("eager")  # the counter does not know the CPU's fused attention
    with FlopCounterMode(display=False) as counter:
        ids = torch.ones(1, LENGTH, dtype=torch.long)
        model.train()(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def test_operations_are_those_that_torch_counts(home: Path, tmp_path: Path) -> None:
    model, _ = load_model(home / "student", torch.float32)
    whole = counted(model)
    # two samples in a step; torch's attention takes one product more in all than the eager one does
    assert estimated(home, tmp_path / "run").flops == pytest.approx(2 * whole, rel=0.005)
    keys = {"gradient_checkpointing": True, "teacher": str(DEMO)}
    assert 2 * whole * 4 / 3 < estimated(home, tmp_path / "run", **keys).flops < 2 * whole * 5 / 3


def test_bytes_of_weights_gradients_and_moments_are_those_of_tensors(
    home: Path, tmp_path: Path
) -> None:
    path = recipe(home, tmp_path / "run", sharding="full")
    alone, shared = (estimate(path, [], gpus, "h100").memory for gpus in (1, 2))
    model, _ = load_model(home / "student", torch.float32)
    steps = build_optimizer(model, read_recipe(path))
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    steps.step()
    sizes = {
        "weights": sum(each.nbytes for each in model.parameters()),
        "gradients": sum(each.grad.nbytes for each in model.parameters()),
        "moments": sum(
            each.nbytes
            for state in steps.state.values()
            for name, each in state.items()
            if name != "step"
        ),
    }
    for name, size in sizes.items():
        assert alone[name] == size
        assert shared[name] == size / 2
    layers = [sum(each.numel() for each in layer.parameters()) for layer in model.model.layers]
    outside = sum(each.numel() for each in model.parameters()) - sum(layers)
    held, reduced = (
        2 * max(layers) + outside,
        max(layers) + outside,
    )  # weights, and gradients before and after a sum
    in_bf16 = estimate(path, ["precision=bf16"], 2, "h100").memory
    hybrid = estimate(path, ["sharding=hybrid"], 16, "h100")
    full = estimate(path, [], 8, "h100")
    assert (hybrid.shards, full.shards) == (8, 8)
    assert hybrid.memory == full.memory
    assert "gathered layers" not in alone
    assert shared["gathered layers"] == 4 * held + 8 * reduced
    assert in_bf16["gathered layers"] == 2 * held + 6 * reduced


def test_a_teacher_of_adapters_has_attention_of_its_own(home: Path, tmp_path: Path) -> None:
    keys = {"precision": "bf16", "teacher": str(DEMO)}
    whole = estimated(home, tmp_path / "run", **keys).memory["teacher"]
    shared = estimated(home, tmp_path / "run", **keys, lora={"rank": 4}).memory["teacher"]
    model, _ = load_model(DEMO, torch.float32)
    others = [each for name, each in model.named_parameters() if "self_attn" not in name]
    assert whole - shared == 2 * sum(each.numel() for each in others)


def test_an_output_layer_of_its_own_counts(home: Path, tmp_path: Path) -> None:
    """Whatever config.json says: transformers unties a stored layer with other numbers, and T5's
    config ties by itself.
    """
    for source in ("student", "own"):
        folder = tmp_path / source
        shutil.copytree(home / "student", folder)
        weights = load_file(folder / "model.safetensors")
        if source == "own":
            weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        model, _ = load_model(folder, torch.float32)
        found = estimated(home, tmp_path / "run", model=str(folder)).parameters
        assert found["trained"] == sum(each.numel() for each in model.parameters())


KNOWN = json.loads(Path(__file__).with_name("recipe_models.json").read_text(encoding="utf-8"))
"""Of each shipped recipe that was not run: the configs of its models, and the GPUs that it names.
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_recipes_state_the_memory_and_the_time_that_are_estimated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, known = ROOT / "recipes" / f"{name}.yaml", KNOWN[name]
    text, tokenizer = path.read_text(encoding="utf-8"), span_tokenizer()
    stated = read_recipe(path)
    folders = {stated.model: known["student"], stated.teacher: known["teacher"]}

    def opened(source: str) -> Any:
        folder = tmp_path / source.replace("/", "-")
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(folders[source]))
        stored = (
            {"lm_head.weight": None} if folders[source].get("tie_word_embeddings") is False else {}
        )
        return SimpleNamespace(
            folder=folder, local_folder=folder, config=folders[source], entries=stored
        )

    monkeypatch.setattr("gqa_convert.training.estimate.open_checkpoint", opened)
    monkeypatch.setattr("gqa_convert.training.estimate.open_local", opened)
    found = estimate(path, [], known["gpus"], "h100")
    memory = re.search(r"^# memory +([\d.]+) GB (?:each )?\(estimate\)", text, re.MULTILINE)
    time = re.search(
        r"^# time +([\d.]+) (hours|days) on H100 \(estimate: ([\d.]+e\d+) floating",
        text,
        re.MULTILINE,
    )
    assert memory is not None
    assert time is not None
    assert float(memory[1]) * 1e9 == pytest.approx(found.memory_needed, rel=0.1)
    assert float(time[1]) * {"hours": 1, "days": 24}[time[2]] == pytest.approx(
        found.hours, rel=0.12
    )
    assert float(time[3]) == pytest.approx(found.flops * found.steps, rel=0.05)
    assert (found.shards > 1) == ("fsdp2.yaml" in text)
    assert (
        found.memory_needed < 72e9
    )  # what a GPU with 80 GB has, with a tenth for what is not counted


def test_the_command_line(home: Path, tmp_path: Path) -> None:
    path = recipe(home, tmp_path / "run", teacher=str(DEMO))
    command = ["uptrain", str(path), "sharding=full", "--dry-run", "--hardware", "8xh100"]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    for words in (
        "each parameter over 8 of 8 GPU(s)",
        "memory per GPU",
        ", of arithmetic alone",
        "tokens are needed",
    ):
        assert words in shown.stdout
    stated = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert stated["memory_needed"] == sum(stated["memory"].values())
