"""Runs of a few steps with every objective and option, against transformers' own losses and against
one another.
"""

import hashlib
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.tracking
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.errors import (
    CorruptCheckpointError,
    DataError,
    DeviceMemoryError,
    MissingExtraError,
    OutputError,
    RecipeError,
)
from gqa_convert.families.loading import load_model
from gqa_convert.losses import distillation
from gqa_convert.training import trainer
from gqa_convert.training.trainer import Trainer
from tests.helpers import seq2seq
from tests.helpers.data_helpers import open_samples, span_tokenizer
from tests.helpers.largest import LargestWith
from tests.helpers.tiny import make_checkpoint
from tests.helpers.uptrain_runs import (
    DEMO,
    STEPS,
    in_float32,
    leftovers,
    losses,
    metrics,
    run,
    student_home,
    weights,
)
from tests.helpers.verification import save_tokenizer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with student_home(tmp_path_factory.mktemp("home")) as folder:
        yield folder


@pytest.fixture(scope="module")
def t5(home: Path) -> Path:
    """A tiny T5 with 4 K/V heads, its source, and words to train it on."""
    seq2seq.model(home / "t5", "t5", span_tokenizer())
    convert_checkpoint(home / "t5", home / "t5-gqa", 4, ConversionOptions(method="mean"))
    rng = np.random.default_rng(0)
    (home / "words.txt").write_text(
        "\n".join(" ".join(f"w{n}" for n in rng.integers(0, 500, 40)) for _ in range(100))
    )
    return home / "t5-gqa"


def test_the_files_of_a_run(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    summary = run(
        home,
        output,
        evaluation_data=str(home / "other.txt"),
        evaluation_tokens=256,
        evaluate_every=3,
        tokens=None,
        alpha=0.1,
        pretraining_tokens=3840,
        teacher=str(DEMO),
        distillation_weight=0.0,
    )
    assert {path.name for path in output.iterdir()} == {
        ".lock",
        "checkpoints",
        "metrics.jsonl",
        "model",
        "resolved_recipe.yaml",
        "summary.json",
    }
    assert leftovers(output) == []
    lines = metrics(output)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in lines] == [64, 128, 192, 256, 320, 384]
    assert all({"loss", "learning_rate", "gradient_norm"} <= line.keys() for line in lines)
    assert [line["step"] for line in lines if "evaluation_loss" in line] == [3, 6]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert json.loads((output / "summary.json").read_text()) == summary
    assert (summary["kind"], summary["command"], summary["processes"]) == ("uptrain", None, 1)
    assert summary["machine"]["versions"]["torch"] == torch.__version__
    found = summary["evaluation"]
    assert found["source"] < found["final"] < found["start"]
    assert found["final"] == lines[-1]["evaluation_loss"]
    assert found["recovered_share"] == pytest.approx(
        (found["start"] - found["final"]) / (found["start"] - found["source"])
    )
    assert (summary["alpha"], summary["final_loss"], summary["steps"]) == (
        0.1,
        lines[-1]["loss"],
        STEPS,
    )


def test_the_model_is_an_ordinary_checkpoint(home: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    # at the usual 1e-3 six steps are half a unit of bfloat16 for gains near 2, and rounding may
    # hide them
    run(home, tmp_path / "run", learning_rate=1e-2)
    student, made = home / "student", tmp_path / "run" / "model"
    for path in student.iterdir():
        if path.name not in ("model.safetensors", "gqa_conversion.json"):
            assert (made / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in made.iterdir()} == {path.name for path in student.iterdir()}
    with (
        safe_open(student / "model.safetensors", "pt") as before,
        safe_open(made / "model.safetensors", "pt") as after,
    ):
        assert set(before.keys()) == set(after.keys())
        for name in before.keys():  # noqa: SIM118
            old, new = before.get_tensor(name), after.get_tensor(name)
            assert (old.dtype, old.shape) == (new.dtype, new.shape)
            assert not torch.equal(old, new), name
    model = AutoModelForCausalLM.from_pretrained(made)
    assert AutoTokenizer.from_pretrained(made)("hello").input_ids
    assert model.config.num_key_value_heads == 3
    record = json.loads((made / "gqa_conversion.json").read_text())
    assert (record["uptraining_tokens"], record["kv_heads"]) == (384, 3)
    assert record["uptraining"][0]["recipe"]["learning_rate"] == 1e-2
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in made.iterdir())

    run(home, tmp_path / "second", model=str(made), tokens=64, save_every=1)
    again = json.loads((tmp_path / "second" / "model" / "gqa_conversion.json").read_text())
    assert (again["uptraining_tokens"], [each["tokens"] for each in again["uptraining"]]) == (
        448,
        [384, 64],
    )
    for folder, written in ((made, record), (tmp_path / "second" / "model", again)):
        raw = (folder / "model.safetensors").read_bytes()
        assert written["written"]["model.safetensors"] == {
            "bytes": len(raw),
            "sha256": hashlib.sha256(raw).hexdigest(),
        }


