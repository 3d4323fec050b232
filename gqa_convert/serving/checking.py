"""Runs transformers, then each engine, and reports the differences."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import MissingExtraError, OptionError, SourceNotFoundError
from gqa_convert.families.layerwise import is_decilm
from gqa_convert.families.loading import TASKS, auto_class, check_language_model, read_config
from gqa_convert.families.table import FAMILIES
from gqa_convert.measuring import Progress, no_progress

from .comparing import compare
from .engines import ENGINES, Engine, find_interpreter
from .reference import NEEDS_HEAD, ask_transformers
from .request import NEW_TOKENS, Request
from .worker import FAILED, OK, SKIPPED, UNSUPPORTED, Outcome, ask


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
    prompts: tuple[int, ...] = ()
    new_tokens: int = NEW_TOKENS
    clients: tuple[JsonObject, ...] = ()
    passed: bool = False


def check_serving(
    out: Path,
    names: Collection[str] = (),
    *,
    pythons: Mapping[str, str] | None = None,
    minutes: float = 60.0,
    progress: Progress = no_progress,
    engines: Mapping[str, Engine] = ENGINES,
) -> ServingReport:
    """Compare serving engines with transformers on a checkpoint, all in float32.

    Args:
        out: a checkpoint folder.
        names: of engines; empty for all.
        pythons: Python interpreters by engine name; the engines named here are run too.
        minutes: time limit for each engine.
        progress: called with the name of a stage, the steps done and the number of steps.
        engines: all that there are, by name.

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
        check_name(name, engines)
    out = local_path(out)
    config = read_config(out)
    if not config:
        raise SourceNotFoundError(f"{out} holds no config.json that can be read: name the folder of a checkpoint")
    check_language_model(str(out), config, NEEDS_HEAD)
    reason = why_unsupported(out, config)
    request: Request | None = None
    reference = Outcome(OK)
    clients: list[JsonObject] = []
    chosen = [name for name in engines if not names or name in named]
    for name in chosen:
        progress("running", len(clients), len(chosen))
        clients.append({"client": name, "version": None, "status": UNSUPPORTED, "detail": reason})
        if reason:
            continue
        try:
            python, version = find_interpreter(engines[name], pythons.get(name))
        except MissingExtraError as problem:
            clients[-1] |= {"status": SKIPPED, "detail": str(problem)}
            continue
        if request is None:
            prompts, reference = ask_transformers(out)
            request = _request(out, config, prompts, reference)
        outcome = ask(python, engines[name].module, request, minutes * 60)
        clients[-1] |= {"version": version, "status": outcome.status, "detail": outcome.detail}
        if outcome.status == OK:
            clients[-1] |= _verdict(compare(reference, outcome, request.prompts))
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


def check_name(name: str, engines: Mapping[str, Engine]) -> None:
    """Refuse the name of an engine that there is not.

    Raises:
        OptionError: there is none of this name.
    """
    if name not in engines:
        raise OptionError(f"there is no engine {name!r}: choose from {', '.join(engines)}")


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


def _verdict(comparison: JsonObject) -> JsonObject:
    """A comparison, with the status and a sentence for it."""
    if comparison["problems"]:
        return comparison | {"status": FAILED, "detail": "; ".join(comparison["problems"])}
    equal = f"{comparison['tokens']} tokens equal, {comparison['ties']} ties"
    difference, allowed = comparison["largest_difference"], comparison["allowed"]
    return comparison | {"detail": f"{equal}, logits within {difference:.1e} ({allowed:.1e} allowed)"}
