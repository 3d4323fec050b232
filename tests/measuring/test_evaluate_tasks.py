"""lm-eval's tasks: its Python API as it is where it is installed, and a stand-in that records how it is called."""

import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gqa_convert.errors import DataError, OptionError
from gqa_convert.measuring.evaluate.run import Settings, evaluate
from gqa_convert.measuring.evaluate.tasks import Tasks
from tests.helpers.evaluate_models import causal, command_line

FOUND = {
    "results": {"arc": {"acc,none": 0.25, "acc_stderr,none": float("nan"), "alias": "arc"}},
    "config": {"model_dtype": object},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for lm-eval that knows the task arc, and what it was asked."""
    made: list[Any] = []

    class TaskManager:
        def __init__(self, include_path: str | None = None) -> None:
            made.append(include_path)

        def match_tasks(self, names: list[str]) -> list[str]:
            return [name for name in names if name == "arc"]

    def simple_evaluate(model: Any, **options: Any) -> dict[str, Any]:
        print("noise")
        made.append((model, options))
        if options["limit"] == 13:
            raise ConnectionError("no network\nat all")
        return FOUND

    names = ("lm_eval", "lm_eval.tasks", "lm_eval.models", "lm_eval.models.huggingface")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    modules["lm_eval"].simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    modules["lm_eval.tasks"].TaskManager = TaskManager  # type: ignore[attr-defined]
    modules["lm_eval.models.huggingface"].HFLM = lambda **options: options  # type: ignore[attr-defined]
    return made


def test_results_are_stored_as_they_are(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    causal(tmp_path / "model")
    (tmp_path / "tasks").mkdir()
    code, out, err = command_line(
        monkeypatch,
        capsys,
        tmp_path / "model",
        "--tasks",
        "arc",
        "--tasks-folder",
        tmp_path / "tasks",
        "--fewshot",
        "3",
        "--task-limit",
        "7",
        "--seed",
        "5",
        "--batch",
        "2",
        "--json",
    )
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert result["tasks"] == {
        "results": {"arc": {"acc,none": 0.25, "acc_stderr,none": None, "alias": "arc"}},
        "config": {"model_dtype": "<class 'object'>"},
    }
    assert (result["loss"], result["scored_nan"]) == (None, 0)
    folder, (model, options) = calls
    assert folder == str(tmp_path / "tasks")
    assert (type(model["pretrained"]).__name__, model["batch_size"]) == ("LlamaForCausalLM", 2)
    assert (options["tasks"], options["num_fewshot"], options["limit"], options["random_seed"]) == (["arc"], 3, 7, 5)
    code, out, err = command_line(monkeypatch, capsys, tmp_path / "model", "--tasks", "arc")
    assert code == 0, err
    assert "noise" not in out
    assert "acc" in out
    assert "0.2500" in out


def test_mistakes(calls: list[Any], tmp_path: Path) -> None:
    causal(tmp_path / "model")
    given = [str(tmp_path / "model")], None, Settings(device="cpu")
    with pytest.raises(OptionError, match="no task 'nonsense'"):
        evaluate(*given, tasks=Tasks(["arc", "nonsense"]))
    with pytest.raises(OptionError, match="is not a folder"):
        evaluate(*given, tasks=Tasks(["arc"], tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"could not run arc \(no network at all\)"):
        evaluate(*given, tasks=Tasks(["arc"], limit=13))
    assert len(calls) == 3


def test_a_task_of_ones_own_with_lm_eval_itself(tmp_path: Path) -> None:
    """Each question is the first words of a text, and its answers are what the model finds likely and unlikely to
    follow.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tests.helpers.data_helpers import demo_tokenizer

    causal(tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(), demo_tokenizer()
    rows, right = [], []
    for number, question in enumerate(("import", "return", "while not", "def")):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokenizer(question)["input_ids"]])).logits[0, -1]
        choices = [" self", " None"]
        ids = [tokenizer(choice)["input_ids"] for choice in choices]
        assert all(len(each) == 1 for each in ids)
        rows.append({"question": question, "choices": choices, "answer": number % 2})
        right.append(int(logits[ids[1][0]] > logits[ids[0][0]]) == number % 2)
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "q.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "target_delimiter": "",
    }
    (tmp_path / "own.yaml").write_text(json.dumps(task))
    report = evaluate([str(tmp_path / "model")], None, Settings(device="cpu"), tasks=Tasks(["own"], tmp_path)).as_json()
    assert report["results"][0]["tasks"]["results"]["own"]["acc,none"] == sum(right) / len(right)
