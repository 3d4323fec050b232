"""What a run says before its first step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert.data.sampler import IGNORED
from gqa_convert.training import trainer
from gqa_convert.training.notes import fillers
from gqa_convert.training.uptrain import uptrain_checkpoint
from tests.helpers.uptrain_runs import recipe, student_home


class Numbers:
    """Samples that are their numbers."""

    def batch(self, numbers: range) -> dict[str, Any]:
        return {"labels": np.array(numbers) + 1}


@pytest.mark.parametrize(("processes", "size"), [(1, 3), (2, 1), (3, 2), (4, 3), (5, 1)])
def test_fillers_are_the_processes_with_a_batch_of_ignored_labels(
    monkeypatch: pytest.MonkeyPatch, processes: int, size: int
) -> None:
    monkeypatch.setattr(trainer, "started", lambda: processes)
    for samples in range(1, 14):
        found = 0
        for rank in range(processes):
            monkeypatch.setattr(trainer, "rank", lambda rank=rank: rank)
            run = object.__new__(trainer.Trainer)
            run.recipe = type("Recipe", (), {"micro_batch_size": size})  # type: ignore[assignment]
            batches = run._share(Numbers(), range(samples))  # type: ignore[arg-type]
            found += (batches[-1]["labels"] == IGNORED).all()
        assert fillers(samples, processes, size) == found


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_processor_that_is_slow_in_bfloat16_is_named(
    tmp_path: Path, fast_bfloat16: bool, precision: str
) -> None:
    with student_home(tmp_path) as home:
        path = recipe(home, tmp_path / "run", data=str(home / "text.txt"))
        said: list[str] = []
        uptrain_checkpoint(path, ["tokens=64", f"precision={precision}"], on_message=said.append)
    found = [line for line in said if "is slower in bfloat16" in line]
    assert len(found) == (precision == "bf16" and not fast_bfloat16)


def test_text_that_repeats_and_switches_of_a_launcher_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switches = {"MIXED_PRECISION": "fp16", "GRADIENT_ACCUMULATION_STEPS": "8"}
    with student_home(tmp_path) as home:
        (home / "short.txt").write_text("a river runs past old stones " * 8, encoding="utf-8")
        sources = [str(home / "short.txt"), str(home / "text.txt")]
        said: list[str] = []
        uptrain_checkpoint(
            recipe(home, tmp_path / "quiet", data=sources[1]), ["tokens=64"], on_message=said.append
        )
        assert not [line for line in said if line.startswith("note: ")]
        for name, value in switches.items():
            monkeypatch.setenv(f"ACCELERATE_{name}", value)
        path = recipe(home, tmp_path / "run", data=sources, tokens=1024)
        uptrain_checkpoint(path, [], on_message=said.append)
    short, precision, accumulated = [line for line in said if line.startswith("note: ")]
    tokens = int(short.split(" has ")[1].split()[0])
    assert f"short.txt has {tokens} tokens and is read {512 / tokens:.0f} times" in short
    assert "mixed_precision fp16 has no effect" in precision
    assert "gradient_accumulation_steps 8 has no effect" in accumulated
