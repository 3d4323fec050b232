"""Estimates of a run, against what torch counts on small models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from gqa_convert.cli import app
from gqa_convert.errors import LaunchError, OptionError, RecipeError
from gqa_convert.training import memory
from gqa_convert.training.architecture import read_architecture
from gqa_convert.training.dry_run import Hardware, dry_run
from gqa_convert.training.flops import sample_flops
from gqa_convert.training.gpus import named_gpu
from gqa_convert.training.masks import model_inputs
from gqa_convert.training.optimizers import build_optimizer, choose_trained
from gqa_convert.training.recipe import make_recipe
from gqa_convert.training.sharding import Layout, layout_of
from tests.helpers.distributed_steps import BASE, VOCABULARY, small_model
from tests.helpers.uptrain_runs import DEMO, recipe, student_home

LENGTH, TARGET = 16, 8


MODELS = ("llama", "gpt2", "t5")


def prepared(kind: str) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """A model, a sample for it and its sizes."""
    model = small_model(kind).train()
    torch.manual_seed(1)
    model.set_attn_implementation("eager")  # the counter does not know the CPU's fused attention
    sample = {"input_ids": torch.randint(2, VOCABULARY, (1, LENGTH))}
    if kind == "t5":
        sample["decoder_input_ids"] = torch.randint(2, VOCABULARY, (1, TARGET))
    sizes = read_architecture(model.config.to_dict())
    assert sizes is not None
    return model, sample, sizes


def setting(model: Any, kind: str, **keys: Any) -> memory.Setting:
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return memory.setting_of(
        make_recipe(BASE | keys),
        parameters=count,
        trained=trained,
        sequence_length=LENGTH,
        target_length=TARGET if kind == "t5" else 0,
    )


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_operations_are_those_that_torch_counts(kind: str, again: bool) -> None:
    model, sample, sizes = prepared(kind)
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with FlopCounterMode(display=False) as counter:
        logits = model(**sample, use_cache=False).logits
        forward = counter.get_total_flops()
        logits.sum().backward()
    found = sample_flops(sizes, setting(model, kind, gradient_checkpointing=again), sizes)
    assert found.forward == found.teacher == forward
    assert found.forward + found.backward + found.recomputation == counter.get_total_flops()
    assert bool(found.recomputation) == again


def test_masks_of_documents_are_counted() -> None:
    """Every layer keeps one, which torch's attention converts, and its keys and values repeated."""
    model = small_model("llama").train()
    document, kept = LENGTH // 2, []
    batch = {"input_ids": torch.randint(2, VOCABULARY, (2, LENGTH))}
    places = torch.arange(LENGTH).repeat(2, 1)
    for extra in ({}, {"position_ids": places % document, "document_ids": places // document}):
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = model(**model_inputs(model, batch | extra), use_cache=False).logits
        kept.append(sum(storages.values()))
        del logits
    sizes = read_architecture(model.config.to_dict())
    assert sizes is not None
    planned = memory.plan(sizes, setting(model, "llama", document_mask=True, micro_batch_size=2))
    booleans, tables = 2 * LENGTH**2, 2 * LENGTH * sizes.head_dim * 4  # rotary tables of the second row
    assert kept[1] - kept[0] == planned["document masks"] - booleans + tables
    assert "document masks" not in memory.plan(sizes, setting(model, "llama"))


def test_products_for_frozen_weights_are_not_counted() -> None:
    model, sample, sizes = prepared("llama")
    choose_trained(model, "kv")
    with FlopCounterMode(display=False) as counter:
        model(**sample, use_cache=False).logits.sum().backward()
    found = sample_flops(sizes, setting(model, "llama", trainable="kv"))
    # The estimate has gradients for the inputs of the first layer's projections, which nothing needs.
    assert counter.get_total_flops() < found.total < 1.1 * counter.get_total_flops()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_bytes_of_weights_gradients_and_moments_are_those_of_tensors(kind: str, optimizer: str) -> None:
    model, sample, sizes = prepared(kind)
    stated = make_recipe(BASE | {"optimizer": optimizer})
    steps = build_optimizer(model, stated)
    model(**sample, use_cache=False).logits.sum().backward()
    steps.step()
    parts = memory.plan(sizes, setting(model, kind, optimizer=optimizer))
    parameters = list(model.parameters())
    assert parts["weights"] == sum(each.numel() * each.element_size() for each in parameters)
    assert parts["gradients"] == sum(each.grad.numel() * each.grad.element_size() for each in parameters)
    moments = [each for state in steps.state.values() for name, each in state.items() if name != "step"]
    counted = sum(each.numel() * each.element_size() for each in moments)
    assert parts["moments"] == counted


def test_gpus_are_found_by_the_names_of_users() -> None:
    assert named_gpu("h100").memory == 80 * 10**9
    assert named_gpu("RTX-4090").peak == 165e12
    assert named_gpu("h100pcie").peak < named_gpu("h100").peak
    with pytest.raises(OptionError, match="--hardware names 'h1000', which is not known: name one of b200, h200"):
        named_gpu("h1000")


@pytest.mark.parametrize(
    ("sharding", "size", "processes", "expected"),
    [
        ("replicate", None, 8, Layout(8, 1)),
        ("full", None, 8, Layout(8, 8)),
        ("hybrid", None, 16, Layout(16, 8)),
        ("hybrid", 4, 16, Layout(16, 4)),
        ("hybrid", 8, 4, Layout(4, 4)),
        ("full", None, 1, Layout(1, 1)),
        ("auto", None, 8, Layout(8, 1)),
    ],
)
def test_layouts(sharding: Any, size: int | None, processes: int, expected: Layout) -> None:
    assert layout_of(sharding, size, processes, 8) == expected


def test_processes_that_can_not_be_divided_are_refused() -> None:
    with pytest.raises(LaunchError, match="shard_size of 8, and the run has 12 processes: choose a divisor of 12"):
        layout_of("hybrid", 8, 12, 8)
    with pytest.raises(RecipeError, match="shard_size is 8 and sharding is full: set sharding to hybrid"):
        make_recipe(BASE | {"sharding": "full", "shard_size": 8})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with student_home(tmp_path_factory.mktemp("dry")) as folder:
        yield folder


def test_a_dry_run_writes_nothing_and_adds_up(home: Path, tmp_path: Path) -> None:
    path = recipe(home, tmp_path / "run", teacher=str(DEMO), sharding="hybrid", shard_size=2)
    found = dry_run(path, [], Hardware(gpus=4, gpu=named_gpu("a100")))
    assert (found.gpus, found.shards, found.steps, found.samples_per_step, found.micro_batches) == (4, 2, 6, 2, 1)
    assert found.tokens_needed == 6 * 64
    assert found.memory["weights"] == 4 * found.parameters["all"] // 2
    assert found.hours == pytest.approx(6 * found.flops.total / (4 * 312e12 * 0.35 * 3600))
    assert found.fits is True
    assert not (home / "cache").exists()
    assert not (tmp_path / "run").exists()
    assert dry_run(path, [], Hardware(gpus=4, memory=10**6)).fits is False


def test_the_command_line(home: Path, tmp_path: Path) -> None:
    path = recipe(home, tmp_path / "run", teacher=str(DEMO))
    command = ["uptrain", str(path), "sharding=full", "--dry-run", "--hardware", "8xh100"]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    for words in (
        "each parameter over 8 of 8 GPU(s)",
        "memory per GPU",
        "under 0.1 hours at 35% of the peak",
        "tokens are needed",
    ):
        assert words in shown.stdout
    stated = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert stated["memory_needed"] == sum(stated["memory"].values())


def test_options_of_a_dry_run_need_it(home: Path, tmp_path: Path) -> None:
    path = recipe(home, tmp_path / "run")
    found = CliRunner().invoke(app, ["uptrain", str(path), "--hardware", "8x80GiB"])
    assert isinstance(found.exception, OptionError)
    assert str(found.exception) == "--hardware describes GPUs to estimate for: add --dry-run, or remove --hardware"
