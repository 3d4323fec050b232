"""Products with repeated heads are those with the whole weight, and cost what those with the few heads do."""

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from gqa_convert.conversion.fit.attention_calls import replaced
from gqa_convert.conversion.fit.repeated_heads import RepeatedHeads


def _product(biased: bool, whole: bool) -> tuple[list[torch.Tensor], int]:
    """The output of a linear module, and the gradients of states, rows and bias; and operations."""
    generator = torch.Generator().manual_seed(0)
    states, rows, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 7, 5), (6, 5), (24,))
    )
    module = torch.nn.Linear(5, 24, bias=biased)
    index = torch.arange(6).view(2, 1, 3).expand(2, 4, 3).flatten()
    weight = rows[index] if whole else RepeatedHeads(rows, heads=2, times=4)
    given = {"weight": weight} | ({"bias": bias} if biased else {})
    with replaced(module, given), FlopCounterMode(display=False) as counter:
        found = module(states)
        found.square().sum().backward()
    return [found, states.grad, rows.grad, *([bias.grad] if biased else [])], counter.get_total_flops()


@pytest.mark.parametrize("biased", [False, True])
def test_products_and_gradients(biased: bool) -> None:
    (few, operations), (whole, of_whole) = _product(biased, whole=False), _product(biased, whole=True)
    assert operations * 4 == of_whole
    for found, wanted in zip(few, whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_other_functions_see_the_whole_weight() -> None:
    weight = RepeatedHeads(torch.arange(8.0).view(4, 2), heads=2, times=2)
    assert weight.whole()[:, 0].tolist() == [0, 2, 0, 2, 4, 6, 4, 6]
    assert weight.shape == weight.whole().shape
    assert torch.equal(torch.mul(weight, 2), 2 * weight.whole())
    assert torch.equal(functional.linear(torch.eye(2), weight, bias=torch.ones(8)), weight.whole().T + 1)
