"""Runs transformers, then each client, and reports the differences."""

import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.results import Result, plain
from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.errors import (
    CorruptCheckpointError,
    GQAConvertError,
    OptionError,
    SourceNotFoundError,
    UnsupportedFamilyError,
)
from gqa_convert.families.decilm import ARCHITECTURE
from gqa_convert.families.geometry import config_value
from gqa_convert.families.layerwise import is_decilm, kv_heads_by_layer
from gqa_convert.families.loading import (
    TASKS,
    auto_class,
    check_complete,
    check_language_model,
    load_model,
    load_tokenizer,
    read_config,
)
from gqa_convert.families.table import FAMILIES, Family, family_of
from gqa_convert.families.tensor_parallel import ParallelDegrees, parallel_degrees
from gqa_convert.families.wrappers import decoder_config, is_wrapper

from .client import CLIENTS, NEW_TOKENS, Answer, Client, Request
from .comparing import Comparison, compare
from .generation import greedy_tokens, logits_at
from .installing import Place, find_place, install
from .process import run
from .prompts import has_tokenizer, make_prompts, make_text, places
from .worker import FAILED, OK, SKIPPED, UNSUPPORTED, boot_code, read_answer, read_outcome, write_request

_HEAD = "engines are compared by its predictions; convert the language model that the checkpoint was made from"


@dataclass(frozen=True, slots=True)
class ClientReport:
    """What one engine did.

    Attributes:
        client: its name.
        version: that was run; None if it was not.
        status: ok, failed, not supported or skipped.
        detail: the reason or the agreement, in words.
        found: the comparison with transformers, if the engine answered.
        seconds: that the engine took, if it ran.
    """

    client: str
    version: str | None
    status: str
    detail: str
    found: Comparison | None = None
    seconds: float | None = None

    def as_json(self) -> JsonObject:
        entry = {"client": self.client, "version": self.version, "status": self.status, "detail": self.detail}
        found = {} if self.found is None else plain(self.found)
        return entry | found | ({} if self.seconds is None else {"seconds": self.seconds})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport(Result):
    """What `check_serving` found.

    Attributes:
        out: the checkpoint's folder.
        model_type: of its config.
        transformers: the version that the engines are compared with.
        prompts: the lengths of the prompts; empty if no engine ran.
        new_tokens: how many tokens each prompt is continued by.
        clients: a report for each engine.
        tensor_parallel: degrees that the K/V heads of every layer allow; None where the config does not state them.
        passed: no engine failed, at least one was right, and no named one was skipped.
    """

    out: str
    model_type: str | None
    transformers: str
    prompts: tuple[int, ...] = ()
    new_tokens: int = NEW_TOKENS
    clients: tuple[ClientReport, ...] = ()
    tensor_parallel: ParallelDegrees | None = None
    passed: bool = False

    def as_json(self) -> JsonObject:
        content: JsonObject = plain(self)
        degrees = None if self.tensor_parallel is None else self.tensor_parallel._asdict()
        return content | {"clients": [client.as_json() for client in self.clients], "tensor_parallel": degrees}


def check_serving(
    out: Path,
    clients: Collection[str] = (),
    *,
    pythons: Mapping[str, str] | None = None,
    install_absent: bool = False,
    minutes: float = 60.0,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    known: tuple[Client, ...] = CLIENTS,
) -> ServingReport:
    """Compare serving engines with transformers on a checkpoint, all in float32 on the CPU.

    Args:
        out: a checkpoint folder.
        clients: names of engines; empty for all that are installed.
        pythons: Python interpreters by engine name; the engines named here are run too.
        install_absent: install the engines in `clients` that are missing; this needs the package index.
        minutes: time limit for each engine.
        progress: called with the name of a stage, the steps done and the number of steps.
        known: all engines.

    Raises:
        OptionError: a name is unknown, or the time limit is not positive.
        SourceNotFoundError: `out` is not a checkpoint.
        CorruptCheckpointError: transformers itself can't load it.
        NoLanguageModelError: it was saved without its language-model head.
        MissingExtraError: an engine can't be installed.
    """
    import transformers

    pythons = pythons or {}
    named = {*clients, *pythons}
    if unknown := sorted(named - {client.name for client in known}):
        raise OptionError(
            f"there is no client {unknown[0]!r}: choose from {', '.join(client.name for client in known)}"
        )
    if not minutes > 0:
        raise OptionError(f"the time limit of {minutes:g} minutes is too short: allow more")
    out = local_path(out)
    config = read_config(out)
    if not config:
        raise SourceNotFoundError(
            f"{out} holds no config.json that can be read: name the folder of a converted checkpoint"
        )
    check_language_model(str(out), config, _HEAD)
    chosen = [client for client in known if not clients or client.name in named]
    report = ServingReport(
        out=str(out),
        model_type=config.get("model_type"),
        transformers=transformers.__version__,
        tensor_parallel=_parallel_degrees(config, str(out)),
    )
    if reason := _unfit(config):
        return replace(report, clients=tuple(ClientReport(client.name, None, UNSUPPORTED, reason) for client in chosen))
    layerwise = is_decilm(config)
    able = [client for client in chosen if client.runs_decilm or not layerwise]
    found = {client.name: find_place(client, pythons.get(client.name)) for client in able}
    for client in able if install_absent else ():
        if client.name in clients and client.name not in pythons and found[client.name] is None:
            progress(f"installing {client.name}", 0, 1)
            install(client)
            found[client.name] = find_place(client)
            progress(f"installing {client.name}", 1, 1)
    steps = len(chosen) + 1
    if any(found.values()):
        progress("running", 0, steps)
        request, reference = _ask_transformers(out, config)
        report = replace(report, prompts=tuple(len(prompt) for prompt in request.prompts))
    reports: list[ClientReport] = []
    for done, client in enumerate(chosen, 1):
        progress("running", done, steps)
        if client not in able:
            reports.append(
                ClientReport(client.name, None, UNSUPPORTED, f"it has no {ARCHITECTURE}, whose layers differ")
            )
            continue
        place = found[client.name]
        if place is None:
            reports.append(ClientReport(client.name, None, SKIPPED, _how_to_get(client, pythons.get(client.name))))
            continue
        reports.append(_check(client, place, request, reference, minutes * 60))
    progress("running", steps, steps)
    states = {each.client: each.status for each in reports}
    named_ones_ran = not any(states[name] == SKIPPED for name in named)
    passed = FAILED not in states.values() and OK in states.values() and named_ones_ran
    return replace(report, clients=tuple(reports), passed=passed)


