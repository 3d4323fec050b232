"""Runs transformers, then each engine, and reports the differences."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

import numpy as np

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import MissingExtraError, SourceNotFoundError
from gqa_convert.families.layerwise import is_decilm
from gqa_convert.families.loading import TASKS, auto_class, check_language_model, read_config
from gqa_convert.families.table import FAMILIES
from gqa_convert.measuring import Progress, no_progress

from .engines import ENGINES, engine_named, find_interpreter
from .reference import NEEDS_HEAD, ask_transformers
from .request import NEW_TOKENS, Request
from .worker import FAILED, OK, SKIPPED, UNSUPPORTED, Outcome, ask

TOLERANCE = 1e-3
"""Difference of logits that is allowed, as a share of the spread between the reference's highest and lowest logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport(Result):
    """What `check_serving` found.

    Attributes:
        out: the checkpoint's folder.
        model_type: of its config.
        transformers: the version that the engines are compared with.
        prompts: the lengths of the prompts; empty if no engine ran.
        new_tokens: how many tokens each prompt is continued by.
        clients: for each engine `client` (its name), `version`, `status` (ok, failed, not supported or skipped) and
            `detail`; for one that ran also what `compare` returns.
        passed: no engine failed, at least one was right, and no named one was skipped.
    """

    out: str
    model_type: str | None
    transformers: str
    prompts: tuple[int, ...]
    new_tokens: int = NEW_TOKENS
    clients: tuple[JsonObject, ...]
    passed: bool


def check_serving(
    out: Path,
    names: Collection[str] = (),
    *,
    pythons: Mapping[str, str] | None = None,
    minutes: float = 60.0,
    progress: Progress = no_progress,
) -> ServingReport:
    """Compare serving engines with transformers on a checkpoint, all in float32.

    Args:
        out: a checkpoint folder.
        names: of engines; empty for all.
        pythons: Python interpreters by engine name; the engines named here are run too.
        minutes: time limit for each engine.
        progress: called with the name of a stage, the steps done and the number of steps.

    Raises:
        OptionError: a name is unknown.
        SourceNotFoundError: `out` is not a checkpoint.
        CorruptCheckpointError: transformers itself can't load it.
        NoLanguageModelError: it was saved without its language-model head.
    """
    import transformers

    pythons = pythons or {}
    named = [*names, *pythons]
    for name in named:
        engine_named(name)
    out = local_path(out)
    config = read_config(out)
    if not config:
        raise SourceNotFoundError(f"{out} holds no config.json that can be read: name the folder of a checkpoint")
    check_language_model(str(out), config, NEEDS_HEAD)
    reason = why_unsupported(out, config)
    request: Request | None = None
    reference = Outcome(OK)
    clients: list[JsonObject] = []
    chosen = [name for name in ENGINES if not names or name in named]
    for name in chosen:
        progress("running", len(clients), len(chosen))
        clients.append({"client": name, "version": None, "status": UNSUPPORTED, "detail": reason})
        if reason:
            continue
        try:
            python, version = find_interpreter(name, pythons.get(name))
        except MissingExtraError as problem:
            clients[-1] |= {"status": SKIPPED, "detail": str(problem)}
            continue
        if request is None:
            prompts, reference = ask_transformers(out)
            request = _request(out, config, prompts, reference)
        outcome = ask(python, ENGINES[name].module, request, minutes * 60)
        clients[-1] |= {"version": version, "status": outcome.status, "detail": outcome.detail}
        if outcome.status == OK:
            clients[-1] |= compare(reference, outcome, request.prompts)
    states = [client["status"] for client in clients]
    missing = [client for client in clients if client["status"] == SKIPPED and client["client"] in named]
    return ServingReport(
        out=str(out),
        model_type=config.get("model_type"),
        transformers=transformers.__version__,
        prompts=tuple(map(len, request.prompts)) if request else (),
        clients=tuple(clients),
        passed=OK in states and FAILED not in states and not missing,
    )