def test_exports_on_the_way_are_the_results_of_shorter_runs(home: Path, tmp_path: Path) -> None:
    """Also where a run was stopped before an export, and resumes."""
    keys: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0, "save_every": 1}
    long, short = tmp_path / "long", tmp_path / "short"
    run(home, long, **keys, export_every=2, tokens=64)
    run(home, long, **keys, export_every=2)
    assert sorted(path.name for path in long.glob("model*")) == [
        "model",
        "model-000002",
        "model-000004",
    ]
    for steps in (2, 4, 6):
        run(home, short, **keys, tokens=steps * 64)
        exported = long / (f"model-{steps:06}" if steps < STEPS else "model")
        for path in (short / "model").iterdir():
            if path.name != "gqa_conversion.json":
                assert (exported / path.name).read_bytes() == path.read_bytes(), path.name
        record = json.loads((exported / "gqa_conversion.json").read_text())
        assert record["uptraining_tokens"] == steps * 64
    assert not leftovers(long)


def test_a_broken_record_of_the_conversion_is_found_before_training(
    home: Path, tmp_path: Path
) -> None:
    student = shutil.copytree(home / "student", tmp_path / "student")
    (student / "gqa_conversion.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"gqa_conversion\.json"):
        run(home, tmp_path / "run", model=str(student))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_loss_is_that_of_transformers(home: Path, tmp_path: Path) -> None:
    """On the same tokens; the first step's, before any change."""

    run(home, tmp_path / "run", tokens=64)
    tokenizer = AutoTokenizer.from_pretrained(home / "student")
    samples = open_samples(
        [str(home / "text.txt")], tokenizer, objective="causal", sequence_length=32
    )
    batch = samples.batch([0, 1])
    whole = torch.from_numpy(np.concatenate([batch["input_ids"], batch["labels"][:, -1:]], axis=1))
    model, _ = load_model(home / "student", torch.float32)
    with torch.no_grad():
        expected = model(input_ids=whole, labels=whole).loss.item()
    assert losses(tmp_path / "run") == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("place", ["data", "evaluation_data", "teacher"])
def test_tokens_beyond_the_embeddings_are_refused(home: Path, tmp_path: Path, place: str) -> None:
    """Those of the text: many tokenizers know tokens that no text has, and no embedding stands
    for.
    """
    few = tmp_path / "few.txt"
    few.write_text("()" * 200)
    tokenizer = AutoTokenizer.from_pretrained(home / "student")
    tokenizer.add_tokens(["a token that no text has"])
    largest = max(max(tokenizer(few.read_text())["input_ids"]), tokenizer.eos_token_id)
    model, _ = load_model(home / "student", torch.float32)
    model.resize_token_embeddings(largest + 1)
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "small")
    keys = {"model": str(tmp_path / "small"), "data": str(few), "tokens": 64}
    run(home, tmp_path / "fits", **keys, evaluation_data=str(few))
    model.resize_token_embeddings(largest)
    model.save_pretrained(tmp_path / "smaller")
    tokenizer.save_pretrained(tmp_path / "smaller")
    with pytest.raises(
        DataError,
        match=rf"smaller produces token {largest}, and the model has a vocabulary of {largest}:",
    ):
        run(home, tmp_path / "run", **keys | {"model": str(tmp_path / "smaller")})
    if place == "teacher":
        keys |= {
            "model": str(home / "student"),
            "teacher": str(tmp_path / "small"),
            "data": str(home / "text.txt"),
        }
        tokenizer.save_pretrained(shutil.copytree(home / "student", tmp_path / "student"))
        keys["model"] = str(tmp_path / "student")
    else:
        keys[place] = str(home / "text.txt")
    with pytest.raises(
        DataError,
        match=rf"small produces token \d+, and the model has a vocabulary of {largest + 1}:",
    ):
        run(home, tmp_path / "run", **keys)
    assert not (tmp_path / "run").exists()


