"""Fits a few layers with a small part of the work of `convert --calibration`, to see how much of the closed form's loss `fit`
removes.

The layers are fitted by the code of `fit`, on the source's inputs, with less text and fewer gradient steps.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

from torch import Tensor

from gqa_convert.conversion.fit.assembly import as_parts
from gqa_convert.conversion.fit.layer_fitting import FitOptions, LayerFitting
from gqa_convert.conversion.fit.lockstep import Batch, CapturedModule
from gqa_convert.conversion.fit.precision import Precision
from gqa_convert.conversion.fit.source_layer import SourceLayer
from gqa_convert.measuring.inspect.layers import LayerInspection

LAYERS: Final = 3
"""The most layers that are fitted."""
FITTED_GROUPS: Final = 3
"""The most numbers of groups for which layers are fitted."""
STEPS: Final = 20
"""Gradient steps of each."""
_BATCHES: Final = 6
"""Batches of text, of which one is held out from the gradient steps."""
_JUDGED_TOKENS: Final = 8192
"""Held-out tokens on which divergences are compared."""


def sampled_layers(layers: int) -> list[int]:
    """The places of the layers that are fitted, evenly spread over the depth of a model."""
    count = min(LAYERS, layers)
    return [(2 * number + 1) * layers // (2 * count) for number in range(count)]


def compared_batches(held_out: Sequence[Batch]) -> Sequence[Batch]:
    """The first held-out batches, with about `_JUDGED_TOKENS` tokens."""
    tokens = 0
    for number, batch in enumerate(held_out):
        if tokens >= _JUDGED_TOKENS:
            return held_out[:number]
        tokens += batch["input_ids"].numel()
    return held_out


def quickly_fitted(module: CapturedModule, work: LayerInspection, groups: int, seed: int) -> dict[str, Tensor]:
    """A layer after a short fit, as parameters of the source's module, each head repeated for its group.

    Args:
        module: the captured module of the source.
        work: the inspection of the layer.
        groups: K/V heads of the result.
        seed: of the order of batches.

    Raises:
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
    """
    fitting = quick_fitting(module, work, groups, seed)
    merged, _ = fitting.run()
    return fitting.assembly(as_parts(merged, fitting.device))


def quick_fitting(
    module: CapturedModule,
    work: LayerInspection,
    groups: int,
    seed: int,
    *,
    steps: int | None = None,
    precision: Precision = nullcontext,
) -> LayerFitting:
    """A short fit of a layer, not yet run.

    Args:
        module, work, groups, seed: as for `quickly_fitted`.
        steps: gradient steps, fewer than `STEPS`.
        precision: of the products with activations.

    Raises:
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
    """
    layer = SourceLayer(work.parts, work.tensors, work.constraints)
    steps = STEPS if steps is None else min(steps, STEPS)
    options = FitOptions(groups=groups, trains=True, steps=steps, seed=seed, precision=precision)
    return LayerFitting(module.first(_BATCHES), layer, options)
