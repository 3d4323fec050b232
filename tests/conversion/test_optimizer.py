"""Changes of low rank: what they start from, what they may become, and where their numbers lie; and steps."""

import pytest
import torch

from gqa_convert.conversion.fit.optimizer import LowRankChange, RelativeAdam, batch_order

HEADS, RATIO, HEAD_DIM, HIDDEN = 3, 4, 5, 24
STARTS = {
    "queries": torch.randn(HEADS, RATIO, HEAD_DIM, HIDDEN, generator=torch.Generator().manual_seed(1)),
    "outputs": torch.randn(HEADS, RATIO, HIDDEN, HEAD_DIM, generator=torch.Generator().manual_seed(2)),
}


@pytest.mark.parametrize("role", STARTS)
def test_a_change_is_the_product_of_its_factors_head_by_head(role: str) -> None:
    start = STARTS[role].clone()
    change = LowRankChange(start, role, 2, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(change.value(), STARTS[role])
    with torch.no_grad():
        change.up.normal_(generator=torch.Generator().manual_seed(3))
    up, down = change.up.detach(), change.down.detach()
    wanted = STARTS[role].clone()
    for head in range(HEADS):
        for query in range(RATIO):
            rows = slice(HEAD_DIM * (head * RATIO + query), HEAD_DIM * (head * RATIO + query + 1))
            wanted[head, query] += up[rows] @ down if role == "queries" else up @ down[:, rows]
    assert torch.allclose(change.value().detach(), wanted, atol=1e-6)
    change.value().square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in (change.up, change.down))
    assert torch.equal(start, STARTS[role])


@pytest.mark.parametrize("rank", [0, 2])
def test_steps_are_relative_to_what_is_trained(rank: int) -> None:
    """The first step of Adam is as long as its rate, a tenth of the height in the warm-up."""
    parts = {
        "queries": STARTS["queries"],
        "queries_bias": torch.zeros(HEADS, RATIO, HEAD_DIM),
        "keys": torch.ones(2, 5),
    }
    optimizer = RelativeAdam([parts], 0.5, 20, rank)
    sum(part.sum() for part in optimizer.parts()[0].values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    (found,) = optimizer.results()
    size = float(STARTS["queries"].square().mean().sqrt())
    assert torch.allclose(parts["keys"] - found["keys"], torch.full((2, 5), 0.05))
    assert torch.allclose(parts["queries_bias"] - found["queries_bias"], torch.tensor(0.05 * size))
    moved = (parts["queries"] - found["queries"]).flatten(0, -2)
    if rank:
        assert 1 <= torch.linalg.matrix_rank(moved) <= rank
    else:
        assert torch.allclose(moved, torch.tensor(0.05 * size))


def test_every_batch_comes_before_any_comes_again() -> None:
    order = batch_order(5, 12, seed=1)
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))
    assert order == batch_order(5, 12, seed=1) != batch_order(5, 12, seed=2)