def test_micro_batches_do_not_matter(home: Path, tmp_path: Path) -> None:
    """A short last one (5 = 2 + 2 + 1 = 4 + 1) counts by its tokens; the last block of an epoch
    overlaps the first one, and learns less.
    """
    text = tmp_path / "short.txt"
    text.write_text((home / "text.txt").read_text()[:500])
    keys = {"data": str(text), "tokens_per_step": 160, "tokens": 480, "learning_rate": 1e-4}
    expected: list[float] = []
    for size in (1, 2, 4):
        output = tmp_path / f"micro-{size}"
        run(home, output, **keys, micro_batch_size=size)
        expected = expected or losses(output)
        assert losses(output) == pytest.approx(expected, rel=2e-5)
    assert len(expected) == 3


def test_a_student_that_is_its_teacher_learns_nothing(home: Path, tmp_path: Path) -> None:
    student = shutil.copytree(home / "student", tmp_path / "student")
    in_float32(student)
    (tmp_path / "teacher").symlink_to(student)
    run(home, tmp_path / "run", model=str(student), teacher=str(tmp_path / "teacher"))
    for line in metrics(tmp_path / "run"):
        assert line["loss"] == line["kl"] == pytest.approx(0, abs=1e-6)
        assert line["gradient_norm"] < 1e-6
    before, _ = load_model(student, torch.float32)
    after, _ = load_model(tmp_path / "run" / "model", torch.float32)
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(old, new), name


