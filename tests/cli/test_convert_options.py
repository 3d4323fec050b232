"""Options of convert: numbers of heads, calibration and the device; what a dry run shows, and
mistakes.
"""

import json
import re
from pathlib import Path

import pytest
import typer

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.cli.console.plan import caches_at_context, show_plan
from gqa_convert.cli.convert import group_counts
from gqa_convert.conversion.estimate import estimate_needs
from gqa_convert.conversion.options import CalibrationOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.demo import CHECKPOINT as MODEL
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.own_files import make_source
from tests.helpers.tiny import make_checkpoint


def test_a_file_of_numbers(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers"
    numbers.write_text("12\n4\n3\n\n6\n12")
    shown = run("convert", MODEL, "--kv-heads", f"@{numbers}", "-m", "mean", "--dry-run", "--json")
    assert json.loads(shown.stdout)["kv_heads"] == [12, 4, 3, 6, 12] == group_counts("12,4,3,6,12")
    assert group_counts("4") == 4
    numbers.write_text("[12, 4, 3, 1]")
    assert group_counts(f"@{numbers}") == [12, 4, 3, 1]
    for content, words in (("[12, x]", "'x'"), ("", "'' is"), ("4,0", "'0'")):
        numbers.write_text(content)
        with pytest.raises(typer.BadParameter, match=words):
            group_counts(f"@{numbers}")
    with pytest.raises(typer.BadParameter, match="cannot be read"):
        group_counts("@nowhere")


def test_the_cross_attention_cache_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the length that the encoder was made for."""
    monkeypatch.setenv("COLUMNS", "120")
    for model_type, changes, context, label in (
        ("bart", {"max_position_embeddings": 64}, 64, "64"),
        ("t5", {}, 512, "512"),
    ):
        source = make_source(model_type, tmp_path / model_type, **changes)
        plan = make_plan(open_checkpoint(source), 3, method="mean")
        caches = caches_at_context(plan)
        show_plan(plan, estimate_needs(plan, CalibrationOptions()), caches)
        before = plan.kv_cache_bytes("cross").before * context
        assert caches["cross_kv_cache"] == {
            "tokens": context,
            "before": before,
            "after": before // 4,
        }
        shown = [line.split() for line in capsys.readouterr().out.splitlines()]
        (row,) = [
            " ".join(words)
            for words in shown
            if words[:2] == ["cross", "cache"] and words[2] == "at"
        ]
        assert row.startswith(f"cross cache at {label} tokens ")
        assert row.endswith(" 0.250")
    rows = [(words[0], words[-1]) for words in shown if "k.weight" in " ".join(words)]
    assert rows == [
        ("layer.0.SelfAttention.k.weight", "2"),
        ("layer.1.EncDecAttention.k.weight", "2"),
    ]


def test_mistakes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, words in (
        (["-n", "3", "-m", "fit"], ["--calibration", "factor"]),
        (["-n", "3", "-m", "mean", "-c", __file__], ["--calibration", "mean", "fit"]),
        (
            ["-n", "3", "-m", "mean", "--device", "cpu"],
            ["--device cpu is of no use to --method mean"],
        ),
        (["-n", "3", "-c", "nofile.txt", "--dry-run"], ["nofile.txt does not exist"]),
        (
            ["-n", "3", "-m", "factor", "--calibration-length", "64"],
            ["--calibration-length 64", "needs calibration text"],
        ),
        (["-n", "3", "--calibration-tokens", "500"], ["--calibration-tokens 500", "--calibration"]),
        (
            ["-n", "3", "-m", "factor", "-c", __file__, "--kl-steps", "5"],
            ["--kl-steps 5", "factor", "fit"],
        ),
        (["-n", "3", "-c", __file__, "--kl-steps", "-1"], ["--kl-steps is -1, expected 0 or more"]),
        (
            [
                "-n",
                "3",
                "-c",
                __file__,
                "--calibration-tokens",
                "90000",
                "--kl-steps",
                "5",
                "--no-mix",
            ],
            ["--kl-steps 5", "more text"],
        ),
        (["-n", "3", "-c", str(tmp_path / "none.txt")], ["none.txt"]),
        (["-n", "2", "-c", "t.txt", "--device", "cuda:99"], ["--device is cuda:99, and"]),
        (
            ["-n", "2", "-c", "t.txt", "--device", "cpu,cpu"],
            ["--device 'cpu,cpu' is neither the CPU nor a GPU"],
        ),
        (
            ["-n", "2", "-c", "t.txt", "--device", "meta"],
            ["--device 'meta' is neither the CPU nor a GPU"],
        ),
        (
            ["-n", "3", "-c", __file__, "--calibration-tokens", "0"],
            ["--calibration-tokens", "'0' is not a whole number above 0"],
        ),
    ):
        assert_mistake(run("convert", MODEL, out, *arguments), *words)
        assert list(tmp_path.iterdir()) == []


def test_what_merges_nothing_says_what_it_does_not_use(tmp_path: Path) -> None:
    """As many K/V heads as the source has, or more."""
    unused, grown = (
        "no heads are merged, so that --calibration is not used",
        "heads are repeated, and the cache grows",
    )
    source = make_checkpoint("llama", tmp_path / "source", kv_heads=6)
    for number, options, said in (
        (6, ["-c", __file__], [unused]),
        (12, [], [grown]),
        (12, ["-c", __file__], [unused, grown]),
    ):
        for more in (["--dry-run"], [tmp_path / f"{number}{len(options)}"]):
            shown = run("convert", source, *more, "-n", number, *options)
            assert shown.returncode == 0, shown.stderr
            for sentence in (unused, grown):
                assert (sentence in shown.stdout) is (sentence in said)


def test_plan_says_it() -> None:
    options = (
        "--calibration",
        "python-stdlib",
        "--calibration-tokens",
        "4096",
        "--fit-steps",
        "10",
        "--kl-steps",
        "0",
    )
    shown = run("convert", MODEL, "--kv-heads", "2", *options, "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"^method: +fit on 4,096 tokens$", shown.stdout, re.MULTILINE)
    memory = r"about [\d.]+ MB of memory on cpu \(at least [\d.]+ MB, with 11.2 MB in /\S*\)"
    line = rf"^needs: +{memory}, [\d.]+ MB of disk$"
    assert re.search(line, shown.stdout, re.MULTILINE), shown.stdout
    assert re.search(r"^takes: +about \d+ minutes? on cpu, ", shown.stdout, re.MULTILINE)
    runs = run("convert", MODEL, "--groups", "2", *options[:4], "--dry-run")
    assert re.search(
        r"^method: .*, then up to 200 steps on all layers together$", runs.stdout, re.MULTILINE
    )
    as_json = json.loads(run("convert", MODEL, "--kv-heads", "2", "--json", "--dry-run").stdout)
    assert as_json["estimate"]["work"] == "factor on 4,096 tokens"
    fields = {"work", "memory_bytes", "disk_bytes", "tokens", "device"}
    fields |= {"least_memory_bytes", "offloaded_bytes", "left_out", "hours"}
    assert set(as_json["estimate"]) == fields
