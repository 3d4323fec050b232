"""The command line as a user meets it: real processes, their exit codes, what they print and
where.
"""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gqa_convert import __version__
from gqa_convert.cli import app
from gqa_convert.cli.commands import COMMANDS
from tests.helpers.checkpoints import WIDTH, write_config, write_llama
from tests.helpers.command_line import assert_mistake, run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("cli") / "source", shards=3)


def test_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"gqa-convert {__version__}\n")


def test_the_first_help_fits_one_screen_and_names_the_nine_commands() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).stdout
    lines = shown.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "--calibration text.txt" in shown
    listed = [line.split()[0] for line in lines[lines.index("Commands:") + 1 :] if line[2:3] != " "]
    assert (
        " ".join(listed)
        == "inspect convert verify uptrain evaluate benchmark check-serving publish demo"
    )


OTHER_NAMES = {
    "json": "as_json",
    "with": "earlier",
    "license": "licence",
    "hash": "hash_weights",
    "groups": "kv_heads",
    "help": "help",
}
"""Parameters whose names differ from their options': words of Python, shadowed or less clear
names, and the other name of `--kv-heads`.
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_sets_the_parameter_of_its_name(command: str) -> None:
    """--private is the value of `private`, and no other option's."""
    (declared,) = [each for name, each in get_command(app).commands.items() if name == command]  # type: ignore[attr-defined]
    for parameter in declared.params:
        names = {name.lstrip("-") for name in parameter.opts if name.startswith("--")}
        expected = {OTHER_NAMES.get(name, name.replace("-", "_")) for name in names}
        assert not names or expected == {parameter.name}
        assert parameter.name == "help" or parameter.help, (
            f"{command}: {parameter.name} has no help"
        )


def test_a_mistake_points_to_the_help_of_its_command() -> None:
    assert_mistake(run("convert"), "Missing argument 'SOURCE': see gqa-convert convert --help")
    assert_mistake(run("convert", "x", "--gruops", "3"), "see gqa-convert convert --help")
    assert_mistake(run("frobnicate"), "see gqa-convert --help")
    assert_mistake(run("inspct"), "Did you mean 'inspect'? See gqa-convert --help")
    assert_mistake(run("benchmark", "x", "--repetitions", "low"), "'--repetitions': 'low'", "valid")
    assert_mistake(run("benchmark", "x", "--repetitions", "-1"), "--repetitions", "-1")
    assert_mistake(
        run("convert", "x", "y", "--kv-heads", "8,a"),
        "--kv-heads",
        "'a' is not a whole number above 0",
    )


def test_a_dry_run_shows_the_cache_at_the_models_context(tmp_path: Path) -> None:
    """Of two layers, the second has a window of 40 tokens."""
    source = write_llama(tmp_path / "source")
    head = 2 * WIDTH * 4
    write_config(source, sliding_window=40, layer_types=["full_attention", "sliding_attention"])
    words = ("convert", source, "-n", "4", "--dry-run")
    cache = json.loads(run(*words, "--json").stdout)["kv_cache"]
    sizes = {"before": 12 * head * (64 + 40), "after": 4 * head * (64 + 40)}
    assert cache == {"tokens": 64, **sizes}
    row = (
        f"K/V cache at 64 tokens {cache['before'] / 1e3:.1f} kB {cache['after'] / 1e3:.1f} kB 0.333"
    )
    assert row in " ".join(run(*words).stdout.split())
    write_config(source, sliding_window=16, use_sliding_window=False, layer_types=None)
    whole = json.loads(run(*words, "--json").stdout)["kv_cache"]
    assert (whole["tokens"], whole["before"]) == (64, 2 * 12 * head * 64)


