"""The last stage with a share of the model in each process: the same result as with all of it, the
same after a kill, and chosen where one device does not hold it.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion import resources
from gqa_convert.conversion.options import CalibrationOptions
from gqa_convert.conversion.plan import make_plan
from tests.helpers import folding_cases as folded
from tests.helpers.fitting import plan_of
from tests.helpers.ranks import Job, convert
from tests.helpers.shared_conversions import IN_FLOAT32, OPTIONS, SOURCE, assert_same, record, start
from tests.helpers.tiny import VOCAB

STEPS = 6


def text(rows: int) -> dict[str, torch.Tensor]:
    """Some of the same four sequences."""
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(3, VOCAB, (4, 24), generator=generator)[:rows]}


def fit(source: str, out: str, kind: str, killed_at: int = 0) -> None:
    """Fit a checkpoint on all processes of a run, and keep what was merged. Of some batches one of
    two processes has a row less than the other, or none. The last stage is taken to help.
    """
    from gqa_convert.checkpoint.provenance import CalibrationRecord
    from gqa_convert.conversion.calibration.streams import Calibration
    from gqa_convert.conversion.fitting import FitWork, fit_checkpoint
    from gqa_convert.conversion.layers import attention_calls, last_stage, model_loading
    from gqa_convert.conversion.layers.layer_store import LayerStore
    from gqa_convert.processes import join, rank, taking_part
    from gqa_convert.sharding import is_sharded

    torch.set_num_threads(1)
    last_stage.SAVED_EVERY, last_stage.RATE = -1.0, 2e-3
    attention_calls._TOKENS_TOGETHER = 24
    checked: list[bool] = []
    judged: list[float] = []
    judge = last_stage.Student.divergence
    opened = model_loading.open_model

    def opening(*arguments: Any, **options: Any) -> Any:
        model = opened(*arguments, **options)
        checked.append(is_sharded(model))
        if is_sharded(model):
            shares = [each.to_local().numel() / each.numel() for each in model.parameters()]
            assert max(shares) < 0.7, "each process holds about a half of every parameter"
        return model

    def judging(student: Any, batches: Any) -> float:
        judged.append(judge(student, batches))
        return 1 / len(judged)

    def look(progress: Any) -> None:
        if killed_at and progress.label == "all layers together" and progress.done == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    model_loading.open_model = opening
    last_stage.Student.divergence = judging
    with taking_part():
        join()
        plan = plan_of(Path(source))
        batches = [text(rows) for rows in (3, 1, 2, 4)]
        fresh = [text(3), text(1)]
        calibration = Calibration(batches, 0, "", "", held_out=[text(1)], fresh=fresh)
        made = CalibrationRecord(
            text="",
            tokens=0,
            sequence_length=0,
            seed=0,
            steps=2,
            digest="",
            sharded="in shares" if kind == "sharded" else "",
        )
        decisions = resources.Decisions(recompute=kind == "sharded")
        options = CalibrationOptions(steps=2, kl_steps=STEPS, device="cpu")
        store = None if rank() else LayerStore(Path(out), {}, keep=True).__enter__()
        work = FitWork(
            plan=plan,
            options=options,
            calibration=calibration,
            record=made,
            steps=STEPS,
            decisions=decisions,
        )
        done = fit_checkpoint(work, store, look)
    assert checked == [kind == "sharded"]
    if rank() == 0:
        Path(out + ".json").write_text(json.dumps([*judged, done.kl.before, done.kl.after]))


def run(source: Path, out: Path, kind: str, killed_at: int = 0) -> list[int]:
    processes = 1 if kind == "alone" else 2
    folder = out.parent / f"logs of {out.name} {killed_at}"
    job = Job(fit, (str(source), str(out), kind, killed_at), folder, processes, **IN_FLOAT32)
    codes = job.wait(120)
    assert killed_at or codes == [0] * processes, job.text()
    return codes


def kept(out: Path) -> Path:
    return out.parent / f".{out.name}.gqa-merging"


@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_it_yields_what_whole_models_yield(name: str, tmp_path: Path) -> None:
    """From the same layers, and killed in between; falcon's layers return more than hidden states,
    and its projections are fused.
    """
    source = folded.build(name).save(tmp_path / "source")
    out, alone = tmp_path / "sharded", tmp_path / "alone"
    assert run(source, alone, "alone", killed_at=3) == [-signal.SIGKILL]
    kept(out).mkdir()
    start = {}
    for path in kept(alone).glob("layer-*"):
        start |= load_file(path)
        shutil.copy(path, kept(out))
    assert run(source, out, "sharded", killed_at=3)[0] == -signal.SIGKILL
    found, expected = (load_file(kept(each) / "halfway.safetensors") for each in (out, alone))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        # gradients' moments, which Adam itself would not tell from multiples of them
        assert np.linalg.norm(found[key] - array) < 1e-3 * np.linalg.norm(array), key
    run(source, alone, "alone")
    run(source, out, "sharded")
    found, expected = (load_file(kept(each) / "together.safetensors") for each in (out, alone))
    assert found.keys() == expected.keys() == start.keys()
    for key, array in expected.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape)
        learned = np.linalg.norm(array - start[key])
        assert learned > 0
        # Adam divides tiny gradients, which are rounded otherwise, by their own size
        assert np.linalg.norm(found[key] - array) < 2e-3 * learned, key
    measured = [json.loads((tmp_path / f"{each.name}.json").read_text()) for each in (out, alone)]
    assert measured[0] == pytest.approx(measured[1], rel=1e-4)


def test_it_is_chosen_where_one_device_does_not_hold_the_stage(tmp_path: Path) -> None:
    """Two machines with a process each, of which none has enough memory."""
    plan = make_plan(open_checkpoint(SOURCE), 3, method="fit")
    options = CalibrationOptions("python-stdlib", tokens=3072, steps=6, kl_steps=6, mix=False)
    whole = resources.last_stage_free(plan, options, recompute=True)
    shared = resources.sharded_free(plan, options, 2)
    assert shared is not None
    assert shared < whole
    machine = json.loads(IN_FLOAT32["GQA_CONVERT_MACHINE"]) | {"memory": (whole + shared) // 2}
    out = tmp_path / "out"
    arguments = (str(SOURCE), str(out), *OPTIONS)
    environment = {"GQA_CONVERT_MACHINE": json.dumps(machine), "LOCAL_WORLD_SIZE": "1"}
    job = Job(convert, arguments, tmp_path / "logs", 2, **environment)
    assert job.wait(240) == [0, 0], job.text()
    said = "each of 2 processes holds a share of the weights and of what the last stage trains"
    assert said in job.text()
    assert record(out)["calibration"]["sharded"].startswith(said)
    alone = tmp_path / "alone"
    job = start(alone, 1)
    assert job.wait(180) == [0], job.text()
    assert record(alone)["calibration"]["sharded"] == ""
    assert_same(out, alone)


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_memory_is_counted_by_process(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of the weights and of what is trained; a byte less, and the stage is left out."""
    plan = make_plan(open_checkpoint(SOURCE), 3, method="fit")
    options = CalibrationOptions("python-stdlib", tokens=3072, sequence_length=64)
    monkeypatch.setattr(resources, "_STAGE_BASE", 0)
    whole = resources.last_stage_free(plan, options, recompute=True)
    needed = resources.sharded_free(plan, options, processes) or whole
    for free in (whole, whole - 1, needed, needed - 1):
        monkeypatch.setattr(resources, "free_memory", lambda _, free=free: free)
        found = resources.decide(plan, options, processes)
        assert found.sharded is (needed <= free < whole)
        assert bool(found.no_last_stage) is (free < needed)
        assert found.recompute or free >= whole
    two, eight = (resources.sharded_free(plan, options, each) or 0 for each in (2, 8))
    assert eight < two < whole
    shares = 16 * resources._trained_numbers(plan) * (1 / 2 - 1 / 8)
    weights = resources.held_bytes(plan.checkpoint, halves=False) * (1 / 2 - 1 / 8)
    assert two - eight == pytest.approx(weights + shares / resources._STAGE_SHARE, rel=1e-3)
