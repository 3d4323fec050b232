"""Calibration on several devices: the result is that of one device up to the rounding of sums, and processes end together."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gqa_convert.checkpoint.devices import chosen_devices
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit import layer_fitting, matching
from gqa_convert.conversion.fit.layer_walk import fit_checkpoint
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.processes import ALONE, ProcessGroup, launching, own_sequences, sequences
from gqa_convert.conversion.fit.records import CalibratedRecord
from gqa_convert.conversion.fit.statistics import Moment
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import OptionError, WorkerError
from tests.helpers import folding_cases as folded
from tests.helpers.checkpoints import digests
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.fitting import batches_for
from tests.helpers.processes import in_processes, starting_forks
from tests.helpers.uptrain_runs import die, in_child, wait_for

pytestmark = pytest.mark.usefixtures("modeling_files_registered")

SUMS = 1e-12
"""Relative difference of sums in float64 in another order."""
ROUNDED = 2e-7
"""Of numbers in float32 that come from such sums, and of errors of products in float32."""
TRAINED = 1e-6
"""Of errors after gradient steps in float32."""


def fit(
    source: Path,
    groups: int,
    out: Path,
    batches: Any,
    processes: ProcessGroup,
    steps: int,
    kl_steps: int,
    rank: int = 0,
) -> Any:
    """The merged layers, their records, the divergence after them, and the record of the last stage."""
    plan = make_plan(open_checkpoint(source), groups, method="fit")
    store = MergedLayers(out, {}, keep=True)
    if processes.is_first:
        store.__enter__()
    processes.wait()
    found = fit_checkpoint(
        plan,
        store,
        batches,
        lambda *_: None,
        steps=steps,
        kl_steps=kl_steps,
        kl_rank=rank,
        held_out=batches[:1],
        device="cpu",
        processes=processes,
    )
    numbers = range(len(plan.merged_layers))
    layers = [{name: np.array(array) for name, array in store.read(number).items()} for number in numbers]
    return layers, [store.record(number) for number in numbers], found.divergence, store.finished()


def distance(one: Any, other: Any) -> dict[str, float]:
    """By the largest number of each tensor."""
    return {
        name: float(np.abs(array - other_layer[name]).max() / np.abs(array).max())
        for layer, other_layer in zip(one, other, strict=True)
        for name, array in layer.items()
    }


@pytest.mark.parametrize(
    ("name", "groups", "counts", "rank"),
    [("llama", 3, (5, 5), 0), ("llama", 4, (1, 3), 2), ("gpt2", 4, (3, 1), 0), ("t5", 3, (3, 3), 0)],
)
def test_devices_give_what_one_gives(
    name: str, groups: int, counts: tuple[int, int], rank: int, tmp_path: Path
) -> None:
    """Closed forms alone and gradient steps, on odd numbers of batches of three sequences, and on fewer batches than
    devices.
    """
    case = folded.build(name)
    source = case.save(tmp_path / "source")
    cases = [
        (batches_for(case.model, count=count, rows=3, length=24), steps, steps, rank)
        for count, steps in zip(counts, (0, 3), strict=True)
    ]

    def each(processes: ProcessGroup, out: Path) -> list[Any]:
        return [
            fit(source, groups, out / str(number), batches, processes, *steps)
            for number, (batches, *steps) in enumerate(cases)
        ]

    alone = each(ALONE, tmp_path / "alone")
    found, other = in_processes(2, tmp_path / "meeting", lambda processes: each(processes, tmp_path / "two"))
    for one, two, follower in zip(alone, found, other, strict=True):
        layers, records, divergence, training = one
        assert [[*map(np.ndarray.tobytes, layer.values())] for layer in two[0]] == [
            [*map(np.ndarray.tobytes, layer.values())] for layer in follower[0]
        ]
        assert two[1:] == follower[1:]
        stepped = one is not alone[0]
        for record, same in zip(records, two[1], strict=True):
            assert (same.module, same.head_order) == (record.module, record.head_order)
            assert same.first_low_frequency_pair == record.first_low_frequency_pair
            bound = TRAINED if stepped else ROUNDED
            assert same.output == pytest.approx(record.output, rel=bound, abs=bound)
            assert same.gap_left == pytest.approx(record.gap_left, rel=bound, abs=bound)
        assert two[2] == pytest.approx(divergence, rel=1e-5, abs=1e-7)  # of logits in float32
        if training is not None:
            assert (two[3].kl_steps, two[3].requested_steps) == (training.kl_steps, training.requested_steps)
            assert two[3].kl_rank == training.kl_rank == (rank if training.kl_steps else 0)
            assert two[3].kl.after == pytest.approx(training.kl.after, rel=1e-5, abs=1e-7)
        for tensor, off in distance(layers, two[0]).items():
            # to biases of keys the output is indifferent: their gradient is rounding, which Adam makes a step of
            unfelt = stepped and tensor.endswith("c_attn.bias")
            assert off < (2e-3 if unfelt else 2e-4 if stepped else ROUNDED), tensor
    if counts[1] > 1:
        assert alone[1][3].kl.after < alone[1][3].kl.before


def test_every_sequence_is_computed_once_and_evenly() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [
        {"input_ids": torch.randint(100, (rows, 7), generator=generator), "attention_mask": torch.ones(rows, 7)}
        for rows in (2, 2, 1, 4, 3, 1)
    ]
    states = [torch.randn(*batch["input_ids"].shape, 5, generator=generator) for batch in batches]
    whole = Moment(5)
    for each in states:
        whole.add(each, None)
    for size in (2, 3, 5):
        shares = [own_sequences(batches, ProcessGroup(rank, size)) for rank in range(size)]
        counts = [sequences([*share.values()]) for share in shares]
        assert sum(counts) == sequences(batches) == 13
        assert max(counts) - min(counts) <= 1
        for number, batch in enumerate(batches):
            parts = [share[number] for share in shares if number in share]
            rows = torch.cat([part["input_ids"] for part in parts])
            assert sorted(rows.tolist()) == sorted(batch["input_ids"].tolist())
            assert all(part["attention_mask"].shape == part["input_ids"].shape for part in parts)
    assert [*own_sequences(batches, ALONE)] == [*range(len(batches))]


def test_sums_decisions_and_differences_of_three_processes(tmp_path: Path) -> None:
    """Sums are those of all, the first one's word counts, and one that differs is found by all."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 11, 5, generator=generator, dtype=torch.float64)
    whole = Moment(5)
    whole.add(rows, None)

    def action(processes: ProcessGroup) -> Any:
        rank, moment = processes.rank, Moment(5)
        moment.add(rows[rank], None)
        moment.add_up(processes)
        gradient = torch.full((4,), float(rank))
        processes.add_up([gradient])
        told = processes.from_first(lambda: (np.arange(3) + rank, torch.ones(2), None, rank))
        with processes.in_turn(), (tmp_path / "turns").open("a") as file:
            file.write(f"in {rank} ")
            time.sleep(0.02 * (3 - rank))
            file.write("out ")
        agreed = [processes.all(rank < limit) for limit in (3, 2)]
        processes.check_equal("a", {"x": np.ones(3), "y": np.zeros(2)})
        with pytest.raises(WorkerError, match=r"computed different numbers for layer 7.*name one device"):
            processes.check_equal("layer 7", {"x": np.ones(3), "y": np.full(2, 1e-9 * (rank == 1))})
        return moment.damped(), gradient.tolist(), told[0].tolist(), told[3], agreed, processes.largest([rank, -rank])

    for moment, *rest in in_processes(3, tmp_path / "meeting", action):
        np.testing.assert_allclose(moment, whole.damped(), rtol=SUMS, atol=SUMS)
        assert rest == [[3.0] * 4, [0, 1, 2], 0, [True, False], [2, 0]]
    assert (tmp_path / "turns").read_text() == "in 0 out in 1 out in 2 out "


