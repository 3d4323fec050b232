"""What trackers receive: one run per training run, however often it resumes."""

import json
from pathlib import Path
from typing import Any

import accelerate.tracking

from tests.helpers.uptrain_runs import make_student, run


class Remembering(accelerate.tracking.GeneralTracker):
    """A tracker of accelerate's that keeps what it receives."""

    name = "tensorboard"
    requires_logging_directory = True
    tracker = None
    seen: list[tuple[int, dict[str, Any]]] = []  # noqa: RUF012

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int, **_: Any) -> None:
        self.seen.append((step, values))


def test_the_numbers_of_a_step_reach_a_tracker(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("gqa_convert.training.opening.importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("accelerate.accelerator.filter_trackers", lambda names, *_: names)
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Remembering)
    home = make_student(tmp_path)
    run(home, tmp_path / "run", trackers=["tensorboard"], tokens=128)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert Remembering.seen == [(line.pop("step"), line) for line in lines]
    assert [step for step, _ in Remembering.seen] == [1, 2]
