"""What a run is said to need in memory: against the recipes, against what a run takes, and part by part."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gqa_convert.checkpoint.machine import available_memory
from gqa_convert.data.objectives import OBJECTIVES
from gqa_convert.data.span_corruption import shape_for
from gqa_convert.families.table import FAMILIES
from gqa_convert.training import memory
from gqa_convert.training.architecture import Architecture, read_architecture
from gqa_convert.training.dry_run import Hardware
from gqa_convert.training.flops import sample_flops
from gqa_convert.training.gpus import named_gpu
from gqa_convert.training.memory import Setting, plan
from gqa_convert.training.recipe import read_recipe
from gqa_convert.training.uptrain import uptrain_checkpoint
from tests.helpers.documents import ROOT, SHIPPED_RECIPES
from tests.helpers.heap import LARGE_TENSORS_MAPPED
from tests.helpers.uptrain_runs import DEMO, recipe, run, student_home

_LLAMA_2: dict[str, Any] = {"head_dim": 128, "vocabulary": 32000, "kv_heads": 8}
_PLAIN: dict[str, Any] = {"layers": 24, "hidden_size": 2048, "inner": 8192, "gated": False, "rms_norm": False}
_T5: dict[str, Any] = {
    "layers": 24,
    "encoder_layers": 24,
    "head_dim": 64,
    "kv_heads": 8,
    "vocabulary": 32128,
    "activation": "gelu_new",
    "scores": True,
}
# the models' own papers and configs; then the parameters that they are known to have, and the processes of the recipe
KNOWN: dict[str, tuple[Architecture, float, int]] = {
    "llama-2-7b-gqa8": (Architecture(layers=32, hidden_size=4096, heads=32, inner=11008, **_LLAMA_2), 6.74e9, 8),
    "llama-2-7b-gqa8-qlora": (Architecture(layers=32, hidden_size=4096, heads=32, inner=11008, **_LLAMA_2), 6.74e9, 1),
    "llama-2-13b-gqa8": (Architecture(layers=40, hidden_size=5120, heads=40, inner=13824, **_LLAMA_2), 13.02e9, 8),
    "pythia-1.4b-gqa4": (
        Architecture(heads=16, kv_heads=4, head_dim=128, vocabulary=50304, activation="gelu", **_PLAIN),
        1.41e9,
        1,
    ),
    "opt-1.3b-gqa8": (
        Architecture(heads=32, kv_heads=8, head_dim=64, vocabulary=50272, activation="relu", tied=True, **_PLAIN),
        1.32e9,
        1,
    ),
    "t5-large-gqa8": (Architecture(hidden_size=1024, heads=16, inner=2816, **_T5), 783e6, 8),
    "t5-xxl-gqa8": (Architecture(hidden_size=4096, heads=64, inner=10240, **_T5), 11.14e9, 8),
    "flan-t5-xl-gqa8": (Architecture(hidden_size=2048, heads=32, inner=5120, **_T5), 2.85e9, 8),
    "tiny": (
        Architecture(
            layers=5, hidden_size=192, heads=12, kv_heads=3, head_dim=32, inner=320, vocabulary=2048, tied=True
        ),
        2.79e6,
        1,
    ),
}


RAW: dict[str, Any] = {
    "causal": lambda read: read.sequence_length,
    "span_corruption": lambda read: shape_for(read.sequence_length).raw,
}
"""The tokens of text that a sample consumes."""


def parameters(sizes: Architecture, kv_heads: int) -> int:
    """All matrices, with as many K/V heads in the decoder."""
    wide = 2 * sizes.hidden_size * sizes.heads * sizes.head_dim
    grouped, whole = (2 * sizes.hidden_size * heads * sizes.head_dim for heads in (kv_heads, sizes.heads))
    inner = (3 if sizes.gated else 2) * sizes.hidden_size * sizes.inner
    attentions = 2 if sizes.encoder_layers else 1
    layers = sizes.layers * (attentions * (wide + grouped) + inner) + sizes.encoder_layers * (wide + whole + inner)
    return layers + sizes.outer_parameters


def test_every_recipe_is_planned() -> None:
    assert {path.stem for path in SHIPPED_RECIPES} == {*KNOWN}


@pytest.mark.parametrize("path", SHIPPED_RECIPES, ids=lambda path: path.stem)
def test_recipes_state_the_memory_and_the_time_that_are_planned(path: Path) -> None:
    read, text = read_recipe(path), path.read_text(encoding="utf-8")
    sizes, known, processes = KNOWN[path.stem]
    source = parameters(sizes, sizes.heads)
    assert source == pytest.approx(known, rel=0.01)
    count = parameters(sizes, sizes.kv_heads)
    objective = read.objective if read.objective != "auto" else "span_corruption" if sizes.encoder_layers else "causal"
    assert read.sequence_length is not None
    trained = count
    if read.lora is not None:  # on every linear layer of a Llama
        query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        sides = 2 * (sizes.hidden_size + query) + 2 * (sizes.hidden_size + key) + 3 * (sizes.hidden_size + sizes.inner)
        trained = sizes.layers * read.lora.rank * sides
    setting = memory.setting_of(
        read,
        parameters=count,
        trained=trained,
        adapters=0 if read.lora is None else trained,
        sequence_length=read.sequence_length,
        shards=processes if "fsdp2.yaml" in text else 1,
        target_length=OBJECTIVES[objective].target_length(read.sequence_length),
        teacher_parameters=source if read.teacher else 0,
        teacher_bytes=4 if "flan" in path.stem else 2,
        device="cpu" if path.stem == "tiny" else "cuda",
    )
    stated = re.search(r"^# memory +([\d.]+) GB (?:each )?\(estimate\)", text, re.MULTILINE)
    assert stated is not None
    total = sum(plan(sizes, setting).values())
    assert float(stated[1]) * memory.GB == pytest.approx(total, rel=0.15)
    hours = re.search(
        r"^# time +([\d.]+) (hours|days) on H100 \(estimate: ([\d.]+e\d+) floating-point", text, re.MULTILINE
    )
    if path.stem != "tiny":  # which was measured
        assert hours is not None
        taught = replace(sizes, kv_heads=sizes.heads) if read.teacher else None
        flops = sample_flops(sizes, setting, taught).times(read.samples_per_step(RAW[objective](read))).total
        flops *= read.steps(RAW[objective](read))
        assert float(hours[3]) == pytest.approx(flops, rel=0.05)
        planned = Hardware(gpus=processes, gpu=named_gpu("h100")).hours(flops)
        assert float(hours[1]) * {"hours": 1, "days": 24}[hours[2]] == pytest.approx(planned, rel=0.05)
    assert (read.sharding == "full") == ("fsdp2.yaml" in text)
    assert total < 72e9  # what a GPU with 80 GB has, with a tenth for what is not counted


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


LARGER = {"sequence_length": 512, "micro_batch_size": 8, "tokens_per_step": 4096, "tokens": 8192}
MEASURED: dict[str, dict[str, Any]] = {
    "distilled": {"teacher": str(DEMO)},  # 338 MB planned, 369 MB measured
    "bf16": {"precision": "bf16"},  # 244 and 278
    "checkpointed": {
        "gradient_checkpointing": True,
        "micro_batch_size": 16,
        "tokens_per_step": 8192,
        "tokens": 16384,
    },  # 178 and 206
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with student_home(tmp_path_factory.mktemp("home")) as folder:
        (folder / "text.txt").write_text((folder / "text.txt").read_text() * 4)
        yield folder


def measure(kind: str, home: Path, folder: Path) -> None:
    """Write the growth of this process during a run, in bytes, and the run's messages to found.json in `folder`."""
    run(home, folder / "imports everything", teacher=str(DEMO), tokens=64)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, messages = _status("VmRSS"), list[str]()
    path = recipe(home, folder / "run", **(LARGER | MEASURED[kind]))
    uptrain_checkpoint(path, [], on_message=messages.append)
    (folder / "found.json").write_text(json.dumps([_status("VmHWM") - before, messages]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEASURED)
def test_a_run_takes_about_what_is_planned(kind: str, home: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    # A fresh interpreter: a fork would serve the run from memory that earlier tests freed.
    code = f"from pathlib import Path\nfrom tests.training.test_memory import measure\nmeasure({kind!r}, Path({str(home)!r}), Path({str(tmp_path)!r}))"
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ | LARGE_TENSORS_MAPPED)
    growth, messages = json.loads(found.read_text())
    said = [message for message in messages if message.startswith("memory per process (estimate): ")]
    assert len(said) == 1
    stated = re.search(r": (\d+) MB", said[0])
    assert stated is not None
    assert 0.8 < growth / 1e6 / int(stated[1]) < 1.3


SIZES = KNOWN["llama-2-7b-gqa8"][0]
SETTING = Setting(parameters=6 * 10**9, trained=6 * 10**9, sequence_length=4096)


def test_what_lasts_is_exact() -> None:
    parts = plan(SIZES, SETTING)
    assert (parts["weights"], parts["gradients"], parts["moments"]) == (24 * 10**9, 24 * 10**9, 48 * 10**9)
    assert "teacher" not in parts
    assert "gathered layers" not in parts
    few = plan(SIZES, replace(SETTING, trained=10**9))
    assert (few["weights"], few["gradients"], few["moments"]) == (24 * 10**9, 4 * 10**9, 8 * 10**9)
    taught = plan(SIZES, replace(SETTING, teacher_parameters=7 * 10**9))
    assert taught["teacher"] == 14 * 10**9 + 2 * 1024 * 32000


def test_optimizers_differ_in_their_moments() -> None:
    moments = {name: plan(SIZES, replace(SETTING, optimizer=name))["moments"] for name in ("adamw", "adafactor")}
    assert moments["adafactor"] < 0.01 * moments["adamw"]


@pytest.mark.parametrize("vocabulary", [100, 128000])
def test_the_logits_are_gone_when_a_layer_is_recomputed(vocabulary: int) -> None:
    """So that the larger of the two counts."""
    sizes = replace(SIZES, vocabulary=vocabulary)
    plain = plan(sizes, replace(SETTING, bf16=False))
    recomputed = plan(sizes, replace(SETTING, bf16=False, gradient_checkpointing=True))
    inputs, layer = 4 * 4096 * 4096 * sizes.layers, plain["activations"] / sizes.layers
    assert recomputed["logits"] == plain["logits"]
    assert recomputed["activations"] + plain["logits"] == pytest.approx(inputs + max(layer, plain["logits"]))
    assert (layer > plain["logits"]) == (vocabulary == 100)
    taught = replace(SETTING, bf16=False, gradient_checkpointing=True, teacher_parameters=10**9)
    assert plan(sizes, taught)["activations"] <= recomputed["activations"]


@pytest.mark.parametrize("bf16", [True, False])
def test_what_saves_memory_does(bf16: bool) -> None:
    plain = replace(SETTING, bf16=bf16, teacher_parameters=10**9)
    total = sum(plan(SIZES, plain).values())
    assert sum(plan(SIZES, replace(plain, shards=8)).values()) < total
    assert sum(plan(SIZES, replace(plain, micro_batch_size=2)).values()) > total
    checkpointed = plan(SIZES, replace(plain, gradient_checkpointing=True))
    assert checkpointed["activations"] < plan(SIZES, plain)["activations"] / 5


@pytest.mark.parametrize("model_type", FAMILIES)
def test_configs_of_every_family_are_read_or_nothing_is_said(model_type: str) -> None:
    family = FAMILIES[model_type]
    config = {
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        family.heads_key: 4,
        "vocab_size": 99,
        "is_encoder_decoder": False,
    }
    if family.encoder:
        config |= {"num_layers": 2, "encoder_layers": 2}
    if family.head_dim_key:
        config[family.head_dim_key] = 16
    read = read_architecture(config)
    assert read is not None
    assert (read.layers, read.hidden_size, read.heads, read.head_dim, read.vocabulary) == (2, 64, 4, 16, 99)
    assert sum(plan(read, Setting(parameters=10**6, trained=10**6, sequence_length=32)).values()) > 16 * 10**6
    assert read_architecture(config | {"hidden_size": "wide"}) is None


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "none such"}, {"model_type": None}, {"model_type": ["llama"]}, {"model_type": {}}]
)
def test_nothing_is_said_of_unknown_types(config: dict[str, Any]) -> None:
    assert read_architecture(config) is None


