"""Chooses the number of K/V heads of each layer: measures what merging costs in each, and compares a few choices."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.devices import chosen_devices
from gqa_convert.checkpoint.item_bytes import ITEM_BYTES
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.publication import check_destination
from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.fit.calibrated import CalibrationOptions, calibrate, steps_per_layer
from gqa_convert.conversion.fit.defaults import BUILT_IN_TOKENS, plan_conversion, why_no_text
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.source_layer import SourceReader, attention_of
from gqa_convert.conversion.plan import Plan, make_plan
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.families.geometry import AttentionLayer
from gqa_convert.measuring.budget.allocation import LayerCosts
from gqa_convert.measuring.budget.amount import KVBudget
from gqa_convert.measuring.budget.candidates import EXCHANGE_ROUNDS, CandidateSearch, measure_candidates
from gqa_convert.measuring.budget.choice import BudgetChoice, Candidate
from gqa_convert.measuring.budget.kept import KeptDivergences
from gqa_convert.measuring.inspect.layers import LayerInspection
from gqa_convert.merging.methods import DEFAULT
from gqa_convert.text.sources import STDLIB

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the steps done and the number of steps."""


def choose_groups(
    source: str | Path,
    out: str | Path | None,
    budget: KVBudget,
    text: CalibrationOptions,
    *,
    method: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    kept: KeptDivergences | None = None,
    progress: Progress = lambda stage, done, total: None,
    **options: Any,
) -> BudgetChoice:
    """Choose the number of K/V heads of each layer for a budget.

    The cost of a number in a layer is the KL divergence from the source on held-out text with this layer alone merged:
    by a short fit where the conversion fits layers, otherwise by the closed form. Candidates are the numbers with the
    least sum of costs, those with the least sum of the costs' square roots, and the largest uniform number; with short
    fits, also exchanges of heads between the layers of the best one. All are measured with all layers merged.

    Args:
        source: a local folder or a Hub id.
        out: the folder that the conversion will make, None if none follows.
        budget: of the K/V cache.
        text: the options of calibration; without text, the built-in text is measured on.
        method: of the conversion, as the user named it.
        revision: branch, tag or commit on the Hub.
        overwrite: whether the conversion may replace an existing result in `out`.
        kept: divergences of an earlier run, which are not measured again, and those of this run.
        progress: called with the name of a stage, the steps done and the number of steps.
        options: of the conversion's plan; see `make_plan`.

    Raises:
        GQAConvertError: one of its subclasses for every mistake of the user's, in the conversion's options too; nothing
            is written.
    """

    def check(checkpoint: Checkpoint) -> tuple[Plan, int, bool]:
        return _plan(checkpoint, budget, method, text, options)

    checkpoint = open_local(source, revision, check)
    plan, limit, fits = check(checkpoint)
    if out is not None:
        check_destination(local_path(out), checkpoint.folder, overwrite=overwrite)
    measured = text if text.source is not None else replace(text, source=STDLIB, tokens=BUILT_IN_TOKENS)
    calibration = calibrate(plan, measured, progress)

    from gqa_convert.conversion.fit.lockstep import open_model, running_device
    from gqa_convert.conversion.fit.precision import precision_of
    from gqa_convert.measuring.budget.divergences import Measurer, Subject, measure_costs
    from gqa_convert.measuring.budget.layer_merging import ClosedForm, ShortFits
    from gqa_convert.measuring.inspect.trials import split

    before, held_out = split(calibration.batches)
    assert checkpoint.folder is not None
    layers, folder = _numbered(plan), checkpoint.folder
    kept = KeptDivergences(None) if kept is None else kept
    steps = steps_per_layer(text)
    kept.open(plan, calibration.digest, f"fits of {steps} steps, seed {text.seed}" if fits else "closed form")
    with ExitStack() as stack:
        inspection = stack.enter_context(_inspecting(plan))

        @cache
        def subject() -> Subject:
            model = open_model(folder, device=chosen_devices(text.device)[0])
            if not fits:
                return Subject(model, plan.layers, inspection, before, held_out, ClosedForm())
            precision = precision_of(plan, running_device(model))
            store = stack.enter_context(_fits_store(out, kept.fingerprint))
            merging = ShortFits(layers, store, steps=steps, precision=precision, seed=text.seed)
            return Subject(model, plan.layers, inspection, before, held_out, merging, precision)

        measurer = Measurer(subject, len(layers), kept)
        costs = measure_costs(measurer, layers, lambda done, total: progress("each layer alone", done, total))
        by_layer = [LayerCosts(_head_bytes(layer), costs[layer.module] | {layer.kv_heads: 0.0}) for layer in layers]

        def measure(lists: Sequence[tuple[int, ...]]) -> list[float]:
            copies = [_merged(layers, counts) for counts in lists]
            return measurer.measure(copies, None, lambda done, total: progress("candidates", done, total))

        search = CandidateSearch(by_layer, limit)
        measure_candidates(search, measure, rounds=EXCHANGE_ROUNDS if fits else 0)
    held_out_tokens = sum(batch["input_ids"].numel() for batch in held_out)
    return BudgetChoice(
        stated=budget.stated,
        limit=limit,
        source_bytes=plan.cache_bytes_per_token(after=False),
        candidates=tuple(
            Candidate(rule, counts, _taken(layers, counts), kl) for counts, (rule, kl) in search.found.items()
        ),
        costs=costs,
        text=calibration.description,
        held_out_tokens=held_out_tokens,
        source_groups=tuple(layer.kv_heads for layer in layers),
        warning=calibration.warning,
        by_short_fits=fits,
    )


