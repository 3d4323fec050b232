"""Times a model at several numbers of K/V heads.

All versions are in memory at once, and weights that do not depend on the number are shared. They
take turns, so that a machine whose speed drifts favours none of them.
"""

import gc
import inspect
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from transformers.initialization import no_init_weights

from gqa_convert.attention import register
from gqa_convert.attention.interface import why_unsupported
from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.conversion.plan import Plan, make_plan, merging_counts, spread
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.families import loading
from gqa_convert.families.context_length import stated_positions
from gqa_convert.families.layerwise import kv_heads_by_layer
from gqa_convert.runtime.json_objects import Config
from gqa_convert.runtime.machine import chosen_device, measurement

from . import Progress, memory_explained, no_progress
from .results import BenchmarkFile, TimedCell

CONTEXT = 512
"""The default number of cached tokens."""
STEPS = 8
"""Timed decode steps of a turn."""
DTYPES = ("float32", "bfloat16", "float16")
_NEEDS_HEAD = (
    "benchmark decodes with one; name the language model that the checkpoint was made from"
)
"""Advice for a checkpoint that was saved without its language-model head."""


def benchmark_model(
    model: str | Path,
    *,
    candidates: Sequence[int] | None = None,
    batch: Sequence[int] = (1,),
    context: Sequence[int] | None = None,
    repetitions: int = 8,
    dtype: str | None = None,
    device: str | None = None,
    revision: str | None = None,
    command: list[str] | None = None,
    progress: Progress = no_progress,
) -> BenchmarkFile:
    """Measure decode latency and K/V bytes of a model at several numbers of K/V heads.

    Every version has the shapes of a converted model. Weights that do not exist are random; the
    time does not depend on their values.

    Args:
        model: a local folder or a Hub id, timed with its weights at its own number of K/V heads.
        candidates: K/V heads per layer to time; by default the model's own number and its divisors,
            at most seven.
        batch: sequences decoded at once.
        context: tokens in the cache when the timed steps begin, and of an encoder's input; by
            default 512, or half the model's positions.
        repetitions: timed turns of each version.
        dtype: by default the checkpoint's.
        device: `cpu`, `cuda` or `cuda:1`; by default a GPU where there is one.
        revision: branch, tag or commit on the Hub.
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Returns:
        The measurement; `results` has an entry for each version, batch and context.

    Raises:
        GQAConvertError: one of its subclasses for every mistake; DeviceMemoryError (exit code 1) if
            the memory does not suffice.
    """
    check = partial(plan_versions, candidates=candidates)
    opened = open_local(model, revision, check)
    plans = check(opened)
    dtype = dtype or opened.config.get("dtype") or opened.config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise OptionError(
            f"the type {dtype!r} can't be timed: choose one of {', '.join(DTYPES)} with --dtype"
        )
    device = chosen_device(device)
    positions = stated_positions(opened.config)
    contexts = context or [min(CONTEXT, (positions or 2 * CONTEXT) // 2)]
    if positions is not None and max(contexts) >= positions - STEPS:
        raise OptionError(
            f"--context {max(contexts)}: the model has {positions} positions, and decode steps "
            f"follow: give at most {positions - 1 - STEPS}"
        )
    settings = list(product(batch, contexts))
    cells = []
    advice = "time fewer --candidates, or a smaller --batch or --context"
    with memory_explained(opened.source_id, advice):
        progress("building models", 0, 1)
        models, attention = make_models(opened, plans, dtype, device)
        for done, (rows, tokens) in enumerate(settings):
            progress("timing", done, len(settings))
            gc.collect()  # the caches before them
            decoders = {kv_heads: Decoder(made, rows, tokens) for kv_heads, made in models.items()}
            times = _take_turns([*decoders.values()], repetitions)
            for (kv_heads, decoder), (low, median, high) in zip(
                decoders.items(), times, strict=True
            ):
                cell = TimedCell(
                    kv_heads=kv_heads,
                    batch=rows,
                    context=tokens,
                    decode_ms_per_token=median,
                    decode_ms_low=low,
                    decode_ms_high=high,
                    kv_bytes=decoder.cache_bytes(),
                )
                cells.append(cell)
            del decoders, decoder
        progress("timing", len(settings), len(settings))
    plan = plans[min(plans)]
    return BenchmarkFile(
        **measurement("benchmark", command, device),
        model=opened.source_id,
        model_type=plan.family.model_type,
        dtype=dtype,
        heads=plan.heads,
        source_kv_heads=plan.source_kv_heads,
        attention=attention,
        results=cells,
    )


def _take_turns(decoders: Sequence["Decoder"], repetitions: int) -> Any:
    """The lower quartile, the median and the upper quartile of the milliseconds of each decoder in
    so many turns, [decoders, 3]. In each repetition another one is the first. A warm-up precedes.
    """
    order = np.arange(len(decoders))
    seconds = np.empty((1 + repetitions, len(decoders)))
    for repetition in range(1 + repetitions):
        for number in np.roll(order, -repetition).tolist():
            seconds[repetition, number] = decoders[number].turn()
    return 1e3 * np.quantile(seconds[1:], (0.25, 0.5, 0.75), axis=0).T


def plan_versions(checkpoint: Checkpoint, candidates: Sequence[int] | None) -> dict[int, Plan]:
    """Plan a version for each number of K/V heads, rising.

    Args:
        checkpoint: the model.
        candidates: numbers of K/V heads; None for the model's own and its divisors, at most seven.

    Returns:
        The plans by their numbers.

    Raises:
        NoLanguageModelError: it was saved without its language-model head.
        OptionError: the layers of the model differ in number.
        GroupsError: a number does not fit the heads.
        GQAConvertError: the model can't be converted.
    """
    name = checkpoint.source_id
    own = make_plan(checkpoint, 1).source_kv_heads
    if kv_heads_by_layer(checkpoint.config, name) is not None:
        raise OptionError(
            f"the layers of {name} differ in their K/V heads: time the model that it was converted "
            "from"
        )
    counts = sorted(set(candidates or spread(merging_counts(own), 7)))
    try:
        return {count: make_plan(checkpoint, count) for count in counts}
    except GroupsError as problem:
        raise GroupsError(str(problem).replace("--kv-heads", "--candidates")) from None


def make_models(
    checkpoint: Checkpoint, plans: Mapping[int, Plan], dtype: str, device: str
) -> tuple[dict[int, Any], str]:
    """The models of the plans by their K/V heads, and transformers' name of their attention
    function: this package's, where the model's class takes it. The model with the own K/V heads has
    its weights.

    Args:
        checkpoint: the model that is timed.
        plans: of its versions, by their K/V heads.
        dtype: of the weights, such as `bfloat16`.
        device: torch device.

    Raises:
        CorruptCheckpointError: the folder lacks weights, or transformers can't build a version.
        NoLanguageModelError: it was saved without its language-model head.
    """
    register()
    name = checkpoint.source_id
    exact = getattr(torch, dtype)
    attention = "eager"
    source = loading.load_complete(
        name, checkpoint.local_folder, exact, _NEEDS_HEAD, attn_implementation=attention
    )
    if why_unsupported(type(source), source.config) is None:
        attention = "gqa"
        source.set_attn_implementation(attention)
    source = source.to(device).requires_grad_(False)
    weights = dict(source.named_parameters(remove_duplicate=False))
    models = {}
    for kv_heads, plan in plans.items():
        made = source
        if kv_heads != plan.source_kv_heads:
            with loading.explained(name), torch.device(device), no_init_weights():
                made = _build(plan.config, exact, attention)
            # the source's weights where they fit, and random ones
            for key, parameter in made.named_parameters():
                if key in weights and weights[key].shape == parameter.shape:
                    parameter.data = weights[key].data
                else:
                    parameter.normal_(std=0.02)
        models[kv_heads] = made
    return models, attention


def _build(config: Config, dtype: torch.dtype, attention: str) -> Any:
    """The model of a config.json, in evaluation mode and without gradients."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = loading.model_of_config(Path(folder), dtype, attn_implementation=attention)
    model.tie_weights()
    return model.eval().requires_grad_(False)


class Decoder:
    """A model with its cache at one batch and context: a prompt fills the cache, and decode steps
    run the model's forward pass.

    The cache is transformers' dynamic cache, which `generate` uses by default and which copies keys
    and values into a longer tensor at every step.

    Args:
        model: in evaluation mode.
        batch: sequences.
        context: tokens in the cache when decoding begins, and those that an encoder of text reads.
    """

    def __init__(self, model: Any, batch: int, context: int) -> None:
        self._model = model
        vocabulary = model.get_input_embeddings().num_embeddings
        tokens = torch.randint(vocabulary, (batch, context + 1), device=model.device)
        prompt, self._token = tokens.split(context, dim=1)
        self._ids = "input_ids"
        self._cache_name = loading.cache_name(model)
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._options["logits_to_keep"] = 1
        if model.config.is_encoder_decoder:
            self._ids = "decoder_input_ids"
            encoded = prompt
            if model.main_input_name != "input_ids":
                shape = loading.encoder_shape(model.config, context)
                encoded = torch.randn(batch, *shape, dtype=model.dtype, device=model.device)
            with torch.inference_mode():
                self._options["encoder_outputs"] = model.get_encoder()(encoded, return_dict=True)
        self._cache: Any = None
        self._read(prompt)
        caches: list[Any] = [self._cache]
        if isinstance(caches[0], transformers.EncoderDecoderCache):
            caches = [caches[0].self_attention_cache, caches[0].cross_attention_cache]
        self._layers = [*chain.from_iterable(cache.layers for cache in caches)]

    def turn(self) -> float:
        """Decode some tokens after the prompt, and return the seconds for each."""
        states = [dict(vars(layer)) for layer in self._layers]
        # the version before has left its own weights in the processor's caches
        self._read(self._token)
        began = self._now()
        for _ in range(STEPS):
            self._read(self._token)
        seconds = self._now() - began
        # recurrent layers keep their states, on which their time does not depend
        for layer, state in zip(self._layers, states, strict=True):
            vars(layer).update(state)
        return seconds / STEPS

    def cache_bytes(self) -> int:
        """Bytes of the live keys and values, those of an encoder's tokens included."""
        found = 0
        for layer in self._layers:
            # a recurrent layer has none
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if isinstance(tensor, torch.Tensor):
                    found += tensor.nbytes
        return found

    def _read(self, tokens: torch.Tensor) -> None:
        given = {self._ids: tokens, self._cache_name: self._cache}
        with torch.inference_mode():
            output = self._model(**given, **self._options)
        self._cache = getattr(output, self._cache_name)

    def _now(self) -> float:
        """The time when a GPU, which works asynchronously, has done what it was given."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()
