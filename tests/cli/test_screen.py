"""What is printed, to terminals, files and pipes of any encoding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.checkpoints import write_llama
from tests.helpers.command_line import run

NAME = "[bold]x[/] :warning: é ±"
"""Looks like markup, and like an emoji's code; and no ASCII."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / NAME)


def test_names_are_printed_as_they_are(source: Path, tmp_path: Path) -> None:
    planned = run("convert", source, "--groups", 4, "--dry-run")
    assert planned.stdout.startswith(f"{source}: llama, 12 query heads")
    assert f"{source}: llama" in run("inspect", source, "--candidates", 4).stdout
    out = tmp_path / "[red]out[/]"
    converted = run("convert", f"{source}/", f"{out}/", "--groups", 4, "-m", "mean")
    assert f"folder               {out}\n" in converted.stdout
    (out / "[red].json").write_text("{}")
    assert (
        "FAIL  copied files           [red].json is not in SOURCE"
        in run("verify", out, "--source", source, "--no-logits").stdout
    )
    missing = run("convert", tmp_path / "no[/]thing", "--groups", 4, "--dry-run")
    assert str(tmp_path / "no[/]thing") in missing.stderr


def shell(words: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """A command of the shell in which `plan` stands for this program's, with pipes whose first failure counts."""
    command = (
        f'plan() {{ "{sys.executable}" -m gqa_convert convert "$1" --groups 4 --dry-run; }}; set -o pipefail; {words}'
    )
    return subprocess.run(
        ["bash", "-c", command, "bash", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_streams_that_are_closed_or_full(source: Path) -> None:
    for words in ('plan "$1" >&-', 'plan "$1" 2>&-', 'plan "$1" | true', 'plan "$1" >&- 2>&-'):
        ended = shell(words, source)
        assert (ended.returncode, ended.stderr) == (0, ""), words
    full = shell('plan "$1" > /dev/full', source)
    assert full.returncode == 1
    assert full.stderr == "gqa-convert: the system: No space left on device\n"


def test_what_transformers_would_report_is_one_line(tmp_path: Path) -> None:
    """A tensor that is missing, and one of another shape."""
    from tests.helpers.evaluate_models import causal

    model = causal(tmp_path / "model")
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 50)
    tensors = load_file(model / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    for options in ((), ("-q", "--json")):
        broken = run("evaluate", model, "--data", tmp_path / "text.txt", *options)
        assert broken.returncode == 2
        assert broken.stderr == (
            f"gqa-convert: {model} has no fitting tensor for model.norm.weight (1 in all): convert or fetch it again\n"
        )
    assert json.loads(broken.stdout)["exit_code"] == 2
    save_file(tensors | {"model.norm.weight": norm[1:]}, model / "model.safetensors", metadata={"format": "pt"})
    broken = run("evaluate", model, "--data", tmp_path / "text.txt")
    assert f"model.norm.weight, which is [{len(norm) - 1}] where the model needs [{len(norm)}]" in broken.stderr
    assert broken.stderr.count("\n") == 1