def test_heads_that_part_are_not_written(tmp_path: Path) -> None:
    case = folded.build("llama")
    source, batches = case.save(tmp_path / "source"), batches_for(case.model)

    def action(processes: ProcessGroup) -> Any:
        if processes.rank == 1:
            matching.RATE *= 1.5
        return fit(source, 3, tmp_path / "out", batches, processes, 3, 0)

    found = in_processes(2, tmp_path / "meeting", action)
    assert [type(each) for each in found] == [WorkerError] * 2
    assert "different numbers for model.layers.0.self_attn" in str(found[0])
    assert not [*tmp_path.glob(".out.gqa-merging/layer-*")]


FITTING = {"calibration_tokens": 300, "calibration_length": 60, "fit_steps": 2, "kl_steps": 0}


def converted(small: Path, out: Path, text: Path, **options: Any) -> None:
    convert_checkpoint(small, out, 3, calibration=text, **FITTING, device="cpu,cpu", **options)


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the processes that were started, which are forks."""
    path = tmp_path / "pids"
    monkeypatch.setattr(launching, "started", starting_forks(path))
    return path


def kept(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.glob(f".{out.name}.gqa-merging/*"))


def at(module: str, action: Callable[[], Any]) -> Callable[..., None]:
    def on_layer(_: int, __: int, record: Any) -> None:
        if isinstance(record, CalibratedRecord) and record.module == module:
            action()

    return on_layer


def test_the_command_and_a_killed_process(small: Path, text: Path, tmp_path: Path, pids: Path) -> None:
    """One line, and the same command resumes to the bytes of an uninterrupted one."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in FITTING.items()]
    command = run("convert", small, straight, "--groups=3", f"--calibration={text}", *options, "--device=cpu,cpu")
    assert command.returncode == 0, command.stderr
    assert "gqa-convert" not in command.stderr
    assert json.loads((straight / "gqa_conversion.json").read_text())["machine"]["device"] == "cpu,cpu"
    assert not kept(straight)

    def kill() -> None:
        os.kill(int(pids.read_text()), signal.SIGKILL)

    on_layer = at("model.layers.1.self_attn", kill)
    status, problem = in_child(lambda: converted(small, resumed, text, on_layer=on_layer))
    assert status == 1
    assert "the process on cpu was killed by SIGKILL" in problem
    assert "resumes from the finished layers" in problem
    assert "\n" not in problem.strip()
    assert [name for name in kept(resumed) if name.startswith("layer")] == [
        f"layer-0000{number}.safetensors" for number in range(2)
    ]
    assert not any(name.startswith("processes-") for name in kept(resumed))
    assert in_child(lambda: converted(small, resumed, text)) == (0, "")
    assert digests(straight) == digests(resumed)


