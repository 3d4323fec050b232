"""Which results a card states: those of the checkpoint as it is, the newest on each text, and
differences that are paired.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import ReportError
from gqa_convert.hub.publishing import publish
from gqa_convert.hub.repository import PublishOptions
from gqa_convert.measuring.results import (
    AskedQuestions,
    Difference,
    EvaluationFile,
    Found,
    ModelScores,
    ScoredText,
    write_result,
)
from gqa_convert.runtime.machine import Machine
from tests.helpers.checkpoints import write_llama

PARTS: dict[str, Any] = {
    "device": "cpu",
    "cores": 4,
    "memory_bytes": 16_000_000_000,
    "system": "Linux 6.1",
}
MACHINE = Machine(**PARTS, processor="Example Processor 9", versions={"torch": "2.13.0"})
COMMAND = ["gqa-convert", "evaluate", "a b"]
HEAD: dict[str, Any] = {"created": "2026-05-04T03:02:01Z", "machine": MACHINE, "command": COMMAND}
PAIRED = Difference(to="source", loss=0.125, loss_standard_error=0.0078)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    convert_checkpoint(
        write_llama(folder / "source"), folder / "out", 3, ConversionOptions(method="mean")
    )
    convert_checkpoint(folder / "source", folder / "another", 4, ConversionOptions(method="mean"))
    return folder


def score(folder: Path, loss: float | None = 2.5, **more: Any) -> ModelScores:
    found = fingerprint(open_checkpoint(folder))
    known: dict[str, Any] = {
        "model": folder.name,
        "fingerprint": found,
        "loss": loss,
        "tokens": 4096,
    }
    figures = {"loss_standard_error": 0.0625, "bits_per_byte": 1.25}
    return ModelScores(**known | figures | more)


def evaluation(path: Path, *scores: ModelScores, text: str = "held out.txt", **more: Any) -> Path:
    data = more.pop("data", ScoredText(source=text, split="train", text_field="text"))
    values: dict[str, Any] = HEAD | {"data": data, "objective": "causal", "context": 512} | more
    write_result(path, EvaluationFile(**values, results=list(scores)))
    return path


def card(out: Path, *results: Path) -> tuple[str, list[str]]:
    """The card, and the warnings that speak of results."""
    made = publish(out, PublishOptions("me/gqa-3", results=results, license="mit"), dry_run=True)
    return (out / "README.md").read_text(), [each for each in made.warnings if "left out" in each]


def test_losses_of_the_model_and_its_source(base: Path, tmp_path: Path) -> None:
    out, source = base / "out", base / "source"
    kl = {"kl": 0.0625, "kl_standard_error": 0.0039}
    ours = score(out, 3.125, difference=PAIRED, **kl, note="see this")
    reference = score(source)
    file = evaluation(
        tmp_path / "e.json", reference, ours, score(base / "another", 9.75), reference=reference
    )
    text, warnings = card(out, file)
    assert warnings == []
    for words in (
        (
            "- **Loss: 3.125 ± 0.062 nats per token** where the source has 2.5 ± 0.062, "
            "on `4,096 tokens of held out.txt, causal, at most 512 tokens at once`."
        ),
        "| model | loss | bits/byte | difference | KL |\n| --- | ---: | ---: | ---: | ---: |\n",
        "| source | 2.5000 ±0.0625 | 1.2500 |  |  |\n",
        "| this model | 3.1250 ±0.0625 | 1.2500 | +0.1250 ±0.0078 | 0.0625 ±0.0039 |\n\n",
        "Note: this model: see this",
        "Note: this model: differences are from source, paired over the same text",
        "Measured on: cpu; Example Processor 9; 4 cores; 16.0 GB; Linux 6.1; torch 2.13.0.",
    ):
        assert words in text
    assert "9.75" not in text
    assert "loss was not measured" not in text
    assert "Loss: not measured" not in text


def found(share: float, difference: float | None) -> list[Found]:
    error = None if difference is None else 0.03125
    parts = [
        Found(
            kind=kind,
            length=length,
            questions=96,
            found=share,
            found_standard_error=0.04,
            difference=difference,
        )
        for kind, length in ((None, None), (None, 2048), ("needles", None), ("needles", 2048))
    ]
    parts[0] = parts[0].model_copy(update={"difference_standard_error": error})
    return parts


@pytest.mark.parametrize("with_text", [True, False])
def test_what_the_model_and_its_source_find(base: Path, tmp_path: Path, with_text: bool) -> None:
    scored = {} if with_text else {"loss": None}
    ours = score(base / "out", retrieval=found(0.5, -0.25), **scored)
    source = score(base / "source", retrieval=found(0.75, None), **scored)
    questions = AskedQuestions(lengths=[2048], questions=24)
    more = {} if with_text else {"data": None}
    text, _ = card(
        base / "out", evaluation(tmp_path / "e.json", source, ours, questions=questions, **more)
    )
    title = "Exact answers in texts of 2,048 tokens, 24 questions of each kind at each length:\n\n"
    table = text[text.index(title) + len(title) :].split("\n\n")[0].splitlines()
    assert [table[0], *table[2:]] == [
        "| model | all (96) | difference | 2,048 (96) | needles (96) |",
        "| source | 75% ±4% |  | 75% ±4% | 75% ±4% |",
        "| this model | 50% ±4% | -25% ±3% | 50% ±4% | 50% ±4% |",
    ]
    row = "| this model | 2.5000 ±0.0625 | 1.2500 |"
    assert (row in text) == with_text
    assert "loss was not measured" not in text
    assert text.count("gqa-convert evaluate 'a b'") == 1


def test_results_of_other_checkpoints_stay_out(base: Path, tmp_path: Path) -> None:
    """A folder of the same name is another checkpoint, and so is the same folder after a new
    conversion.
    """
    strange = shutil.copytree(base / "another", tmp_path / "elsewhere" / "out")
    moved = shutil.copytree(base / "out", tmp_path / "moved")
    file = evaluation(tmp_path / "e.json", score(strange))
    text, warnings = card(moved, file)
    assert "\nLoss: not measured." in text
    assert warnings[0].startswith(
        f"{file} is left out: it measured other models than {moved} as it is now"
    )
    file.unlink()
    evaluation(file, score(base / "out"))
    assert card(moved, file)[1] == []
    record = json.loads((moved / "gqa_conversion.json").read_bytes())
    (moved / "gqa_conversion.json").write_text(
        json.dumps(record | {"created": "2030-01-01T00:00:00Z"})
    )
    assert len(card(moved, file)[1]) == 1


def test_files_that_hold_no_results(base: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("[]")
    for file, words in (
        (tmp_path / "nothing.json", "does not exist"),
        (tmp_path / "folder", "can't be read"),
        (tmp_path / "text.txt", "can't be read"),
    ):
        with pytest.raises(ReportError, match=words):
            card(base / "out", file)