def test_the_bundled_config_is_read() -> None:
    config = json.loads((ROOT / "gqa_convert" / "demo_checkpoint" / "config.json").read_text())
    assert read_architecture(config | {"num_key_value_heads": 3}) == KNOWN["tiny"][0]


def test_t5_is_read() -> None:
    config = {
        "model_type": "gqa_t5",
        "is_encoder_decoder": True,
        "d_model": 1024,
        "d_kv": 64,
        "d_ff": 2816,
        "num_layers": 24,
        "num_heads": 16,
        "num_decoder_layers": 24,
        "num_key_value_heads": 8,
        "feed_forward_proj": "gated-gelu",
        "vocab_size": 32128,
        "tie_word_embeddings": False,
    }
    assert read_architecture(config) == KNOWN["t5-large-gqa8"][0]


@pytest.mark.parametrize(
    ("objective", "length"),
    [("causal", 0), ("span_corruption", 114), ("pairs", 512)],
)
def test_lengths_of_targets(objective: str, length: int) -> None:
    assert OBJECTIVES[objective].target_length(512) == length


def test_what_is_free_is_said() -> None:
    cpu = torch.device("cpu")
    one, two = available_memory(cpu, 1), available_memory(cpu, 2)
    assert one is not None
    assert two is not None
    assert one > 1.5 * two > 0
    assert available_memory(SimpleNamespace(type="xpu"), 1) is None
    parts = {"weights": 3 * 10**9, "moments": 2 * 10**9, "logits": 10**6}
    assert memory.shown(parts, None) == "memory per process (estimate): 5.0 GB (weights 3.0 GB, moments 2.0 GB)"
    assert memory.shown(parts, 6 * 10**9).endswith("moments 2.0 GB), of 6.0 GB free")
    assert "more than the 4.0 GB that are free: if it fails, lower micro_batch_size" in memory.shown(parts, 4 * 10**9)
