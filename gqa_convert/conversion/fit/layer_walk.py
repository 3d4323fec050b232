"""Walks through the layers of a loaded source and its student in lockstep, and fits each on calibration text."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.fit.assembly import repeated_parameters
from gqa_convert.conversion.fit.divergence import summed_divergence
from gqa_convert.conversion.fit.layer_fitting import FitOptions, LayerFitting, judging_batches
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.lockstep import Batch, LockstepRunner, running_device
from gqa_convert.conversion.fit.memory import KEPT_BYTES
from gqa_convert.conversion.fit.options import STEPS
from gqa_convert.conversion.fit.precision import precision_of
from gqa_convert.conversion.fit.progress import MERGING_LAYERS, FitProgress, OnProgress, Stage
from gqa_convert.conversion.fit.source_layer import SourceReader, attention_of, read_source_layer
from gqa_convert.conversion.plan import Plan
from gqa_convert.merging.attention_heads import LayerLayout


def _is_large(model: Any, batches: Sequence[Batch]) -> bool:
    """Whether the activations that wait between layers would take more than a quarter of the free memory."""
    from accelerate.utils import get_max_memory

    hidden_size = max((parameter.shape[-1] for parameter in model.parameters() if parameter.dim() == 2), default=0)
    tokens = sum(max(tensor.numel() for tensor in batch.values()) for batch in batches)
    return bool(tokens * hidden_size * KEPT_BYTES > get_max_memory()["cpu"] / 4)


def fit_layers(
    plan: Plan,
    store: LayerStore,
    model: Any,
    batches: Sequence[Batch],
    on_progress: OnProgress,
    *,
    steps: int = STEPS,
) -> float:
    """Merge every layer on calibration text, in the order in which the model runs them.

    Each layer is read from the source, merged, and stored as the result will have it. The student then continues with
    the stored numbers.

    Args:
        plan: of method `fit`, or of `factor`, which ends with the closed form.
        store: where merged layers go; those that it holds already are not merged again.
        model: the loaded source.
        batches: of calibration text.
        on_progress: called as the work goes on.
        steps: gradient steps of each layer.

    Returns:
        KL(source || result) in nats per token, on calibration text that no gradient step and no regression has seen; where
        there is a single batch, on that one.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
    """
    finder = attention_of(plan)
    numbers = {layer.module: number for number, (layer, _) in enumerate(plan.merged_layers)}
    precision = precision_of(plan, running_device(model))
    done = 0  # layers

    def on_stage(stage: Stage, step: int, steps: int) -> None:
        counted = f" {step:,} of {steps:,}" if steps else ""
        on_progress(FitProgress(MERGING_LAYERS, done, len(numbers), f"layer {done + 1}: {stage}{counted}"))

    with ExitStack() as stack:
        spill = Path(stack.enter_context(TemporaryDirectory(dir=store.path))) if _is_large(model, batches) else None
        read = SourceReader(plan.checkpoint, SourceFiles(plan.checkpoint, store.path, stack))
        runner = stack.enter_context(
            LockstepRunner(
                model,
                batches,
                list(numbers),
                spill=spill,
                precision=precision,
                on_batch=partial(on_stage, Stage.FORWARD),
            )
        )
        for module in runner:
            number = numbers[module.name]
            layer, groups = plan.merged_layers[number]
            record = store.record(number)
            if record is None:
                source = read_source_layer(finder, layer, plan.limits_of(layer), read)
                options = FitOptions(
                    groups=groups,
                    trains=plan.merge_method.trains,
                    steps=steps,
                    seed=plan.seed,
                    spill=spill,
                    precision=precision,
                )
                merged, record = LayerFitting(module, source, options, on_stage).run()
                tensors = source.layout.merge_heads(merged, source.tensors, groups)
                store.write(number, tensors, record)
                del source, merged, tensors
            module.commit(repeated_parameters(LayerLayout(finder, layer), store.read(number), groups))
            done += 1
            on_progress(FitProgress(MERGING_LAYERS, done, len(numbers), layer=record))
        decodes = model.config.is_encoder_decoder
        judged = judging_batches(len(batches))
        sums = [
            summed_divergence(student, source, batches[number], decodes=decodes)
            for number, (source, student) in zip(judged, runner.logits(judged), strict=True)
        ]
        total, count = sum(float(total) for total, _ in sums), sum(float(count) for _, count in sums)
    return total / max(1.0, count)
