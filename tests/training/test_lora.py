"""Adapters: what they train, what a checkpoint holds, how a run resumes, and that merging changes
nothing.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gqa_convert.errors import GQAConvertError, LaunchError, MissingExtraError
from gqa_convert.losses.output_layer import restore_output_layer
from gqa_convert.training import models as adapters
from gqa_convert.training import run as running
from gqa_convert.training.export import merged_model
from gqa_convert.training.recipe import make_recipe
from tests.helpers.uptrain_runs import (
    DEMO,
    in_float32,
    leftovers,
    losses,
    make_student,
    run,
    weights,
)

IDS = torch.arange(24).reshape(2, 12)
KEYS: dict[str, Any] = {
    "lora": {"rank": 4},
    "schedule": "constant",
    "warmup_steps": 0,
    "tokens": 256,
}
"""Four steps."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_student(tmp_path_factory.mktemp("home"))
    in_float32(folder / "student")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


class Trained:
    """A finished run, and the model with adapters at its end."""

    def __init__(self, home: Path, output: Path, **keys: Any) -> None:
        self.output = output

        def keeping(model: Any, folder: Path) -> Any:
            self.model = model
            return merged_model(model, folder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running, "merged_model", keeping)
            self.summary = run(home, output, **KEYS | keys)

    def saved(self) -> set[str]:
        """The names of the tensors in the newest checkpoint."""
        from torch.distributed.checkpoint import FileSystemReader

        newest = max((self.output / "checkpoints").glob("step-*"))
        return {
            name.removeprefix("model.")
            for name in FileSystemReader(newest).read_metadata().state_dict_metadata
        }


@pytest.fixture(scope="module")
def trained(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(home, tmp_path_factory.mktemp("trained") / "run")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits  # type: ignore[no-any-return]


def start_of(home: Path) -> dict[str, torch.Tensor]:
    return load_file(home / "student" / "model.safetensors")


def test_only_adapters_change_and_are_saved(home: Path, trained: Trained) -> None:
    before = start_of(home)
    for name, parameter in trained.model.named_parameters():
        if "lora_" not in name:
            torch.testing.assert_close(
                parameter, before[name.replace(".base_layer", "")], rtol=0, atol=0
            )
    own = {name for name, each in trained.model.named_parameters() if each.requires_grad}
    assert own
    tensors = trained.saved()
    assert own <= tensors
    assert all("lora_" in name or "param_groups" in name for name in tensors)


def test_the_merged_checkpoint_computes_the_same(home: Path, trained: Trained) -> None:
    merged = AutoModelForCausalLM.from_pretrained(trained.output / "model")
    restore_output_layer(trained.model)
    torch.testing.assert_close(logits(merged), logits(trained.model), rtol=1e-4, atol=1e-4)
    before, after = start_of(home), load_file(trained.output / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "proj" in name}
    assert {name: each.dtype for name, each in before.items()} == {
        name: each.dtype for name, each in after.items()
    }
    record = json.loads((trained.output / "model" / "gqa_conversion.json").read_text())[
        "uptraining"
    ][-1]
    assert trained.summary["adapters"] == record["adapters"] == "LoRA of rank 4"


def test_a_resumed_run_is_the_unbroken_one(home: Path, trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(home, output, **KEYS | {"tokens": 128})
    run(home, output, **KEYS)
    assert weights(output) == weights(trained.output)
    assert losses(output) == losses(trained.output)
    assert leftovers(output) == []


def test_the_teacher_shares_what_is_the_same(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses are those with a teacher of its own weights, bit for bit."""
    teacher = shutil.copytree(DEMO, tmp_path / "teacher")
    in_float32(teacher)
    keys = KEYS | {"teacher": str(teacher), "distillation_weight": 0.5}
    shares: list[float] = []
    own: set[str] = set()

    def sharing(teacher: Any, student: Any) -> float:
        shares.append(adapters.share_weights(teacher, student))
        fixed = {id(each) for each in student.parameters() if not each.requires_grad}
        own.update(name for name, each in teacher.named_parameters() if id(each) not in fixed)
        return shares[0]

    monkeypatch.setattr(running, "share_weights", sharing)
    run(home, tmp_path / "shared", **keys)
    assert 0.5 < shares[0] < 1
    assert {name.split(".")[-2] for name in own} == {"k_proj", "v_proj"}
    monkeypatch.setattr(running, "share_weights", lambda *_: 0.0)
    run(home, tmp_path / "apart", **keys)
    assert losses(tmp_path / "shared") == losses(tmp_path / "apart")


def test_weights_in_four_bits(home: Path, tmp_path: Path) -> None:
    """The adapters are merged into the weights as they were before they were rounded, and a run
    resumes.
    """
    keys = {"lora": {"rank": 4, "quantize": "nf4"}, "tokens": 128, "teacher": None}
    whole = Trained(home, tmp_path / "whole", **keys)
    assert any(type(module).__name__ == "Linear4bit" for module in whole.model.modules())
    assert all("lora_" in name or "param_groups" in name for name in whole.saved())
    before, after = start_of(home), load_file(tmp_path / "whole" / "model" / "model.safetensors")
    for name, tensor in before.items():
        module = name.removesuffix(".weight")
        expected = tensor
        if "lm_head" not in name and "_proj" in name:
            expected = tensor + whole.model.get_submodule(module).get_delta_weight("default")
        torch.testing.assert_close(
            after[name], expected.detach(), rtol=0, atol=0 if expected is tensor else 1e-6
        )
    Trained(home, tmp_path / "parts", **keys | {"tokens": 64})
    Trained(home, tmp_path / "parts", **keys)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    ("missing", "sharded", "error", "message"),
    [
        ("peft", False, MissingExtraError, r"gqa-convert\[lora\]"),
        ("bitsandbytes", False, MissingExtraError, r"gqa-convert\[qlora\]"),
        (None, True, LaunchError, "multi_gpu.yaml"),
    ],
)
def test_what_adapters_need(
    missing: str | None,
    sharded: bool,
    error: type[GQAConvertError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == missing else object()
    )
    stated = make_recipe(
        {"model": "m", "output": "o", "data": "d", "tokens": 10**6, "lora": {"quantize": "nf4"}}
    )

    def begin() -> None:
        adapters.check_lora(stated.lora, sharded=sharded)
        adapters.loading_options(stated, sharded=sharded)

    with pytest.raises(error, match=message):
        begin()