def why_unsupported(folder: Path, config: JsonObject) -> str:
    """The reason why engines can't load a checkpoint, empty if there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = str(config.get("model_type"))
    if is_decilm(config):
        return "" if has_our_code(folder, config) else "its code is not the modelling file that convert writes"
    is_converted = model_type in FAMILIES and FAMILIES[model_type].is_converted
    if is_converted or ("auto_map" in config and model_type not in CONFIG_MAPPING_NAMES):
        return f"{model_type} comes with a modelling file, which only transformers 5 runs"
    if auto_class(config) != TASKS[0]:
        return f"{model_type} is an encoder-decoder or reads more than text, and only language models are compared"
    return ""


def has_our_code(folder: Path, config: JsonObject) -> bool:
    """Whether a DeciLM names no code but this package's modelling file, which engines then may run."""
    if not is_decilm(config):
        return False
    modeling = FAMILIES[str(config["model_type"])].modeling
    assert modeling is not None
    named = config.get("auto_map") or {}
    if not all(str(place).startswith(f"{modeling.file}.") for place in named.values()):
        return False
    copies = [folder / file.name for file in modeling.files]
    return all(
        copy.is_file() and copy.read_bytes() == file.read_bytes()
        for copy, file in zip(copies, modeling.files, strict=True)
    )


def _request(out: Path, config: JsonObject, prompts: list[list[int]], reference: Outcome) -> Request:
    return Request(
        folder=str(out.resolve()),
        config=config,
        dtype="float32",
        context=max(map(len, prompts)) + NEW_TOKENS,
        run_code=has_our_code(out, config),
        prompts=prompts,
        sequences=[prompt + made[:-1] for prompt, made in zip(prompts, reference.tokens, strict=True)],
    )


def compare(reference: Outcome, found: Outcome, prompts: list[list[int]]) -> JsonObject:
    """Compare two answers. A different token counts as a tie if transformers' logits of both are within the tolerance,
    and ends the comparison of its prompt.

    Args:
        reference: of transformers, with tokens and logits.
        found: of the engine.
        prompts: of both.

    Returns:
        The client's `status` and `detail`, `problems` in words (empty if the engine is right), `largest_difference` of the
        logits (None if they are not finite), the difference that is `allowed`, the number of `compared_logits`, of equal
        `tokens`, and of `ties`.
    """
    allowed = TOLERANCE * max(float(np.ptp(each)) for each in reference.logits)
    problems = []
    equal = ties = compared = 0
    differences = [0.0]
    if len(found.tokens) != len(prompts):
        problems.append(f"answered {len(found.tokens)} of {len(prompts)} prompts")
    answers = zip(prompts, reference.tokens, found.tokens, reference.logits, found.logits, strict=False)
    for prompt, ours, theirs, rows, their_rows in answers:
        same = len(commonprefix([ours, theirs]))  # noqa: RUF071 - of lists
        equal += same
        if same < NEW_TOKENS:
            other = theirs[same] if same < len(theirs) else -1
            if 0 <= other < rows.shape[1] and rows[same, ours[same]] - rows[same, other] <= allowed:
                ties += 1
            else:
                problems.append(f"prompt of {len(prompt)} tokens: new token {same + 1} is not {ours[same]}")
        padded = their_rows[:, : rows.shape[1]]  # engines may pad the vocabulary
        if padded.shape != rows.shape:
            problems.append(f"gave logits of shape {list(their_rows.shape)} for {list(rows.shape)}")
            continue
        differences.append(np.abs(padded.astype(np.float64) - rows).max())
        compared += rows.size
    largest = float(np.max(differences))  # NaN stays
    if not np.isfinite(largest):
        problems.append("logits that are not finite")
    elif largest > allowed:
        problems.append(f"logits differ by up to {largest:.3g}, {allowed:.3g} is allowed")
    right = f"{equal} tokens equal, {ties} ties, logits within {largest:.1e} ({allowed:.1e} allowed)"
    return {
        "status": FAILED if problems else OK,
        "detail": "; ".join(problems) or right,
        "problems": problems,
        "largest_difference": largest if np.isfinite(largest) else None,
        "allowed": allowed,
        "compared_logits": compared,
        "tokens": equal,
        "ties": ties,
    }
