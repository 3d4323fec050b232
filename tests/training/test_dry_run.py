"""Estimates of a run, against what torch counts on small models."""

import gc
import json
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from gqa_convert.cli import app
from gqa_convert.errors import LaunchError, OptionError, RecipeError
from gqa_convert.training import memory
from gqa_convert.training.architecture import Architecture, read_architecture
from gqa_convert.training.communication import Collective
from gqa_convert.training.dry_run import Hardware, dry_run
from gqa_convert.training.flops import _forward, sample_flops
from gqa_convert.training.gpus import find_gpu, named_gpu
from gqa_convert.training.masks import model_inputs
from gqa_convert.training.memory import Setting
from gqa_convert.training.optimizers import build_optimizer, choose_trained
from gqa_convert.training.recipe import make_recipe
from gqa_convert.training.recomputation import recompute
from gqa_convert.training.sharding import Layout, layout_of
from tests.helpers.distributed_steps import BASE, VOCABULARY, small_model
from tests.helpers.uptrain_runs import DEMO, recipe, student_home

LENGTH, TARGET = 16, 8


class LiveBytes:
    """Counts the bytes that are allocated inside it and not freed. Nothing from before may be freed inside: garbage is
    collected first and then left alone, and the caller drops what a name inside holds.
    """

    def __enter__(self) -> Self:
        gc.collect()
        gc.disable()
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=False
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._profile.__exit__(None, None, None)
        gc.enable()
        self.kept = sum(event.self_cpu_memory_usage for event in self._profile.key_averages())


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


def test_every_second_layer_is_recomputed_with_the_same_gradients() -> None:
    """Bit for bit, with the operations and the saved bytes between those of none and of all."""
    found = []
    for interval in (None, 2, 1):
        model, sample, sizes = prepared("llama")
        if interval is not None:
            recompute(model, interval)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with FlopCounterMode(display=False) as counter:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                logits = model(**sample, use_cache=False).logits
            logits.float().square().sum().backward()
        keys = {} if interval is None else {"gradient_checkpointing": True, "checkpointing_interval": interval}
        planned = setting(model, "llama", **keys)
        assert sample_flops(sizes, planned).total == counter.get_total_flops()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append((gradients, sum(kept.values()), memory.plan(sizes, planned)["activations"]))
    for gradients, _, _ in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(gradients, found[0][0], strict=True))
    for place in (1, 2):  # as counted, and as planned
        none, half, every = (each[place] for each in found)
        assert none > half > every
    assert memory.recomputed_layers(sizes, planned) == 3


@pytest.mark.parametrize("kind", MODELS)
def test_results_of_operators_are_kept_with_the_same_gradients(kind: str) -> None:
    """Bit for bit, without repeating a product with a weight, and with saved bytes between those of all and of none."""
    found = []
    for policy in (None, "operators", "layers"):
        model, sample, sizes = prepared(kind)
        if policy is not None:
            recompute(model, 1, policy)  # type: ignore[arg-type]
        with FlopCounterMode(display=False) as counter:
            with LiveBytes() as alive:
                logits = model(**sample, use_cache=False).logits
            logits.float().square().sum().backward()
        del logits
        keys = {} if policy is None else {"gradient_checkpointing": True, "checkpointing_policy": policy}
        planned = setting(model, kind, **keys)
        # the plan of a Llama counts on fused attention, and what is run here computes its scores again
        eager = 0 if policy != "operators" or sizes.scores else _forward(sizes, planned).attention
        assert sample_flops(sizes, planned).total + eager == counter.get_total_flops()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append((gradients, alive.kept, memory.plan(sizes, planned)["activations"]))
    for gradients, _, _ in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(gradients, found[0][0], strict=True) if pair[0] is not None)
    none, operators, layers = (each[1] for each in found)
    assert none > operators > layers
    if kind == "llama":  # of a size at which the layer that is being recomputed does not weigh most
        large = Architecture(
            layers=32, hidden_size=4096, heads=32, kv_heads=8, head_dim=128, inner=11008, vocabulary=32000
        )
        bytes_of = [
            memory.plan(large, Setting(parameters=10**9, trained=10**9, sequence_length=4096, **keys))["activations"]
            for keys in (
                {},
                {"gradient_checkpointing": True, "keeps_operators": True},
                {"gradient_checkpointing": True},
            )
        ]
        assert bytes_of[0] > 1.5 * bytes_of[1] > 3 * bytes_of[2]


