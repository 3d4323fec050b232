"""The optimizer of the gradient stages: how long its steps are, and which batches they see."""

import torch

from gqa_convert.conversion.layers.optimizer import RelativeAdam, batch_order


def test_steps_are_relative_to_what_is_trained() -> None:
    """The first step of Adam is as long as its rate, a tenth of the height in the warm-up."""
    queries = torch.randn(3, 4, 5, 24, generator=torch.Generator().manual_seed(1))
    parts = {"q.weight": queries, "q.bias": torch.zeros(3, 4, 5), "k.weight": torch.ones(2, 5)}
    parts, trained = ({name: part.clone() for name, part in parts.items()} for _ in range(2))
    optimizer = RelativeAdam([trained], 0.5, 20)
    sum(part.sum() for part in trained.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    found = {name: part.detach() for name, part in trained.items()}
    size = float(queries.square().mean().sqrt())
    assert torch.allclose(parts["k.weight"] - found["k.weight"], torch.full((2, 5), 0.05))
    assert torch.allclose(parts["q.bias"] - found["q.bias"], torch.tensor(0.05 * size))
    assert torch.allclose(queries - found["q.weight"], torch.tensor(0.05 * size))


def test_every_batch_comes_before_any_comes_again() -> None:
    order = batch_order(5, 12, seed=1)
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))
    assert order == batch_order(5, 12, seed=1) != batch_order(5, 12, seed=2)
