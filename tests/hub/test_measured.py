"""Which results a card states: those of the checkpoint as it is, the newest on each text, and differences that are paired."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.machine import Machine
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import ReportError
from gqa_convert.hub.options import PublishOptions
from gqa_convert.hub.publishing import publish
from gqa_convert.measuring.results import (
    AskedQuestions,
    BenchmarkFile,
    Difference,
    EvaluationFile,
    Found,
    ModelScores,
    Retrieval,
    ScoredText,
    TimedCell,
    write_result,
)
from tests.helpers.checkpoints import write_llama

PARTS: dict[str, Any] = {"device": "cpu", "cores": 4, "memory_bytes": 16_000_000_000, "system": "Linux 6.1"}
MACHINE = Machine(**PARTS, processor="Example Processor 9", versions={"torch": "2.13.0"})
COMMAND = ["gqa-convert", "evaluate", "a b"]
HEAD: dict[str, Any] = {"created": "2026-05-04T03:02:01Z", "machine": MACHINE, "command": COMMAND}
PAIRED = Difference(to="source", loss=0.125, loss_standard_error=0.0078)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    convert_checkpoint(write_llama(folder / "source"), folder / "out", 3, ConversionOptions(method="mean"))
    convert_checkpoint(folder / "source", folder / "another", 4, ConversionOptions(method="mean"))
    return folder


def score(folder: Path, loss: float | None = 2.5, **more: Any) -> ModelScores:
    known: dict[str, Any] = {"model": folder.name, "fingerprint": fingerprint(folder), "loss": loss, "tokens": 4096}
    figures = {"loss_standard_error": 0.0625, "perplexity": 7.5, "bits_per_byte": 1.25}
    return ModelScores(**known | figures | more)


def evaluation(path: Path, *scores: ModelScores, text: str = "held out.txt", **more: Any) -> Path:
    data = more.pop("data", ScoredText(source=text, split="train", text_field="text"))
    values: dict[str, Any] = HEAD | {"data": data, "objective": "causal", "context": 512} | more
    write_result(path, EvaluationFile(**values, results=list(scores)), overwrite=True)
    return path


def benchmark(path: Path, model: Path, times: dict[int, float]) -> Path:
    quartiles = {"decode_ms_low": 1.5, "decode_ms_high": 99.5}
    cells = []
    for groups, time in times.items():
        for context in (512, 1024):
            ms = time * context / 512
            cells.append(TimedCell(groups=groups, batch=2, context=context, decode_ms_per_token=ms, **quartiles))
    known = {"model": model.name, "fingerprint": fingerprint(model), "dtype": "float32", "weights": "own"}
    write_result(path, BenchmarkFile(**HEAD, **known, results=cells), overwrite=True)
    return path


def card(out: Path, *results: Path) -> tuple[str, list[dict[str, Any]], list[str]]:
    """The card, the results in its metadata, and the warnings that speak of results."""
    made = publish(out, PublishOptions("me/gqa-3", results=results, license="mit"), dry_run=True)
    text = (out / "README.md").read_text()
    index = yaml.safe_load(text.split("---\n")[1]).get("model-index", [{"results": []}])
    return text, index[0]["results"], [each for each in made.warnings if "left out" in each]


def headline(text: str) -> str:
    return text.split("gqa-convert made this model")[0]


def test_losses_of_the_model_and_its_source(base: Path, tmp_path: Path) -> None:
    out, source = base / "out", base / "source"
    kl = {"kl": 0.0625, "kl_standard_error": 0.0039, "top1_agreement": 0.875}
    ours = score(out, 3.125, difference=PAIRED, **kl, note="see this")
    reference = score(source)
    file = evaluation(tmp_path / "e.json", reference, ours, score(base / "another", 9.75), reference=reference)
    text, index, warnings = card(out, file)
    assert warnings == []
    for words in (
        "- **Loss: 0.125 ± 0.0078 above the source's 2.5 nats per token**, on `held out.txt, causal, context 512`.",
        "| source | 2.5 ± 0.062 | 7.5 | 1.25 | 4,096 |",
        "| this model | 3.125 ± 0.062 | 7.5 | 1.25 | 4,096 |",
        "Paired difference in loss to the source: 0.125 ± 0.0078 nats per token.",
        "KL divergence from the source: 0.0625 ± 0.0039 nats per token; both have the same first choice for 87.5% of the tokens.",
        "Note of the evaluation: see this",
        "Measured on: cpu; Example Processor 9; 4 cores; 16.0 GB; Linux 6.1; torch 2.13.0.",
    ):
        assert words in text
    assert "9.75" not in text
    assert "quality was not measured" not in text
    (entry,) = index
    name = "held out.txt, causal, context 512"
    assert entry["dataset"] == {"name": name, "type": "text", "config": name}
    figures = {metric["type"]: metric["value"] for metric in entry["metrics"]}
    assert figures == {"loss": 3.125, "perplexity": 7.5, "bits_per_byte": 1.25, "kl": 0.0625}


def found(share: float, difference: float | None) -> Retrieval:
    error = None if difference is None else 0.03125
    parts = [
        Found(kind=kind, length=length, questions=96, found=share, found_standard_error=0.04, difference=difference)
        for kind, length in ((None, None), (None, 2048), ("needles", None), ("needles", 2048))
    ]
    parts[0] = parts[0].model_copy(update={"difference_standard_error": error})
    return Retrieval(found=parts, written_loss=3 + share, written_loss_standard_error=0.125)


@pytest.mark.parametrize("with_text", [True, False])
def test_what_the_model_and_its_source_find(base: Path, tmp_path: Path, with_text: bool) -> None:
    key = {"key_tokens": 77, "key_loss": 1.5, "key_loss_standard_error": 0.25} if with_text else {"loss": None}
    ours = score(base / "out", retrieval=found(0.5, -0.25), **key, key_kl=0.75 if with_text else None)
    source = score(base / "source", retrieval=found(0.75, None), **key)
    questions = AskedQuestions(lengths=[2048], questions=24, seed=0)
    more = {} if with_text else {"data": None}
    text, index, _ = card(base / "out", evaluation(tmp_path / "e.json", source, ours, questions=questions, **more))
    line = "- **Retrieval: 50 ±4% of questions on long texts answered exactly** where the source answers 75 ±4%."
    assert line in headline(text)
    assert "24 of each kind, in percent; differences are paired, from the source:\n\n| kind" in text
    table = text[text.index("| kind | tokens") :].split("\n\n")[0].splitlines()
    assert table[2:] == [
        "| all | all | 75 ±4 | 50 ±4 | -25 | 3 |",
        "| all | 2,048 | 75 ±4 | 50 ±4 | -25 |  |",
        "| needles | all | 75 ±4 | 50 ±4 | -25 |  |",
    ]
    written = "On the text that this model writes, the loss of the source is 3.5 ± 0.12 nats per token, and 3.75 ± 0.12 on its own."
    assert written in text
    tokens = "On the 77 tokens that a long context makes likelier (LongPPL's key tokens): loss 1.5 ± 0.25 where the source has 1.5 ± 0.25; KL divergence 0.75 nats per token."
    assert (tokens in text) == with_text
    assert bool(index) == with_text
    assert ("Loss and tasks: not measured" in text) != with_text
    assert "quality was not measured" not in text
    assert text.count("gqa-convert evaluate 'a b'") == 1 + with_text


def test_a_hub_dataset_keeps_its_id(base: Path, tmp_path: Path) -> None:
    data = ScoredText(source="org/corpus", name="en", split="test", revision="0" * 40, tokens_limit=4096)
    _, index, _ = card(base / "out", evaluation(tmp_path / "e.json", score(base / "out"), data=data))
    dataset = index[0]["dataset"]
    assert dataset.pop("name").startswith("org/corpus, causal, split test, name en, ")
    assert dataset == {"type": "org/corpus", "config": "en", "split": "test", "revision": "0" * 40}


def test_results_of_other_checkpoints_stay_out(base: Path, tmp_path: Path) -> None:
    """A folder of the same name is another checkpoint, and so is the same folder after a new conversion."""
    strange = shutil.copytree(base / "another", tmp_path / "elsewhere" / "out")
    moved = shutil.copytree(base / "out", tmp_path / "moved")
    file = evaluation(tmp_path / "e.json", score(strange))
    text, index, warnings = card(moved, file)
    assert index == []
    assert "Loss and tasks: not measured." in text
    assert warnings[0].startswith(f"{file} is left out: it measured other models than {moved} as it is now")
    evaluation(file, score(base / "out"))
    assert card(moved, file)[1] != []
    record = json.loads((moved / "gqa_conversion.json").read_bytes())
    (moved / "gqa_conversion.json").write_text(json.dumps(record | {"created": "2030-01-01T00:00:00Z"}))
    assert card(moved, file)[1] == []


@pytest.mark.parametrize("timed", ["source", "out"])
def test_times_of_the_model_and_its_source(base: Path, tmp_path: Path, timed: str) -> None:
    file = benchmark(tmp_path / "b.json", base / timed, {12: 10.0, 4: 6.0, 3: 5.0})
    text, _, warnings = card(base / "out", file)
    assert warnings == []
    step = "- **Decode step: 2.00 times as fast as the source's** in transformers on cpu; Example Processor 9."
    assert step in headline(text)
    assert f"Decode time of `{timed}` (float32, own weights):" in text
    assert "| 12 | 2 | 512 | 10 | 1.5 | 99.5 |  |" in text
    assert "| 3 | 2 | 1,024 | 10 | 1.5 | 99.5 |  |" in text
    assert "| 4 | 2 |" not in text
    assert "Decode speed: not measured" not in text


def lm_eval(path: Path, model: str, **more: Any) -> Path:
    metrics = {"alias": "piqa", "acc,none": 0.625, "acc_stderr,none": 0.0125, "exact_match,strict": 1}
    content = {"lm_eval_version": "0.4.9", "model_name": model, "n-shot": {"piqa": 5}, "results": {"piqa": metrics}}
    path.write_text(json.dumps(content | more))
    return path


def test_tasks_of_lm_eval(base: Path, tmp_path: Path) -> None:
    text, index, warnings = card(base / "out", lm_eval(tmp_path / "tasks.json", str(base / "out")))
    assert warnings == []
    assert "Tasks of lm-eval 0.4.9:" in text
    assert "| `piqa` | `acc,none` | 5 | 0.625 ± 0.013 |" in text
    assert "| `piqa` | `exact_match,strict` | 5 | 1 |" in text
    assert index[0]["dataset"]["type"] == "piqa"
    assert [(each["type"], each["value"]) for each in index[0]["metrics"]] == [("acc", 0.625), ("exact_match", 1.0)]
    assert card(base / "out", lm_eval(tmp_path / "tasks.json", "me/gqa-3"))[2] == []
    for other in ("somewhere/else", str(base / "another")):
        assert len(card(base / "out", lm_eval(tmp_path / "tasks.json", other))[2]) == 1


def test_files_that_hold_no_results(base: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("[]")
    for file, words in (
        (tmp_path / "nothing.json", "does not exist"),
        (tmp_path / "folder", "can't be read"),
        (tmp_path / "text.txt", "can't be read"),
        (lm_eval(tmp_path / "tasks.json", "m", results=[]), "can't be read"),
    ):
        with pytest.raises(ReportError, match=words):
            card(base / "out", file)
