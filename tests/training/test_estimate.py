"""Estimates of a run, against what torch counts on small models and against what a run takes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from gqa_convert.cli import app
from gqa_convert.families.loading import load_model
from gqa_convert.training.estimate import Estimate, Hardware, estimate, named_gpus
from gqa_convert.training.optimizers import build_optimizer
from gqa_convert.training.recipe_files import read_recipe
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
    return estimate(recipe(home, output, **keys), [], Hardware(1))


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


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_bytes_of_weights_gradients_and_moments_are_those_of_tensors(
    home: Path, optimizer: str, tmp_path: Path
) -> None:
    path = recipe(home, tmp_path / "run", optimizer=optimizer, sharding="full")
    alone, shared = (estimate(path, [], Hardware(gpus)).memory for gpus in (1, 2))
    model, _ = load_model(home / "student", torch.float32)
    steps = build_optimizer(model, read_recipe(path))
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    steps.step()
    sizes = {
        "weights": sum(each.nbytes for each in model.parameters()),
        "gradients": sum(each.grad.nbytes for each in model.parameters()),
        "moments": sum(each.nbytes for state in steps.state.values() for name, each in state.items() if name != "step"),
    }
    for name, size in sizes.items():
        assert alone[name] == size
        assert shared[name] == size / 2
    assert "gathered layers" in shared.keys() - alone.keys()


_LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
_7B: dict[str, Any] = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_13B: dict[str, Any] = _LLAMA | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}
_PLAIN: dict[str, Any] = {"hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 2048}
_OPT: dict[str, Any] = _PLAIN | {
    "vocab_size": 50272,
    "ffn_dim": 8192,
    "num_attention_heads": 32,
    "word_embed_proj_dim": 2048,
}
_NEOX: dict[str, Any] = _PLAIN | {
    "vocab_size": 50304,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "hidden_act": "gelu",
}


def _t5(model_type: str, d_model: int, d_ff: int, heads: int) -> dict[str, Any]:
    sizes = {"d_model": d_model, "d_kv": 64, "d_ff": d_ff, "num_layers": 24, "num_heads": heads, "vocab_size": 32128}
    stated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "is_encoder_decoder": True}
    return {"model_type": model_type, "num_key_value_heads": 8, **sizes, **stated}


KNOWN: dict[str, tuple[dict[str, Any], dict[str, Any] | None, int]] = {
    "llama-2-7b-gqa8": (_7B | {"num_key_value_heads": 8}, _7B, 8),
    "llama-2-7b-gqa8-qlora": (_7B | {"num_key_value_heads": 8}, _7B, 1),
    "llama-2-13b-gqa8": (_13B | {"num_key_value_heads": 8}, _13B, 8),
    "opt-1.3b-gqa8": (_OPT | {"model_type": "gqa_opt", "num_key_value_heads": 8}, _OPT | {"model_type": "opt"}, 1),
    "pythia-1.4b-gqa4": (
        _NEOX | {"model_type": "phi", "num_key_value_heads": 4, "partial_rotary_factor": 0.25},
        _NEOX | {"model_type": "gpt_neox", "rotary_pct": 0.25},
        1,
    ),
    "t5-large-gqa8": (_t5("gqa_t5", 1024, 2816, 16), None, 8),
    "t5-xxl-gqa8": (_t5("gqa_t5", 4096, 10240, 64), None, 8),
    "flan-t5-xl-gqa8": (_t5("gqa_t5", 2048, 5120, 32), _t5("t5", 2048, 5120, 32), 8),
}
"""Of each shipped recipe that was not run: the configs of its models, and the GPUs that it names."""


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_recipes_state_the_memory_and_the_time_that_are_estimated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (student, teacher, gpus) = ROOT / "recipes" / f"{name}.yaml", KNOWN[name]
    text, tokenizer = path.read_text(encoding="utf-8"), span_tokenizer()
    stated = read_recipe(path)
    folders = {stated.model: student} | ({} if teacher is None else {stated.teacher: teacher})

    def opened(source: str, **_: Any) -> Any:
        folder = tmp_path / source.replace("/", "-")
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(folders[source]))
        return SimpleNamespace(folder=folder, config=folders[source])

    monkeypatch.setattr("gqa_convert.training.estimate.open_checkpoint", opened)
    found = estimate(path, [], named_gpus(gpus, "h100"))
    memory = re.search(r"^# memory +([\d.]+) GB (?:each )?\(estimate\)", text, re.MULTILINE)
    time = re.search(r"^# time +([\d.]+) (hours|days) on H100 \(estimate: ([\d.]+e\d+) floating", text, re.MULTILINE)
    assert memory is not None
    assert time is not None
    assert float(memory[1]) * 1e9 == pytest.approx(found.memory_needed, rel=0.1)
    assert float(time[1]) * {"hours": 1, "days": 24}[time[2]] == pytest.approx(found.hours, rel=0.12)
    assert float(time[3]) == pytest.approx(found.flops * found.steps, rel=0.05)
    assert (found.shards > 1) == ("fsdp2.yaml" in text)
    assert found.memory_needed < 72e9  # what a GPU with 80 GB has, with a tenth for what is not counted


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
