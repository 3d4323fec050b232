"""Runs the checks on what the models compute: OUT first, then SOURCE."""

from collections.abc import Callable
from typing import Any

from gqa_convert.verify.behaviour.comparison import Comparison
from gqa_convert.verify.behaviour.model_loading import load_model
from gqa_convert.verify.behaviour.out_run import OutRun, run_out
from gqa_convert.verify.behaviour.probe import STEPS
from gqa_convert.verify.behaviour.tokenizers import check_tokenizer
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.report import Failure, Finding
from gqa_convert.verify.runner import CheckRunner
from gqa_convert.verify.stored import StoredResult

Progress = Callable[[str, int, int], None]

_PASSES = STEPS + 5
"""Forward passes of both models, for the progress bar."""


def check_behaviour(
    runner: CheckRunner,
    inputs: Inputs,
    stored: StoredResult,
    *,
    seed: int,
    max_text_tokens: int | None,
    progress: Progress,
) -> None:
    """Run both models, one in memory at a time.

    Args:
        runner: runs the checks.
        inputs: both checkpoints.
        stored: what the checks on stored data found. Without a geometry, OUT is only loaded.
        seed: of the random tokens.
        max_text_tokens: tokens of the text that are read at most.
        progress: called with the progress of the work.
    """
    if not inputs.runs:
        runner.check("behaviour", lambda: _not_run(inputs.family.model_type))
        return
    if stored.own_file is not None or inputs.has_original_class:
        runner.check("tokenizer", lambda: _check_tokenizer(inputs))
    if stored.own_file is False:
        for name in ("loads", "logits", "cache heads", "cached decoding"):
            runner.check(name, _not_executed)
        return
    step = _counter(progress)
    parameters = sum(map(inputs.weights.numbers, inputs.weights.file_of))
    out = run_out(
        runner,
        inputs,
        stored,
        parameters=parameters,
        seed=seed,
        max_text_tokens=max_text_tokens,
        step=step,
        text_progress=lambda done, total: progress("text", done, 2 * total),
    )
    if out is None:
        return
    source = runner.read(
        "source loads", lambda: load_model(inputs.source, parameters), lambda found: Finding(found.class_name)
    )
    if source is None:
        return
    rewritten = out.probe.output(source.model) if inputs.has_original_class else None
    Comparison(out, source.model, inputs, stored).run(
        runner, step, lambda done, total: progress("text", total + done, 2 * total)
    )
    if inputs.is_rewritten:
        del source
        runner.check("rewritten source", lambda: _same_as_original(inputs, out, rewritten, parameters))


def _counter(progress: Progress) -> Callable[[], None]:
    """A function to call after each pass."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress("logits", done, _PASSES)

    return step


def _check_tokenizer(inputs: Inputs) -> Finding:
    """transformers 5 has no tokenizer class for gpt_bigcode, so that its class may be another."""
    other_class = inputs.is_rewritten and inputs.family.model_type == "gpt_bigcode"
    return check_tokenizer(inputs.out, inputs.original.folder, other_class=other_class)


def _same_as_original(inputs: Inputs, out: OutRun, rewritten: Any, parameters: int) -> Finding:
    """The rewritten SOURCE computes what SOURCE computes."""
    if rewritten is None:
        return Finding(f"not compared: {inputs.why_not_loaded}")
    original = load_model(inputs.original.folder, parameters).model
    error = out.probe.difference(rewritten, out.probe.output(original))
    detail = f"largest difference {error:.2g} of the spread of the {out.outputs} of SOURCE, a {inputs.original_config['model_type']}"
    numbers = {"error": error, "tolerance": out.probe.tolerance}
    if not error <= out.probe.tolerance:
        raise Failure(f"{detail}, over the tolerance of {out.probe.tolerance:g}", numbers)
    return Finding(detail, numbers)


def _not_run(model_type: str) -> Finding:
    return Finding(
        f"not run: transformers has no class of type {model_type}, and code in checkpoints is never executed"
    )


def _not_executed() -> Finding:
    raise Failure("not run: OUT's modelling file did not pass its check, and other code is not executed")