def test_convert_verify_and_overwrite(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out folder"
    result = run("convert", source, out, "--kv-heads", 4, "-m", "mean", "--json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["kv_heads"], summary["out"]) == (4, str(out))
    assert summary["out_bytes"] == sum(path.stat().st_size for path in out.iterdir())
    config = json.loads((out / "config.json").read_text())
    assert config["multi_query_attention"] is True
    assert config["num_key_value_heads"] == config["multi_query_group_num"] == 4
    provenance = json.loads((out / "gqa_conversion.json").read_text())
    assert provenance["command"][:2] == ["gqa-convert", "convert"]
    assert 0 < provenance["merge_error"]["model.layers.0.self_attn.k_proj.weight"] < 1

    verified = run("verify", out, "--source", source, "--no-logits", "--json")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["passed"] is True

    assert_mistake(run("convert", source, out, "--kv-heads", 3), "exists already", "--overwrite")
    shown = run("convert", source, out, "--kv-heads", 3, "--overwrite", "-m", "mean")
    assert f"'{out}'" in shown.stdout  # the next command, ready to paste
    assert (shown.returncode, shown.stderr) == (0, "")
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 3
    (out / "tokenizer.json").write_text("{}")
    failed = run("verify", out, "--source", source, "--no-logits", "--json")
    assert (failed.returncode, failed.stderr, json.loads(failed.stdout)["passed"]) == (1, "", False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("convert", "{source}", "--kv-heads", "5", "--dry-run"),
            ("--kv-heads 5", "12 K/V heads", "1, 2, 3, 4, 6, 12"),
        ),
        (
            ("convert", "{source}", "--kv-heads", "0", "--dry-run"),
            ("--kv-heads", "'0' is not a whole number above 0"),
        ),
        (("convert", "{source}", "--dry-run"), ("either --kv-heads", "--kv-budget")),
        (
            ("convert", "{source}", "--kv-heads", "3", "--method", "median", "--dry-run"),
            ("median", "mean"),
        ),
        (
            ("convert", "{source}", "--kv-heads", "3", "--revision", "main", "--dry-run"),
            ("local folder", "--revision"),
        ),
        (
            ("convert", "{missing}", "--kv-heads", "3", "--dry-run"),
            ("neither a local folder nor a Hub id",),
        ),
        (("convert", "{source}/config.json", "--kv-heads", "3", "--dry-run"), ("is a file",)),
        (("convert", "{source}", "{source}", "--kv-heads", "3"), ("is the source ",)),
        (("convert", "{source}", "--kv-heads", "3"), ("OUT",)),
        (("verify", "{missing}", "--source", "{source}"), ("nowhere",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_mistakes_get_one_line(
    source: Path, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    filled = [
        part.format(source=source, missing=tmp_path / "a" / "b" / "nowhere") for part in arguments
    ]
    before = sorted(source.rglob("*"))
    assert_mistake(run(*filled), *words)
    assert sorted(source.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_sees_a_progress_bar(source: Path, tmp_path: Path) -> None:
    """The bar is drawn on a terminal's stderr and nowhere else."""
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "gqa_convert",
        "convert",
        str(source),
        str(tmp_path / "out"),
        "--kv-heads",
        "4",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        shown = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other side has closed
                break
            shown += part
        assert process.stdout is not None
        result = process.stdout.read().decode()
    assert process.returncode == 0
    assert "converting" in shown.decode()
    assert "done  12 -> 4 K/V heads" in result
    assert "\x1b" not in result


@pytest.mark.parametrize("place", ["gqa_convert.cli.running", "gqa_convert.training.stopping"])
def test_a_signal_that_the_caller_ignores_stays_ignored(place: str) -> None:
    """As nohup lets SIGHUP be."""
    code = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
def app(**_):
    for number in (signal.SIGHUP, signal.SIGTERM):
        print(signal.getsignal(number) == signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGHUP)
    print("goes on")
sys.argv = ["gqa-convert"]
"""
    ending = "from gqa_convert.cli.running import run; run(app)"
    if place.endswith("stopping"):
        ending = (
            "from gqa_convert.training.stopping import StopRequests\nwith StopRequests(): app()"
        )
    done = subprocess.run(
        [sys.executable, "-c", code + ending], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:3] == ["True", "False", "goes on"], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_one_line(tmp_path: Path, number: signal.Signals) -> None:
    """A run that waits on a named pipe in the middle of its work is stopped for certain while it
    works; whatever libraries do with exceptions, and while Python ends.
    """
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(tmp_path / "pipe")
    script = (
        "import atexit, sys, gqa_convert.cli as cli, gqa_convert.conversion.run as convert\n"
        "class Late:\n def __del__(self): raise ValueError('of a library, while Python ends')\n"
        "atexit.register(lambda: Late() and None)\n"
        "pipe = sys.argv.pop()\n"
        "def waiting(*_):\n try: open(pipe, 'rb').read()\n except Exception: pass\n"
        "convert.write_weights = waiting\n"
        "cli.main()"
    )
    arguments = [
        "convert",
        str(write_llama(source)),
        str(tmp_path / "out"),
        "--kv-heads",
        "3",
        str(tmp_path / "pipe"),
    ]
    command = [sys.executable, "-c", script, *arguments]
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
        (tmp_path / "pipe").open("wb"),  # opens once the other side has
    ):
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == ""
    assert stderr == f"gqa-convert: stopped by {number.name}: no partial result was written\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "source"]


def test_arguments_that_are_no_utf8(source: Path, tmp_path: Path) -> None:
    result = run("convert", source, tmp_path / os.fsdecode(b"o\xff"), "--kv-heads", "3")
    assert_mistake(result, r"o\udcff", "not UTF-8", "rename")
    assert list(tmp_path.iterdir()) == []
