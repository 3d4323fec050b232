"""Changes of low rank: what they start from, what they may become, and where their numbers lie."""

import pytest
import torch

from gqa_convert.conversion.fit.low_rank import LowRank, Whole, trained

HEADS, RATIO, HEAD_DIM, HIDDEN = 3, 4, 5, 24
STARTS = {
    "queries": torch.randn(HEADS, RATIO, HEAD_DIM, HIDDEN, generator=torch.Generator().manual_seed(1)),
    "outputs": torch.randn(HEADS, RATIO, HIDDEN, HEAD_DIM, generator=torch.Generator().manual_seed(2)),
}


def made(role: str, rank: int = 2) -> LowRank:
    part = trained(STARTS[role], role, rank, torch.Generator().manual_seed(0))
    assert isinstance(part, LowRank)
    return part


@pytest.mark.parametrize("role", STARTS)
def test_it_begins_with_what_it_is_given_in_any_precision(role: str) -> None:
    part = made(role)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(part.value(), STARTS[role])


@pytest.mark.parametrize("role", STARTS)
def test_a_change_is_the_product_of_its_factors_head_by_head(role: str) -> None:
    part = made(role)
    with torch.no_grad():
        part.up.normal_(generator=torch.Generator().manual_seed(3))
    up, down = part.up.detach(), part.down.detach()
    wanted = STARTS[role].clone()
    for head in range(HEADS):
        for query in range(RATIO):
            rows = slice(HEAD_DIM * (head * RATIO + query), HEAD_DIM * (head * RATIO + query + 1))
            wanted[head, query] += up[rows] @ down if role == "queries" else up @ down[:, rows]
    assert torch.allclose(part.value().detach(), wanted, atol=1e-6)


@pytest.mark.parametrize("role", STARTS)
def test_both_factors_take_gradients_and_the_start_stays(role: str) -> None:
    part, before = made(role), STARTS[role].clone()
    with torch.no_grad():
        part.up.fill_(0.1)
    part.value().square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in part.weights)
    assert torch.equal(STARTS[role], before)
    assert not STARTS[role].requires_grad


@pytest.mark.parametrize(
    ("role", "rank", "kind"),
    [
        ("queries", 0, Whole),
        ("queries", 17, LowRank),  # 17 * (60 + 24) of 60 * 24
        ("queries", 18, Whole),
        ("outputs", 17, LowRank),
        ("outputs", 18, Whole),
        ("keys", 2, Whole),
        ("queries_bias", 2, Whole),
    ],
)
def test_a_change_that_is_no_smaller_is_not_made(role: str, rank: int, kind: type) -> None:
    start = STARTS.get(role, STARTS["queries"][:, 0])
    assert type(trained(start, role, rank, torch.Generator())) is kind
