"""Chooses the number of K/V heads of each layer for a budget of K/V cache.

The cost of a number in a layer is the KL divergence from the source with this layer alone merged:
by a short fit where the conversion fits layers, since costs of the closed form choose worse lists
(benchmarks/log.md), otherwise by the closed form. A decoder is measured on as much text of made-up
records as on held-out text, since few layers of a model find again what stands far above, and prose
hardly tells which (docs/results/README.md). The list with the least sum of costs is then compared
with the largest number that fits all layers.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch

from gqa_convert._version import __version__
from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.headers import ITEM_BYTES
from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.conversion.calibration.batches import prepare_calibration
from gqa_convert.conversion.calibration.made_up_records import record_blocks
from gqa_convert.conversion.calibration.streams import Batch, tokens_of
from gqa_convert.conversion.layers.layer_store import LayerStore
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions, steps_per_layer
from gqa_convert.conversion.plan import Plan, make_plan, merging_counts
from gqa_convert.conversion.planning import BUILT_IN_TOKENS, plan_conversion, why_no_text
from gqa_convert.data.model_tokenizer import usable_tokenizer
from gqa_convert.data.sources import STDLIB
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.families.layerwise import find_form
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.merging.methods import DEFAULT
from gqa_convert.publishing.publication import check_destination
from gqa_convert.runtime.paths import local_path

from .kv_budget import (
    BudgetChoice,
    HeadAllocation,
    KVBudget,
    LayerCosts,
    largest_uniform,
    least_sum,
)
from .merged_copies import Batches, SensitivityInputs, load_inputs, score_copies

FIT_MARGIN = 0.95
"""What a list's divergence after short fits must be, as a share of the uniform number's, to be
chosen: a short fit is not the whole fit.
"""


def choose_num_kv_heads(
    source: str | Path,
    budget: KVBudget,
    options: ConversionOptions,
    *,
    out: str | Path | None = None,
    progress: Progress = no_progress,
) -> BudgetChoice:
    """Choose the number of K/V heads of each layer for a budget.

    Args:
        source: a local folder or a Hub id.
        budget: of the K/V cache.
        options: of the conversion; without calibration text, the built-in text is measured on.
        out: the folder of the conversion that follows, None if none does. Short fits lie beside it
            until the choice is made, so that a killed command goes on from there.
        progress: called with the name of a stage, the steps done and the number of steps.

    Raises:
        GQAConvertError: one of its subclasses for every mistake of the user's, in the conversion's
            options too; nothing is written.
    """
    check = partial(_plan, budget=budget, options=options)
    checkpoint = open_local(source, options.revision, check)
    plan, limit, fits = check(checkpoint)
    if out is not None:
        check_destination(local_path(out), checkpoint.folder, overwrite=options.overwrite)
    text = options.calibration
    if text.source is None:
        text = replace(text, source=STDLIB, tokens=BUILT_IN_TOKENS)
    calibration = prepare_calibration(plan, text, progress)
    with ExitStack() as stack:
        store = _fits_store(stack, plan, out, calibration.digest, text) if fits else None
        inputs = load_inputs(plan, calibration.batches, text, store)
        records = made_up_batches(plan, inputs.held_out, text.seed)
        costs = measure_costs(inputs, [*inputs.held_out[:1], *records[:1]], progress)
        candidates = measure_candidates(
            inputs, [*inputs.held_out, *records], costs, limit, progress
        )
    margin, merged_by = (FIT_MARGIN, "short fits") if fits else (1.0, "closed form")
    chosen = candidates[0]  # the uniform number
    best = candidates[-1]  # the list, unless it is the same
    if best.kl is not None and (chosen.kl is None or best.kl < margin * chosen.kl):
        chosen = best
    is_uniform = len(set(chosen.kv_heads)) == 1
    kv_heads = chosen.kv_heads[0] if is_uniform else list(chosen.kv_heads)
    return BudgetChoice(
        stated=budget.stated,
        limit_kv_bytes_per_token=limit,
        source_kv_bytes_per_token=plan.kv_cache_bytes().before,
        kv_bytes_per_token=chosen.kv_bytes_per_token,
        kv_heads=kv_heads,
        chosen=chosen.rule,
        margin=margin,
        merged_by=merged_by,
        candidates=candidates,
        layers=costs,
        text=f"{calibration.description}; and as much text of made-up records as is held out",
        held_out_tokens=sum(tokens_of(batch).numel() for batch in inputs.held_out),
        warning=calibration.warning,
    )


def _plan(
    checkpoint: Checkpoint, budget: KVBudget, options: ConversionOptions
) -> tuple[Plan, int, bool]:
    """A plan of the source for reading its layers, the limit in bytes per token, and whether the
    conversion fits layers by gradient steps; refuses what cannot be converted.
    """
    plan = make_plan(checkpoint, 1, method=DEFAULT.name)
    form = find_form(plan.family, checkpoint.config)
    if isinstance(form, str):
        raise GroupsError(
            "--kv-budget chooses a number of K/V heads for each layer, which this checkpoint can't "
            f"have, since {form}: state one with --kv-heads"
        )
    differing = [1, *(layer.kv_heads for layer in plan.layers[1:])]
    conversion, _ = plan_conversion(checkpoint, differing, options)
    limit = budget.limit(plan.kv_cache_bytes().before, plan.kv_cache_bytes().after)
    if reason := why_no_text(checkpoint):
        raise OptionError(
            f"--kv-budget runs the source on text, and {reason}: state the numbers with --kv-heads"
        )
    return plan, limit, conversion.merge_method.trains


def _fits_store(
    stack: ExitStack, plan: Plan, out: str | Path | None, digest: str, text: CalibrationOptions
) -> LayerStore:
    """Where short fits are kept as long as a stack is open: beside the result, or in a temporary
    folder if there is none.
    """
    source = fingerprint(plan.checkpoint)
    depends_on = {
        "version": __version__,
        "source": source,
        "text": digest,
        "fit": [steps_per_layer(text), text.seed],
    }
    keep = out is not None
    if out is None:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="gqa-convert-"))
        out = Path(scratch) / "dry-run"
    folder = Path(f"{local_path(out)}.short-fits")
    return stack.enter_context(LayerStore(folder, depends_on, keep=keep))


def made_up_batches(plan: Plan, held_out: Batches, seed: int) -> list[Batch]:
    """Batches of made-up records of the sizes of `held_out`.

    Args:
        plan: of the source.
        held_out: batches of text.
        seed: of the records.
    """
    sizes = [len(batch["input_ids"]) for batch in held_out]
    length = held_out[0]["input_ids"].shape[1]
    tokenizer = usable_tokenizer(plan.checkpoint.local_folder)
    blocks = record_blocks(tokenizer, length, sum(sizes), seed)
    return [{"input_ids": rows} for rows in torch.from_numpy(blocks).view(-1, length).split(sizes)]


def measure_costs(
    inputs: SensitivityInputs, held_out: Batches, progress: Progress
) -> list[LayerCosts]:
    """The divergences with one layer alone merged, in the order of the layers' numbers.

    Args:
        inputs: the source and the text.
        held_out: batches to measure on.
        progress: called with the name of a stage, the steps done and the number of steps.
    """
    layers = sorted(inputs.plan.layers, key=attrgetter("number"))
    copies = [
        {layer.module: kv_heads}
        for layer in layers
        for kv_heads in merging_counts(layer.kv_heads)[:-1]
    ]
    _, *scores = score_copies(inputs, copies, held_out, partial(progress, "each layer alone"))
    costs = []
    for layer in layers:
        head_bytes = (layer.key_head_dim + layer.value_head_dim) * ITEM_BYTES[layer.dtype]
        kl = {kv_heads: scores.pop(0).kl.value for kv_heads in merging_counts(layer.kv_heads)[:-1]}
        costs.append(LayerCosts(layer.module, layer.kv_heads, head_bytes, kl))
    return costs


def measure_candidates(
    inputs: SensitivityInputs,
    held_out: Batches,
    layers: list[LayerCosts],
    limit: int,
    progress: Progress,
) -> list[HeadAllocation]:
    """The largest number of K/V heads that fits all layers, and the list with the least sum of
    costs if it is another one, measured with all layers merged.

    Args:
        inputs: the source and the text.
        held_out: batches to measure on.
        layers: what merging costs in each layer alone.
        limit: bytes of K/V cache per token that all layers may take together.
        progress: called with the name of a stage, the steps done and the number of steps.
    """
    rules = {largest_uniform(layers, limit): "uniform"}
    rules.setdefault(least_sum(layers, limit), "least sum of divergences")
    copies = []
    for numbers in rules:
        pairs = zip(layers, numbers, strict=True)
        copies.append(
            {layer.module: kv_heads for layer, kv_heads in pairs if kv_heads != layer.kv_heads}
        )
    _, *scores = score_copies(inputs, copies, held_out, partial(progress, "candidates"))
    candidates = []
    for (numbers, rule), score in zip(rules.items(), scores, strict=True):
        taken = sum(
            kv_heads * layer.head_bytes for layer, kv_heads in zip(layers, numbers, strict=True)
        )
        candidates.append(HeadAllocation(rule, numbers, taken, score.kl.value))
    return candidates