def _plan(
    checkpoint: Checkpoint,
    budget: KVBudget,
    method: str | None,
    text: CalibrationOptions,
    options: dict[str, Any],
) -> tuple[Plan, int, bool]:
    """A plan of the source for reading its layers, the limit in bytes per token, and whether the conversion fits layers
    by gradient steps; refuses what cannot be converted.
    """
    plan = make_plan(checkpoint, 1, method=DEFAULT.name, encoder=options.get("encoder", False))
    layers = _numbered(plan)
    kept = [layer.kv_heads for layer in layers]
    if max(kept) == 1:
        raise GroupsError(f"{checkpoint.source_id} has 1 K/V head in every attention layer: there is nothing to merge")
    # a list in which layers differ, so that a family or a checkpoint that takes none is refused here
    wanted, _ = plan_conversion(checkpoint, [1, *kept[1:]], method, text, seed=text.seed, **options)
    sizes = plan.cache_bytes_per_token(after=False), plan.cache_bytes_per_token(after=True)
    limit = budget.limit(*sizes)
    if reason := why_no_text(checkpoint):
        raise OptionError(f"--kv-budget runs the source on text, and {reason}: state the numbers with --groups")
    return plan, limit, wanted.merge_method.trains


@contextmanager
def _fits_store(out: str | Path | None, fingerprint: str) -> Iterator[MergedLayers]:
    """Where short fits are kept: beside the result, so that a killed command goes on with them; in a temporary folder if
    there is no result.
    """
    with ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gqa-budget-"))) / "layers"
        else:
            real = Path(os.path.realpath(local_path(out)))
            folder = real.with_name(f"{real.name}.short-fits")
        yield stack.enter_context(MergedLayers(folder, {"budget": fingerprint}, keep=out is not None))


def _numbered(plan: Plan) -> list[AttentionLayer]:
    """The layers in the order of their numbers."""
    return sorted(plan.layers, key=lambda layer: layer.number)


def _head_bytes(layer: AttentionLayer) -> int:
    return (layer.key_head_dim + layer.value_head_dim) * ITEM_BYTES[layer.dtype]


def _taken(layers: Sequence[AttentionLayer], counts: Sequence[int]) -> int:
    return sum(groups * _head_bytes(layer) for layer, groups in zip(layers, counts, strict=True))


def _merged(layers: Sequence[AttentionLayer], counts: Sequence[int]) -> dict[str, int]:
    """The copy in which layers have these numbers of K/V heads."""
    return {layer.module: groups for layer, groups in zip(layers, counts, strict=True) if groups != layer.kv_heads}


@contextmanager
def _inspecting(plan: Plan) -> Iterator[Callable[[AttentionLayer], LayerInspection]]:
    """Read layers of a plan's source."""
    finder = attention_of(plan)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gqa-budget-")))
        read = SourceReader(plan.checkpoint, SourceFiles(plan.checkpoint, work, stack))
        yield lambda layer: LayerInspection(finder, layer, read)
