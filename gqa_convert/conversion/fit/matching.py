"""The gradient stage of one layer: its merged projections learn to yield what the source's attention yields.

Layers do not depend on one another here, nothing but the layer is in memory, and the text is the calibration text.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gqa_convert.checkpoint.heap import kept_heap
from gqa_convert.conversion.fit.assembly import Parts
from gqa_convert.conversion.fit.lockstep import Call
from gqa_convert.conversion.fit.optimizer import RelativeAdam, batch_order
from gqa_convert.conversion.fit.precision import Precision
from gqa_convert.conversion.fit.training_attention import training_attention

RATE = 0.03
"""Of `RelativeAdam`."""


def match(
    parts: Parts,
    run: Callable[[Call, Parts], Tensor],
    calls: Mapping[int, Call],
    targets: Mapping[int, Tensor],
    *,
    count: int,
    steps: int,
    seed: int,
    precision: Precision,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Tensor]:
    """Adam on the squared error of attention's output.

    Args:
        parts: merged heads to start from.
        run: attention's output for a call, with gradients to the parts.
        calls: the student's, by the number of the batch.
        targets: what each is to yield, [B, L, D].
        count: of the batches to train on, the first ones.
        steps: batches to see.
        seed: of their order.
        precision: the context of a forward pass.
        on_step: called with the steps done and all of them.

    Returns:
        Trained parts; those given are not changed.
    """
    optimizer = RelativeAdam([parts], RATE, steps)
    power = sum(float(targets[number].double().square().sum()) for number in range(count))
    size = power / sum(targets[number].numel() for number in range(count))

    def loss(number: int) -> Tensor:
        """That of one batch."""
        call, target = calls[number], targets[number]
        with training_attention(precision):
            found = run(call, optimizer.parts()[0])
        error = (found.float() - target).square().sum(-1)
        summed = (error if call.counted is None else error[call.counted]).sum()
        return summed / _positions(call, target) / (size * target.shape[-1] or 1.0)

    with kept_heap(next(iter(parts.values())).device):
        for done, number in enumerate(batch_order(count, steps, seed)):
            on_step(done, steps)
            with torch.enable_grad():
                torch.autograd.backward(loss(number))
            optimizer.step()
    return optimizer.results()[0]


def _positions(call: Call, target: Tensor) -> int:
    """The number of positions that count."""
    return target.shape[:-1].numel() if call.counted is None else int(call.counted.sum())
