"""Runs transformers, then each engine, and reports the differences."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from gqa_convert.errors import (
    CorruptCheckpointError,
    MissingExtraError,
    OptionError,
    SourceNotFoundError,
)
from gqa_convert.families.composite import is_composite
from gqa_convert.families.context_length import stated_positions
from gqa_convert.families.layerwise import is_decilm
from gqa_convert.families.loading import (
    TASKS,
    auto_class,
    check_language_model,
    explained,
    hears,
    is_encoder_decoder,
    load_complete,
    load_tokenizer,
    read_config,
)
from gqa_convert.families.table import FAMILIES
from gqa_convert.runtime.json_objects import JsonObject, Result
from gqa_convert.runtime.paths import local_path

from .engines import ENGINES, Engine, find_interpreter
from .request import NEW_TOKENS, Request, TokenIds, commands, random_sound
from .worker import FAILED, OK, SKIPPED, UNSUPPORTED, Outcome, ask

NEEDS_HEAD = (
    "engines are compared by its predictions; "
    "convert the language model that the checkpoint was made from"
)
"""Advice for a checkpoint that was saved without its language-model head."""
_LENGTHS = (5, 48, 320)
"""Tokens of the prompts: with some hundred, a wrong rotary base shows."""


def make_prompts(config: JsonObject, end: Sequence[int] = ()) -> list[TokenIds]:
    """Prompts of random tokens and of increasing length, which leave room for the new tokens.

    Args:
        config: of the model.
        end: tokens that stand behind the random ones.
    """
    room = (stated_positions(config) or max(_LENGTHS) + NEW_TOKENS) - NEW_TOKENS - len(end)
    # a model that hears has its special tokens from the end of text on
    count = config["eos_token_id"] if hears(config) else config["vocab_size"]
    first = min(8, count - 1)  # the first ids are often special tokens
    ids = np.random.default_rng(0).integers(first, count, max(_LENGTHS)).tolist()
    lengths = sorted({max(1, min(length, room)) for length in _LENGTHS})
    return [[*ids[:length], *end] for length in lengths]


def ask_transformers(folder: Path) -> tuple[list[TokenIds], Outcome]:
    """Prompts, and a checkpoint's greedy tokens and logits in float32, with eager attention.

    The tokens are decoded with the K/V cache, and the logits from which each is chosen are computed
    without one.

    Raises:
        CorruptCheckpointError: transformers can't run the checkpoint, or its logits are not finite.
        NoLanguageModelError: it was saved without its language-model head.
    """
    import torch
    from transformers import GenerationConfig, GenerationMixin

    with explained(str(folder)), torch.inference_mode():
        model = load_complete(
            str(folder), folder, torch.float32, NEEDS_HEAD, attn_implementation="eager"
        )
        config = model.config.get_text_config().to_dict()
        # the checkpoint's own generation config could stop at a token or penalise repetition
        model.generation_config = GenerationConfig(
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            suppress_tokens=commands(config) if hears(config) else None,
        )
        end: TokenIds = []
        read: dict[str, Any] = {}  # by an encoder
        if hears(config):
            # with timestamps, engines follow rules of their own
            without_timestamps = load_tokenizer(folder).convert_tokens_to_ids("<|notimestamps|>")
            end = [config["decoder_start_token_id"], without_timestamps]
            read = {"input_features": torch.from_numpy(random_sound(config))}
        prompts = make_prompts(config, end)
        written = "decoder_input_ids" if is_encoder_decoder(config) else "input_ids"
        tokens, logits = [], []
        for prompt in prompts:
            begun = prompt
            if is_encoder_decoder(config) and not hears(config):
                read = {"input_ids": torch.tensor([prompt])}
                begun = [config["decoder_start_token_id"]]
            # Whisper's own `generate` decodes by windows
            made = GenerationMixin.generate(
                model, **read | {written: torch.tensor([begun])}, decoder_start_token_id=begun[0]
            )
            tokens.append(made[0, len(begun) :].tolist())
            found = model(**read | {written: made[:, :-1]}).logits
            logits.append(found[0, len(begun) - 1 :].float().numpy())
    if not all(np.isfinite(each).all() for each in logits):
        raise CorruptCheckpointError(
            f"{folder}: transformers computes logits that are not finite, "
            "so nothing can be compared with them"
        )
    return prompts, Outcome(OK, tokens=tokens, logits=logits)


SECONDS = 3600.0
"""Time limit for each engine."""
TOLERANCE = 1e-3
"""Allowed difference of logits, as a share of the spread of the reference's."""


@dataclass(frozen=True, kw_only=True)
class ServingReport(Result):
    """What `check_serving` found.

    Attributes:
        out: the checkpoint's folder.
        model_type: of its config.
        transformers: the version that the engines are compared with.
        clients: for each engine `client` (its name), `version`, `status` (ok, failed, not supported
            or skipped) and `detail`; for one that ran also what `compare` returns.
        passed: no engine failed, at least one was right, and no named one was skipped.
    """

    out: str
    model_type: str | None
    transformers: str
    clients: tuple[JsonObject, ...]
    passed: bool


