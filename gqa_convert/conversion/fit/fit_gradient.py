"""The gradient stage of one layer: its merged projections learn to yield what the source's attention yields.

Layers do not depend on one another here, nothing but the layer is in memory, and the text is the calibration text.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gqa_convert.checkpoint.heap import kept_heap
from gqa_convert.conversion.fit.attention_calls import AttentionCall, CapturedAttention
from gqa_convert.conversion.fit.head_parameters import Assembly, Parts
from gqa_convert.conversion.fit.optimizer import RelativeAdam, batch_order
from gqa_convert.conversion.fit.precision import Precision
from gqa_convert.conversion.fit.training_attention import training_attention

RATE = 0.03
"""Of `RelativeAdam`."""


def fit_gradient(
    parts: Parts,
    attention: CapturedAttention,
    assembly: Assembly,
    share: float,
    *,
    count: int,
    steps: int,
    seed: int,
    precision: Precision,
    on_step: Callable[[int, int], None],
) -> dict[str, Tensor]:
    """Adam on the squared error of attention's output.

    Args:
        parts: merged heads to start from.
        attention: the module, with its calls in the student.
        assembly: how parts become the module's parameters.
        share: of the target: see `AttentionCall.between`.
        count: of the batches to train on, the first ones.
        steps: batches to see.
        seed: of their order.
        precision: the context of a forward pass.
        on_step: called with the steps done and all of them.

    Returns:
        Trained parts; those given are not changed.
    """
    optimizer = RelativeAdam([parts], RATE, steps)
    calls = attention.calls[:count]
    power = sum(float(call.between(share).double().square().sum()) for call in calls)
    mean_square = power / sum(call.output.numel() for call in calls)
    with kept_heap(next(iter(parts.values())).device):
        for done, number in enumerate(batch_order(len(calls), steps, seed)):
            on_step(done, steps)
            call = calls[number]
            target = call.between(share)
            with torch.enable_grad():
                with training_attention(precision):
                    output, _ = attention.run(call, assembly(optimizer.parts()[0]))
                error = (output.float() - target).square().sum(-1)
                missed = error.sum() if call.counted is None else error[call.counted].sum()
                loss = missed / _positions(call, target) / (mean_square * target.shape[-1] or 1.0)
                torch.autograd.backward(loss)
            optimizer.step()
    return optimizer.results()[0]


def _positions(call: AttentionCall, target: Tensor) -> int:
    """The number of positions that count."""
    return target.shape[:-1].numel() if call.counted is None else int(call.counted.sum())
