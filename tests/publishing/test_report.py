"""A report states what is in the files, names what is not, and refuses what can't be read."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gqa_convert.errors import GQAConvertError, MissingExtraError, OptionError, OutputError, ReportError
from gqa_convert.measuring.results.identifying import SOURCE
from gqa_convert.measuring.results.joining import Joined, Row
from gqa_convert.measuring.results.records import Score
from gqa_convert.publishing.report import drawing
from gqa_convert.publishing.report import run as report
from gqa_convert.publishing.report.run import make_report
from gqa_convert.publishing.report.verdict import verdicts
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.report_pages import Page, page_of, rows_of
from tests.helpers.report_runs import CURVE, LOSSES, TIMES, benchmark, evaluation, write_json, write_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def made(runs: Path) -> dict[str, Any]:
    return make_report([runs]).as_json()


def test_every_figure_is_drawn_with_its_commands_and_machine(runs: Path, made: dict[str, Any]) -> None:
    names = ["quality-time", "quality-groups", "recovery", "time-groups", "merge-error"]
    assert [figure["name"] for figure in made["figures"]] == names
    assert made["missing"] == []
    assert Path(made["out"]) == runs / "report"
    page = page_of(made)
    figures = [attributes for tag, attributes in page.tags if tag == "figure"]
    assert [each["id"] for each in figures] == names
    assert all(each["aria-label"] for each in figures)
    text = Path(made["html"]).read_text()
    captions = dict(re.findall(r'<figure id="([\w-]+)".*?<figcaption>(.*?)</figcaption>', text, re.DOTALL))
    assert list(captions) == names
    for name in ("quality-time", "quality-groups"):
        assert "gqa-convert evaluate" in captions[name]
    for name in ("quality-time", "time-groups"):
        assert "gqa-convert benchmark source" in captions[name]
        assert "Example Processor 9; 4 cores; 16.0 GB; Linux 6.1; torch 2.13.0" in captions[name]
    assert "gqa-convert convert 3" in captions["merge-error"]
    assert "gqa-convert uptrain recipe.yaml seed=3</code>. Machine: cpu; Example Processor 9" in captions["recovery"]
    assert "80.0% of the gap" in captions["recovery"]


def test_the_table_joins_quality_time_and_bytes(made: dict[str, Any]) -> None:
    rows = rows_of(page_of(made), "quality")
    assert [(row["N"], row["method"]) for row in rows] == [
        ("12", "source"),
        ("4", "mean"),
        ("3", "mean"),
        ("3", "mean, uptrained"),
        ("1", "timed only"),
    ]
    for row in rows:
        groups = int(row["N"])
        decode, low, high = TIMES[groups]
        assert row["decode ms per token"] == f"{decode:.3f} ({low:.3f} to {high:.3f})"
        assert row["speed-up"] == f"{TIMES[12][0] / decode:.2f}x"
        assert row["K/V bytes per token"] == f"{groups * 256:,}"
        assert row["K/V ratio"] == f"{groups / 12:.3f}"
        if row["method"] in ("source", "mean"):
            loss, error = LOSSES[groups]
            assert row["loss, nats per token"] == f"{loss:.4f} ± {error:.4f}"
            assert (row["perplexity"], row["difference"], row["KL"], row["top-1"]) == (
                "7.500",
                "+0.1250 ± 0.0078",
                "0.0625 ± 0.0039",
                "87.50%",
            )
        else:
            assert {row[key] for key in ("loss, nats per token", "perplexity", "difference", "KL", "top-1")} == {"-"}


def test_the_page_begins_with_a_verdict(made: dict[str, Any], tmp_path: Path) -> None:
    page = page_of(made)
    words = " ".join(page.words.partition("Quality, time and bytes by N")[0].split())
    assert "no N loses at most 0.1 nats per token on" in words
    assert "its loss is 0.1250 ± 0.0078 above the source's 2.500" in words
    assert "bytes of K/V cache, " in words
    assert " times as fast." in words
    assert "## Verdict\n\nN = " in Path(made["markdown"]).read_text(encoding="utf-8")
    write_json(tmp_path / "c.json", {"kind": "benchmark", "results": [{"groups": 2}]})
    alone = page_of(make_report([tmp_path]).as_json())
    assert "No model was evaluated, so that nothing is known of quality." in alone.words


def joined(losses: dict[int, float]) -> Joined:
    rows = tuple(
        Row(
            groups, SOURCE if groups == 8 else "fit", f"m{groups}", Score(f"m{groups}", loss=loss), kv_bytes=groups * 10
        )
        for groups, loss in losses.items()
    )
    return Joined("a text", rows, None, None, (), ())


def test_the_verdict_names_the_smallest_n_within_the_limit() -> None:
    (said,) = verdicts([joined({8: 2.0, 4: 2.0625, 2: 2.09375, 1: 2.5})])
    assert said.startswith("N = 2 (fit, m2) is the smallest N that loses at most 0.1 nats per token on a text. ")
    assert "its loss is 0.09375 above the source's 2.000." in said
    assert said.endswith("It saves: a token takes 20 bytes of K/V cache.")
    (said,) = verdicts([joined({8: 2.0, 4: 2.25, 2: 2.5})])
    assert said.startswith("N = 4 (fit, m4) loses least; no N loses at most 0.1")
    assert verdicts([joined({4: 2.25})]) == [
        "The source was not evaluated on a text, so that the loss of its conversions is not known."
    ]
    assert verdicts([joined({8: 2.0})]) == ["No conversion of m8 with a known N was evaluated on a text."]


def test_every_cell_names_its_column_for_narrow_screens(made: dict[str, Any]) -> None:
    page = page_of(made)
    named = [attributes.get("data-column") for tag, attributes in page.tags if tag == "td"]
    headers = [header for header, *rows in page.tables.values() for _ in rows]
    assert named == [column for header in headers for column in header]
    assert "@media (max-width: 40rem)" in Path(made["html"]).read_text(encoding="utf-8")


def test_captions_have_no_keys_of_the_files(made: dict[str, Any]) -> None:
    words = page_of(made).words
    assert "_ms_" not in words
    assert "weights own" not in words


def test_other_tables(runs: Path, made: dict[str, Any]) -> None:
    page = page_of(made)
    (run_row,) = rows_of(page, "uptraining")
    assert (run_row["N"], run_row["tokens"], run_row["loss at the end"], run_row["gap recovered"]) == (
        "3",
        "12,288",
        "2.6250",
        "80.0%",
    )
    errors = json.loads((runs / "gqa-4" / "gqa_conversion.json").read_bytes())["merge_error"].values()
    row = next(row for row in rows_of(page, "conversions") if row["N"] == "4")
    assert row["mean error"] == f"{sum(errors) / len(errors):.4f}"
    assert row["highest"] == f"{max(errors):.4f}"
    assert len(rows_of(page, "times")) == len(TIMES)
    (ignored,) = rows_of(page, "ignored")
    assert ignored["file"].endswith("notes.json")
    assert made["ignored"][0]["file"] == str(runs / "notes.json")
    assert len(made["read"]) == 6


def test_the_page_needs_no_network_and_no_script(made: dict[str, Any]) -> None:
    text = Path(made["html"]).read_text(encoding="utf-8")
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "base"}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert value
                assert value.startswith("#"), (tag, name, value)
            assert not name.startswith("on")
            if "://" in (value or ""):
                assert name.startswith("xmlns")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', text)) | set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)


def test_colours_are_variables_that_both_schemes_define(made: dict[str, Any]) -> None:
    text = Path(made["html"]).read_text(encoding="utf-8")
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    light, dark = (
        set(re.findall(r"(--[\w-]+):", part))
        for part in text[text.index(":root") :].split("@media (prefers-color-scheme: dark)")[:2]
    )
    assert used <= light
    assert used <= dark & set(
        re.findall(r"(--[\w-]+):", text.split("@media (prefers-color-scheme: dark)")[1].split("}")[0])
    )
    body = text[text.index("<body>") :]
    assert not re.findall(r'style="[^"]*#[0-9a-f]{6}', body)
    for figure in made["figures"]:
        standalone = Path(figure["file"]).read_text(encoding="utf-8")
        assert "var(" not in standalone
        assert "#0101" not in standalone
        assert "#ffffff" in standalone


def assert_tables_have_columns(markdown: str) -> None:
    """All rows of a table as many."""
    for block in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_markdown_holds_the_tables_and_links_the_figures(made: dict[str, Any]) -> None:
    text = Path(made["markdown"]).read_text(encoding="utf-8")
    linked = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
    assert [str(Path(made["out"]) / name) for name in linked] == [figure["file"] for figure in made["figures"]]
    assert "| 2.7500 ± 0.0500 |" in text
    assert_tables_have_columns(text)
    assert "Example Processor 9" in text


def test_same_input_same_bytes(runs: Path, made: dict[str, Any], tmp_path: Path) -> None:
    again = make_report([runs], tmp_path / "again").as_json()
    first, second = ({path.name: path.read_bytes() for path in Path(each["out"]).iterdir()} for each in (made, again))
    assert first == second
    assert len(first) == 7


def test_names_are_no_markup(tmp_path: Path) -> None:
    model = '<b>"&\\x| `$x$`\u202e\ud800'
    write_json(tmp_path / "a\x1b\udcff.json", evaluation({model: (2.5, 0.5)}))
    timed = benchmark({3: (1.0, 0.5, 1.5)}, model=model, attention='</svg><script>alert("1")</script>')
    write_json(tmp_path / "b.json", timed)
    write_json(
        tmp_path / "c.json",
        {"groups": 3, "merge_error": {f"layers.0.{model}.k": 0.5, "layers.1.x.k": 0.25}, "method": model, "out": "x"},
    )
    made = make_report([tmp_path]).as_json()
    text = Path(made["html"]).read_text(encoding="utf-8")
    page = Page(text)
    assert "<b>" not in text
    assert "<script" not in text
    assert '<b>"&\\x| `$x$`\\u202e\\ud800' in page.words
    assert "a\\x1b\\udcff.json" in page.words
    markdown = Path(made["markdown"]).read_text(encoding="utf-8")
    assert_tables_have_columns(markdown)
    assert "<b>" not in markdown
    assert "<script" not in markdown
    assert made["notes"]
    assert "its N is not known" in made["notes"][0]


def test_what_is_missing_degrades(tmp_path: Path) -> None:
    """Nothing but names and N; a loss that is not finite; two texts; a context each."""
    write_json(tmp_path / "a.json", {"kind": "evaluate", "results": [{"model": "m"}]})
    write_json(tmp_path / "b.json", evaluation({"n": (None, None)}))
    write_json(tmp_path / "c.json", {"kind": "benchmark", "results": [{"groups": 2}]})
    made = make_report([tmp_path]).as_json()
    page = page_of(made)
    assert rows_of(page, "quality-1")[0]["N"] == "2"
    assert not [row for row in rows_of(page, "quality-1") if "loss, nats per token" in row]
    assert "Not measured: loss, nats per token; perplexity;" in page.words
    cells = [row["loss, nats per token"] for row in rows_of(page, "quality-2")]
    assert sorted(cells) == ["-", "NOT FINITE in 17 place(s)"]
    assert "- stands for not measured." in page.words
    assert "The source was not evaluated on" in page.words
    assert made["figures"] == []
    assert len(made["missing"]) == 5
    assert all(
        "gqa-convert" in each["advice"] or "benchmark an N" in each["advice"] or "known N" in each["advice"]
        for each in made["missing"]
    )


def test_missing_figures_say_which_command_makes_them(runs: Path, tmp_path: Path) -> None:
    made = make_report([runs / "gqa-3"], tmp_path / "out").as_json()
    assert [figure["name"] for figure in made["figures"]] == ["time-groups", "merge-error"]
    assert Path(made["html"]).read_text().count("<code>gqa-convert convert 3</code>. Machine: cpu; ") == 4
    advice = {each["title"]: each["advice"] for each in made["missing"]}
    assert "gqa-convert evaluate" in advice["Quality against time"]
    assert "gqa-convert benchmark" in advice["Quality against time"]
    assert "gqa-convert benchmark" in advice["Time against groups"]
    assert "gqa-convert uptrain" in advice["Recovery by uptraining"]
    (row,) = rows_of(page_of(made), "quality")
    assert row["K/V bytes per token"].endswith("(computed)")
    assert row["K/V ratio"] == "0.250"


def test_no_report_lands_in_a_checkpoint(runs: Path, tmp_path: Path) -> None:
    """It is published as it is."""
    shutil.copytree(runs / "gqa-3", tmp_path / "gqa-3")
    assert Path(make_report([tmp_path / "gqa-3"]).out) == tmp_path / "gqa-3-report"


def test_tasks_and_a_reference_and_an_unfinished_run(runs: Path, tmp_path: Path) -> None:
    scored = evaluation(
        {"m": (2.0, 0.1)},
        reference={"model": "teacher", "loss": 1.5},
        data={"source": "t.txt", "split": "train", "tokens_limit": 9},
    )
    scored["results"][0]["tasks"] = {"results": {"lambada": {"acc,none": 0.5, "acc_stderr,none": 0.25, "alias": "x"}}}
    write_json(tmp_path / "e.json", scored)
    write_json(tmp_path / "copy.json", scored)
    shutil.copytree(runs / "uptraining", tmp_path / "run", ignore=shutil.ignore_patterns("summary.json"))
    made = make_report([tmp_path]).as_json()
    page = page_of(made)
    assert rows_of(page, "tasks") == [
        {"model": "m", "task": "lambada", "metric": "acc,none", "value": "0.5000 ± 0.2500"}
    ]
    assert {row["model"] for row in rows_of(page, "quality")} >= {"m", "teacher"}
    assert "Quality on t.txt, tokens limit 9, causal, context 512, stride 256" in page.words
    command = f"gqa-convert uptrain {(tmp_path / 'run').resolve()}/resolved_recipe.yaml"
    assert f"Command: {command}. Machine: not recorded." in page.words
    (row,) = rows_of(page, "uptraining")
    assert (row["state"], row["loss at the end"]) == ("unfinished", f"{CURVE[-1][1]:.4f}")
    assert "loss of the source" not in row


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("broken.json", b'{"kind": "evaluate", ', "broken.json is not valid JSON"),
        ("nan.json", b'{"kind": "evaluate", "results": [{"model": "m", "loss": NaN}]}', "it holds NaN"),
        ("huge.json", b'{"kind": "evaluate", "results": [{"model": "m", "loss": 1e999}]}', "it holds 1e999"),
        ("deep.json", b"[" * 100_000, "not valid JSON"),
        ("bytes.json", b"\xff\xfe", "not valid JSON"),
        (
            "task.json",
            b'{"kind": "evaluate", "results": [{"model": "m", "tasks": {"t": {"acc,none": 1%s}}}]}' % (b"0" * 400),
            "acc,none of t of",
        ),
        ("uptrain.json", b'{"kind": "uptrain", "steps": 1}', "uptrain.json names no model"),
        ("kind.json", b'{"kind": "telepathy", "machine": {}}', "'telepathy'"),
        ("text.json", b'{"kind": "evaluate", "results": [{"model": "m", "loss": "low"}]}', "loss of results[0] of"),
        ("none.json", b'{"kind": "evaluate", "results": []}', "holds no results"),
        ("list.json", b'{"kind": "benchmark", "results": {"groups": 1}}', "a list of objects"),
        ("groups.json", b'{"kind": "benchmark", "results": [{"groups": 0}]}', "a number of K/V heads"),
        ("machine.json", b'{"kind": "benchmark", "machine": 3, "results": [{"groups": 1}]}', "machine of"),
        ("other.json", b'{"a": 1}', "nothing to report on"),
        ("array.json", b"[1, 2]", "nothing to report on"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ReportError) as problem:
        make_report([tmp_path])
    assert words in str(problem.value)
    assert name in str(problem.value) or str(tmp_path) in str(problem.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_the_command_line(runs: Path, made: dict[str, Any], tmp_path: Path) -> None:
    """Another process, with other hashes of strings, makes the same bytes."""
    assert_mistake(run("report", tmp_path / "absent"), "absent does not exist")
    result = run("report", runs, "--out", tmp_path / "out", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["html"] == str(tmp_path / "out" / "report.html")
    assert result.stderr == ""
    result = run("report", runs, "--out", tmp_path / "out")
    assert f"report   {tmp_path / 'out' / 'report.html'}" in result.stdout
    assert f"ignored  {runs / 'notes.json'}" in result.stderr
    assert (tmp_path / "out" / "report.html").read_bytes() == Path(made["html"]).read_bytes()


def test_links_to_nowhere_and_pipes(runs: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    write_json(
        tmp_path / "e.json", evaluation({str(runs / "gqa-3"): (2.0, 0.1), "x" * 5000: (2.5, 0.1), "a\0b": (2.5, 0.1)})
    )
    made = make_report([tmp_path]).as_json()
    assert made["ignored"] == [{"file": str(tmp_path / "pipe.json"), "why": "no regular file"}]
    assert len(made["notes"]) == 2
    shutil.copyfile(runs / "gqa-3" / "config.json", tmp_path / "config.json")
    (tmp_path / "gqa_conversion.json").touch()
    assert {Path(each["file"]).name: each["why"][:5] for each in make_report([tmp_path]).as_json()["ignored"]} == {
        "pipe.json": "no re",
        "gqa_conversion.json": "empty",
    }
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere.json")
    with pytest.raises(ReportError, match=r"gone.json can't be read \(No such file"):
        make_report([tmp_path])


def test_folders_that_can_not_be_used(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"nothing to report on in .*, no JSON file found"):
        make_report([tmp_path])
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="can't be written"):
        make_report([runs], tmp_path / "file")
    with pytest.raises(OptionError, match="no folder"):
        make_report([])
    with pytest.raises(ReportError, match="1 other JSON"):
        make_report([runs / "gqa-3" / "config.json"])
    with pytest.raises(ReportError, match="does not exist"):
        make_report(["x" * 300])


def test_files_of_others_are_left_alone(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.md"
    page.write_text("my own notes")
    mine = tmp_path / "report-mine.svg"
    mine.write_text("<svg/>")
    with pytest.raises(OutputError, match="report did not write it"):
        make_report([runs], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report-mine.svg", "report.md"]
    make_report([runs], tmp_path, overwrite=True)
    assert (tmp_path / "report-recovery.svg").is_file()
    assert (tmp_path / "report.md.old").read_text() == "my own notes"
    make_report([runs / "gqa-3"], tmp_path)
    assert "made by gqa-convert report" in page.read_text()
    assert mine.read_text() == "<svg/>"
    assert not (tmp_path / "report-recovery.svg").exists()


@pytest.mark.parametrize("which", [0, 1, -1])
def test_nothing_is_seen_half_written(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, Any], which: int
) -> None:
    """The disk fills up at one of the files: an old report stays as it was, and a new folder does not come to be."""
    old, new = tmp_path / "old", tmp_path / "new"
    make_report([runs / "gqa-3"], old)
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    count = len(made["figures"]) + 2
    calls: list[int] = []

    def fail(handle: int) -> None:
        calls.append(handle)
        if len(calls) == which % count + 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "os", SimpleNamespace(fsync=fail))
    for out in (old, new):
        calls.clear()
        with pytest.raises(OutputError, match="No space left"):
            make_report([runs], out)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_without_matplotlib(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"gqa-convert\[plot\]"):
        make_report([runs], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert issubclass(MissingExtraError, GQAConvertError)
    assert drawing.short("x" * 99) == "x" * 21 + "…" + "x" * 22