def _unfit(config: Config) -> str:
    """The reason why no client can load the checkpoint, empty if there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if is_decilm(config):
        return ""
    if family is not None and family.is_layerwise:
        return f"its layers differ in their number of K/V heads, and only transformers 5 has code for a {family.stock_type} of that kind"
    has_modelling_file = family is not None and family.is_converted
    if has_modelling_file or ("auto_map" in config and model_type not in CONFIG_MAPPING_NAMES):
        return f"{model_type} comes with a modelling file, which only transformers 5 runs"
    if is_wrapper(config):
        return f"{model_type} reads images too, and the engines are compared on language models alone"
    if auto_class(config) != TASKS[0]:
        return f"{model_type} is an encoder-decoder, and only decoders are compared"
    return ""


def _parallel_degrees(config: Config, where: str) -> ParallelDegrees | None:
    """The degrees that the numbers of heads in a config allow; None for a family whose config does not state them."""
    if is_wrapper(config):
        try:
            family: Family | None = family_of(config)
        except UnsupportedFamilyError:
            return None
        config = decoder_config(config)
    else:
        family = FAMILIES.get(str(config.get("model_type")))
    heads = config.get("num_attention_heads")
    if family is None or type(heads) is not int or heads < 1:
        return None
    by_layer = kv_heads_by_layer(config, where)
    if by_layer is not None:
        return parallel_degrees(heads, set(by_layer), family.model_type)
    stated = config_value(config, family.kv_heads_keys[0]) if family.kv_heads == "stated" else None
    return parallel_degrees(heads, {stated}, family.model_type) if type(stated) is int and stated > 0 else None


def _how_to_get(client: Client, python: str | None) -> str:
    if python is not None:
        return f"{python} is not an interpreter that has {client.distributions[0]}"
    if not client.requirements:
        return f"not installed: it needs {client.needs}"
    return f"not installed: --client {client.name} --install installs it in a cache folder"


def _ask_transformers(out: Path, config: Config) -> tuple[Request, Answer]:
    import numpy as np
    import torch

    try:
        model, absent = load_model(out, torch.float32, attn_implementation="eager")
        tokenizer = load_tokenizer(out) if has_tokenizer(out) else None
        ids = None if tokenizer is None else list(tokenizer(make_text(), verbose=False)["input_ids"])
        check_complete(str(out), out, model, absent, _HEAD)
        prompts = make_prompts(model.config.get_text_config().to_dict(), ids)
        tokens = greedy_tokens(model, prompts)
        sequences = [[*prompt, *made[:-1]] for prompt, made in zip(prompts, tokens, strict=True)]
        positions = [places(len(prompt)) for prompt in prompts]
        logits = logits_at(model, sequences, positions)
    except GQAConvertError:
        raise
    except Exception as problem:
        raise CorruptCheckpointError(f"transformers can't run {out}: {type(problem).__name__}: {problem}") from problem
    if not all(np.isfinite(each).all() for each in logits):
        raise CorruptCheckpointError(
            f"{out}: transformers computes logits that are not finite, so nothing can be compared with them"
        )
    code = _config_code(config)
    request = Request(out.resolve(), config, prompts, sequences, positions, Path(), ids is not None, *code)
    return request, Answer(tokens, logits)


def _config_code(config: Config) -> tuple[Path | None, str]:
    """This package's file with the config class of a DeciLM, and the name of the class; nothing for other types."""
    modeling = FAMILIES[str(config.get("model_type"))].modeling if is_decilm(config) else None
    if modeling is None:
        return None, ""
    return modeling.path, dict(modeling.classes)["AutoConfig"]


def _check(client: Client, place: Place, request: Request, reference: Answer, seconds: float) -> ClientReport:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gqa-convert-serving-") as made:
        folder = Path(made)
        write_request(request, folder)
        ended = run([place.python, "-c", boot_code(), str(folder), client.module], place.environment(), folder, seconds)
        status, detail = read_outcome(folder) or (FAILED, str(ended))
        found = None
        if status == OK:
            found = compare(reference, read_answer(folder), request.prompts, client.tolerance)
            status, detail = (FAILED, "; ".join(found.problems)) if found.problems else (OK, _agreement(found, request))
    return ClientReport(client.name, place.version, status, detail, found, round(time.monotonic() - begun, 1))


def _agreement(found: Comparison, request: Request) -> str:
    ties = f", {found.ties} ties" if found.ties else ""
    tokens = f"{found.tokens} of {NEW_TOKENS * len(request.prompts)} tokens equal{ties}"
    if found.largest_difference is None:
        return f"{tokens}; no logits available"
    return f"{tokens}, logits within {found.largest_difference:.1e} ({found.allowed:.1e} allowed)"