def test_the_results_of_operators_are_counted() -> None:
    """What they add to the inputs of layers, in float32: as planned, but for the logsumexp of attention."""
    sizes, kept, planned = None, [], []
    for policy in ("layers", "operators"):
        model, sample, sizes = prepared("llama")
        model.set_attn_implementation("sdpa")
        recompute(model, 1, policy)  # type: ignore[arg-type]
        with LiveBytes() as alive:
            logits = model(**sample, use_cache=False).logits
        kept.append(alive.kept)
        del logits
        keys = {"gradient_checkpointing": True, "checkpointing_policy": policy}
        planned.append(memory.plan(sizes, setting(model, "llama", **keys))["activations"])
    assert sizes is not None
    logsumexp = 4 * sizes.layers * sizes.heads * LENGTH
    assert kept[1] - kept[0] == pytest.approx(planned[1] - planned[0] + logsumexp, rel=0.05)


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


def test_an_interval_needs_recomputation_and_layers() -> None:
    with pytest.raises(RecipeError, match="checkpointing_interval is 2 and gradient_checkpointing is false"):
        make_recipe(BASE | {"checkpointing_interval": 2})
    model = small_model("llama")
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(RecipeError, match="LlamaForCausalLM recomputes all layers or none"):
        recompute(model, 2)


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


def test_sent_bytes_are_those_of_a_ring() -> None:
    assert Collective("all-gather", "weights", 4, 1, 400).sent == 300
    assert Collective("all-reduce", "gradients", 4, 1, 400).sent == 600


def test_gpus_are_found_by_the_names_of_drivers_and_users() -> None:
    assert named_gpu("h100").memory == 80 * 10**9
    assert named_gpu("RTX-4090") == find_gpu("NVIDIA GeForce RTX 4090")
    assert (
        find_gpu("NVIDIA H100 PCIe") == named_gpu("h100pcie") != named_gpu("h100") == find_gpu("NVIDIA H100 80GB HBM3")
    )
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
    assert [text.bytes for text in found.text] == [(home / "text.txt").stat().st_size]
    assert not (home / "cache").exists()
    assert not (tmp_path / "run").exists()
    assert dry_run(path, [], Hardware(gpus=4, memory=10**6)).fits is False


def test_tokens_on_disk_are_counted_once_they_are_there(home: Path, tmp_path: Path) -> None:
    from gqa_convert.training.tokenizing import tokenize_recipe

    path = recipe(home, tmp_path / "run")
    assert dry_run(path, [], Hardware(gpus=1)).text[0].tokens is None
    made = tokenize_recipe(path, processes=1)
    found = dry_run(path, [], Hardware(gpus=1))
    assert found.text[0].tokens == made.sources[0].tokens
    assert found.epochs == (pytest.approx(6 * 64 / found.text[0].tokens),)
    assert (found.hours, found.collectives) == (None, ())


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
    assert {each["kind"] for each in stated["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}


def test_options_of_a_dry_run_need_it(home: Path, tmp_path: Path) -> None:
    path = recipe(home, tmp_path / "run")
    found = CliRunner().invoke(app, ["uptrain", str(path), "--hardware", "8x80GiB"])
    assert isinstance(found.exception, OptionError)
    assert str(found.exception) == "--hardware describes GPUs to estimate for: add --dry-run, or remove --hardware"
