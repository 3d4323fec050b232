"""`gqa-convert benchmark` as a user meets it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.plan import make_plan
from gqa_convert.errors import DeviceMemoryError
from gqa_convert.measuring.benchmark.memory import check_room
from tests.helpers.checkpoints import write_llama
from tests.helpers.command_line import assert_mistake, run

QUICK = ("--context", "6", "--repetitions", "1", "--warm-up", "0", "--steps", "1", "--device", "cpu")


def test_json_table_and_picture(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    result = run("benchmark", source, "--groups", "3,12", "--batch", "1,2", *QUICK, "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    told = json.loads(result.stdout)
    assert [(each["batch"], each["groups"]) for each in told["results"]] == [(1, 3), (1, 12), (2, 3), (2, 12)]
    assert told["command"][:2] == ["gqa-convert", "benchmark"]
    plot = tmp_path / "speed.png"
    result = run(
        "benchmark",
        "--config",
        source,
        "-n",
        "3,12",
        *QUICK,
        "--memory",
        "1MB",
        "--plot",
        plot,
    )
    assert (result.returncode, result.stderr) == (0, "")
    for word in ("random", "largest batch", "batch 1, 6 tokens cached", str(plot)):
        assert word in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    quiet = run("benchmark", "--config", source, "-n", "3", *QUICK, "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("", "")
    help_text = run("benchmark", "--help")
    assert help_text.returncode == 0
    assert "gqa-convert benchmark" in help_text.stdout


def test_without_the_own_number_there_is_no_speed_to_compare_with(tmp_path: Path) -> None:
    """In a folder whose name looks like a mark of the console."""
    source = write_llama(tmp_path / "so[/red]urce")
    shown = run("benchmark", source, "-n", "3,4", *QUICK)
    assert shown.returncode == 0, shown.stderr
    assert "so[/red]urce: llama" in shown.stdout
    assert "x " not in shown.stdout.split("K/V/token")[1].split("note:")[0]
    assert "1.00x" in run("benchmark", source, "-n", "3,12", *QUICK).stdout


def test_mistakes_take_one_line(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    assert_mistake(run("benchmark"), "MODEL", "--config")
    assert_mistake(run("benchmark", source, "--groups", "5"), "--groups 5", "choose one of")
    assert_mistake(run("benchmark", source, "--batch", "two"), "--batch 'two'")
    assert_mistake(run("benchmark", source, "--memory", "plenty"), "--memory 'plenty'")
    assert_mistake(run("benchmark", tmp_path / "absent"), "absent")
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][1:]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    broken = run("benchmark", source, "-n", "3,12", *QUICK)
    assert broken.returncode == 2
    assert broken.stderr == (
        f"gqa-convert: {source} has no fitting tensor for model.norm.weight, which is [59] where the model needs [60] (1 in all): "
        "convert or fetch it again\n"
    )


def test_caches_that_the_memory_can_t_hold_are_refused(tmp_path: Path) -> None:
    """By the exact bytes, one more token than there is room for."""
    source = write_llama(tmp_path / "source")
    plan = make_plan(open_checkpoint(source), 3)
    token = plan.cache_bytes_per_token(True)
    check_room([plan, plan], 5, 1000, None, 2 * 5 * 1000 * token)
    with pytest.raises(
        DeviceMemoryError,
        match=rf"the caches of 2 version\(s\) take {2 * 5 * 1001 * token:,} bytes at batch 5 and context 1001",
    ):
        check_room([plan, plan], 5, 1001, None, 2 * 5 * 1000 * token)
    check_room([plan], 5, 1000, None, None)
    check_room([replace(plan, config=plan.config | {"sliding_window": 8})], 5, 1000, None, 1)
    refused = run("benchmark", source, "--groups", "12", *QUICK, "--batch", "999999999")
    assert refused.returncode == 1
    assert "gqa-convert: the caches of 1 version(s) take" in refused.stderr.splitlines()[-1]