OPTIONS: dict[str, dict[str, Any]] = {
    "span corruption": {
        "model": "t5-gqa",
        "data": "words.txt",
        "optimizer": "adafactor",
        "gradient_clipping": None,
    },
    "sources": {
        "data": [{"source": "text.txt", "weight": 3}, {"source": "other.txt"}],
        "teacher": str(DEMO),
    },
    "documents apart": {"document_masks": True, "teacher": str(DEMO), "micro_batch_size": 2},
    "compiled": {"compile": True, "teacher": str(DEMO), "gradient_checkpointing": True},
    "all at once": {
        "teacher": str(DEMO),
        "distillation_weight": 0.5,
        "gradient_checkpointing": True,
        "precision": "bf16",
        "schedule": "wsd",
        "weight_decay": 0.1,
        "micro_batch_size": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.usefixtures("t5")
def test_an_option_trains_and_resumes_bit_for_bit(
    home: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    keys = {"warmup_steps": 1, "schedule": "constant", **OPTIONS[name]}
    if keys["schedule"] == "constant":
        run(home, tmp_path / "run", **keys, tokens=128)
    run(home, tmp_path / "run", **keys, tokens=256)
    run(home, tmp_path / "whole", **keys, tokens=256)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    lines = metrics(tmp_path / "run")
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert ("kl" in lines[0]) == ("teacher" in keys)
    assert ("lm" in lines[0]) == (
        keys.get("distillation_weight") is not None or "teacher" not in keys
    )


@pytest.mark.slow
def test_compiled_layers_compute_the_same(home: Path, tmp_path: Path) -> None:
    torch._dynamo.reset()
    run(home, tmp_path / "plain", tokens=192)
    compiled = torch._dynamo.utils.counters["stats"]
    before = compiled["unique_graphs"]
    run(home, tmp_path / "compiled", tokens=192, compile=True)
    assert compiled["unique_graphs"] > before
    plain, found = metrics(tmp_path / "plain"), metrics(tmp_path / "compiled")
    for line, other in zip(plain, found, strict=True):
        assert line == pytest.approx(other, rel=1e-4)


def test_mistakes_are_found_before_anything_is_trained(
    home: Path, t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        RecipeError, match=r"objective is span_corruption.* is a decoder-only model"
    ):
        run(home, tmp_path / "run", objective="span_corruption")
    with pytest.raises(RecipeError, match=r"objective is causal.* is an encoder-decoder"):
        run(home, tmp_path / "run", model=str(t5), objective="causal")
    with pytest.raises(
        RecipeError, match="document_masks is true and objective is span_corruption"
    ):
        run(home, tmp_path / "run", model=str(t5), document_masks=True)
    with pytest.raises(
        RecipeError, match=r"sequence_length is 1000000 .* has positions for \d+: lower it"
    ):
        run(
            home,
            tmp_path / "run",
            sequence_length=1_000_000,
            tokens_per_step=1_000_000,
            tokens=1_000_000,
        )
    with pytest.raises(
        RecipeError, match="is an encoder-decoder and the other is not: name the source of model"
    ):
        run(home, tmp_path / "run", teacher=str(t5))
    other = make_checkpoint("llama", tmp_path / "other")
    save_tokenizer(other)
    with pytest.raises(
        RecipeError, match="distillation needs a teacher with the student's vocabulary"
    ):
        run(home, tmp_path / "run", teacher=str(other))
    with pytest.raises(OutputError, match=r"config\.json exists and was not written by a run"):
        run(home, other)
    missing = next(
        name for name in ("aim", "swanlab", "clearml") if importlib.util.find_spec(name) is None
    )
    with pytest.raises(
        MissingExtraError,
        match=f"trackers names {missing}, which is not installed: pip install {missing}",
    ):
        run(home, tmp_path / "run", trackers=[missing])
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((home / "student" / name).read_bytes())
    with pytest.raises(
        CorruptCheckpointError, match=r"the tokenizer of .*bare can't be loaded by transformers"
    ):
        run(home, tmp_path / "run", model=str(bare))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "loss", full)
    with pytest.raises(DeviceMemoryError, match="out of memory: lower micro_batch_size"):
        run(home, tmp_path / "run")


def test_steps_are_those_of_whole_logits(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training and in evaluation, of the student and of the teacher, no logits of a whole
    micro-batch are made.
    """
    keys: dict[str, Any] = {
        "tokens": 2 * 64,
        "micro_batch_size": 2,
        "evaluation_data": str(home / "other.txt"),
    }
    keys |= {"teacher": str(DEMO), "distillation_weight": 0.6, "evaluate_every": 1, "z_loss": 1e-3}
    keys |= {"evaluation_tokens": 4 * 64}
    monkeypatch.setattr(distillation, "_POSITIONS", 24)
    with LargestWith(2048, 192) as largest:
        run(home, tmp_path / "parts", **keys)
    assert largest.rows == 24  # of the bundled model's logits
    monkeypatch.setattr(trainer, "remove_output_layer", lambda model, inputs: False)
    run(home, tmp_path / "whole", **keys)
    for found, expected in zip(
        metrics(tmp_path / "parts"), metrics(tmp_path / "whole"), strict=True
    ):
        assert found == pytest.approx(expected, rel=1e-4)


class Remembering(accelerate.tracking.GeneralTracker):
    """A tracker of accelerate's that keeps what it receives."""

    name = "wandb"
    requires_logging_directory = False
    tracker = None
    seen: list[tuple[int, dict[str, Any]]] = []  # noqa: RUF012
    opened: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, *_: Any, **options: Any) -> None:
        super().__init__()
        self.opened.append(options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int, **_: Any) -> None:
        self.seen.append((step, values))


def test_the_numbers_of_a_step_reach_a_tracker_which_knows_a_run_that_resumes(
    home: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("accelerate.accelerator.filter_trackers", lambda names, *_: names)
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", Remembering)
    for name, tokens in (("run", 64), ("run", 128), ("other", 64)):
        run(home, tmp_path / name, trackers=["wandb"], tokens=tokens, schedule="constant")
    first, again, other = Remembering.opened
    assert first == again == {"id": first["id"], "resume": "allow"}
    assert other["id"] != first["id"]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert Remembering.seen[:2] == [(line.pop("step"), line) for line in lines]
    assert [step for step, _ in Remembering.seen] == [1, 2, 1]