def check_serving(
    out: Path, names: Collection[str] = (), python: str | None = None
) -> ServingReport:
    """Compare serving engines with transformers on a checkpoint, all in float32.

    Args:
        out: a checkpoint folder.
        names: of engines; empty for all that are installed.
        python: the interpreter that has the engines; None for this one.

    Raises:
        OptionError: a name is unknown.
        SourceNotFoundError: `out` is not a checkpoint.
        CorruptCheckpointError: transformers itself can't load it.
        NoLanguageModelError: it was saved without its language-model head.
    """
    import transformers

    for name in names:
        if name not in ENGINES:
            raise OptionError(f"there is no engine {name!r}: choose from {', '.join(ENGINES)}")
    out = local_path(out)
    config = read_config(out)
    if not config:
        raise SourceNotFoundError(
            f"{out} holds no config.json that can be read: name the folder of a checkpoint"
        )
    check_language_model(str(out), config, NEEDS_HEAD)
    reference = cache(ask_transformers)  # it computes only where an engine follows
    clients = []
    for name in names or ENGINES:
        engine = ENGINES[name]
        client: JsonObject = {"client": name, "version": None, "status": UNSUPPORTED}
        client["detail"] = why_unsupported(out, config, engine)
        clients.append(client)
        if client["detail"]:
            continue
        try:
            interpreter, client["version"] = find_interpreter(name, python)
        except MissingExtraError as problem:
            client |= {"status": SKIPPED, "detail": str(problem)}
            continue
        prompts, expected = reference(out)
        request = Request(
            folder=str(out.resolve()),
            context=max(map(len, prompts)) + NEW_TOKENS,
            run_code=has_our_code(out, config),
            prompts=prompts,
            written=[made[:-1] for made in expected.tokens],
        )
        outcome = ask(interpreter, engine.module, request, SECONDS)
        client |= {"status": outcome.status, "detail": outcome.detail}
        if outcome.status == OK:
            client |= compare(expected, outcome, prompts)
    states = [client["status"] for client in clients]
    return ServingReport(
        out=str(out),
        model_type=config.get("model_type"),
        transformers=transformers.__version__,
        clients=tuple(clients),
        passed=OK in states and FAILED not in states and not (names and SKIPPED in states),
    )


def why_unsupported(folder: Path, config: JsonObject, engine: Engine) -> str:
    """The reason why an engine can't load a checkpoint, empty if none is known."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = str(config.get("model_type"))
    if is_decilm(config):
        if has_our_code(folder, config):
            return ""
        return "its code is not the modelling file that convert writes"
    if model_type in FAMILIES and FAMILIES[model_type].is_converted:
        has_own_code = not engine.takes_loaded_models
    else:
        has_own_code = "auto_map" in config and model_type not in CONFIG_MAPPING_NAMES
    if has_own_code:
        return f"{model_type} comes with a modelling file, which this engine does not run"
    task = auto_class(config)
    reads_otherwise = task == TASKS[3] or is_composite(config)
    is_no_whisper = task == TASKS[2] and "num_mel_bins" not in config
    is_text = task == TASKS[0] or engine.takes_loaded_models
    if reads_otherwise or is_no_whisper or not is_text:
        return f"{model_type} is an encoder-decoder or reads more than text"
    return ""


def has_our_code(folder: Path, config: JsonObject) -> bool:
    """Whether a DeciLM names no code but this package's modelling file, which engines may run."""
    if not is_decilm(config):
        return False
    modeling = FAMILIES[str(config["model_type"])].modeling
    assert modeling is not None
    if modeling.unknown_files(folder):
        return False
    places = (config.get("auto_map") or {}).values()
    return all(str(place).startswith(f"{modeling.file}.") for place in places)


def compare(reference: Outcome, found: Outcome, prompts: list[TokenIds]) -> JsonObject:
    """Compare two answers. A different token counts as a tie if transformers' logits of both are
    within the tolerance, and ends the comparison of its prompt.

    Args:
        reference: of transformers, with tokens and logits.
        found: of the engine.
        prompts: of both.

    Returns:
        The client's `status` and `detail`, the `largest_difference` of the logits (None if they are
        not finite), the difference that is `allowed`, and the number of equal `tokens`.
    """
    allowed = TOLERANCE * max(float(np.ptp(each)) for each in reference.logits)
    problems = []
    differences = [0.0]
    equal = 0
    if len(found.tokens) != len(prompts):
        problems.append(f"answered {len(found.tokens)} of {len(prompts)} prompts")
    answers = zip(
        prompts, reference.tokens, found.tokens, reference.logits, found.logits, strict=False
    )
    for prompt, ours, theirs, rows, their_rows in answers:
        same = len(commonprefix([ours, theirs]))  # noqa: RUF071 - of lists
        equal += same
        if same < NEW_TOKENS:
            token = ours[same]
            tied = np.flatnonzero(rows[same, token] - rows[same] <= allowed)
            if not np.isin(theirs[same : same + 1], tied).any():
                problems.append(
                    f"prompt of {len(prompt)} tokens: new token {same + 1} is not {token}"
                )
        # engines may pad the vocabulary; CTranslate2 leaves out Marian's last token
        columns = min(rows.shape[1], their_rows.shape[1])
        if len(their_rows) == len(rows) and columns >= rows.shape[1] - 1:
            compared = their_rows[:, :columns].astype(np.float64) - rows[:, :columns]
            differences.append(np.abs(compared).max())
        else:
            problems.append(f"gave logits of shape {list(their_rows.shape)} for {list(rows.shape)}")
    largest = float(np.max(differences))  # NaN stays
    if not largest <= allowed:
        problems.append(f"logits differ by up to {largest:.3g}, {allowed:.3g} is allowed")
    right = f"{equal} tokens equal, logits within {largest:.1e} ({allowed:.1e} allowed)"
    return {
        "status": FAILED if problems else OK,
        "detail": "; ".join(problems) or right,
        "largest_difference": largest if np.isfinite(largest) else None,
        "allowed": allowed,
        "tokens": equal,
    }