def test_an_error_of_one_process_is_that_of_the_command(
    small: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare() -> None:
        def failing(*_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        monkeypatch.setattr(layer_fitting, "match", failing)

    monkeypatch.setattr(launching, "started", starting_forks(tmp_path / "pids", prepare))
    status, problem = in_child(lambda: converted(small, tmp_path / "out", text))
    assert status == 1
    assert problem.startswith("out of memory: lower --calibration-length")
    assert not (tmp_path / "out").exists()
    assert not kept(tmp_path / "out")


def test_no_process_outlives_the_first(small: Path, text: Path, tmp_path: Path, pids: Path) -> None:
    status, _ = in_child(lambda: converted(small, tmp_path / "out", text, on_layer=at("model.layers.0.self_attn", die)))
    assert status == -signal.SIGKILL
    wait_for(lambda: not Path(f"/proc/{int(pids.read_text())}").exists())


def test_a_text_of_one_sequence_needs_one_device(
    small: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(launching, "started")
    out = tmp_path / "out"
    convert_checkpoint(
        small, out, 3, calibration=text, calibration_tokens=60, calibration_length=60, method="factor", device="cpu,cpu"
    )
    assert json.loads((out / "gqa_conversion.json").read_text())["machine"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("cuda:0,cuda:9", "--device is cuda:9, and there are 2 GPUs"),
        ("cpu,cuda", "the CPU and GPUs cannot share a conversion"),
        ("cuda,cuda:0", "names cuda:0 more than once"),
        ("cpu,", "'' is not a device"),
        ("cuda,cuda:all", "'cuda:all' is not a device"),
    ],
)
def test_devices_that_cannot_be(asked: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OptionError, match=words):
        chosen_devices(asked)
    assert chosen_devices("cuda:all") == chosen_devices("cuda:0, cuda:1") == ("cuda:0", "cuda:1")
    assert chosen_devices("cpu,cpu") == ("cpu", "cpu")


def test_commands_that_cannot_use_several(small: Path, text: Path, tmp_path: Path) -> None:
    convert = ["convert", small, tmp_path / "out", "--groups", "3"]
    assert_mistake(run(*convert, "--device", "cpu,cpu", "--method", "mean"), "--device cpu,cpu needs calibration text")
    assert_mistake(run(*convert, "--device", "cuda:0,cuda:9", "--calibration", text), "torch finds no GPU here")
    assert_mistake(run("inspect", small, "--calibration", text, "--device", "cpu,cpu"), "'cpu,cpu' is not a device")
    assert not (tmp_path / "out").exists()
