"""The attention of the gradient stages: torch's kernel in float32 is the reference, and inside models transformers' own
up to twice the roundings of bfloat16.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gqa_convert.conversion.fit import training_attention as attention
from gqa_convert.conversion.fit.distillation import Student
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.model_loading import open_model
from tests.helpers import folding_cases as folded
from tests.helpers.fitting import batches_for, fit, plan_of

BFLOAT16 = partial(torch.autocast, "cpu", torch.bfloat16)


def tensors(heads: int, groups: int, length: int, head_dim: int, value_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * length)
    shapes = [(2, heads, length, head_dim), (2, groups, length, head_dim), (2, groups, length, value_dim)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    ("heads", "groups", "length", "head_dim", "value_dim"),
    [(6, 2, 256, 16, 24), (6, 1, 300, 8, 8), (3, 3, 385, 40, 16)],
)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_and_gradients(
    heads: int, groups: int, length: int, head_dim: int, value_dim: int, scale: float | None, autocast: bool
) -> None:
    own = tensors(heads, groups, length, head_dim, value_dim)
    repeated = [own[0], *(tensor.repeat_interleave(heads // groups, 1) for tensor in own[1:])]
    wanted = scaled_dot_product_attention(*repeated, is_causal=True, scale=scale)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = attention.causal_attention(*own, scale=scale)
    assert found.dtype == (torch.bfloat16 if autocast else torch.float32)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    theirs, ours = (torch.autograd.grad(out, own, weights.to(out.dtype)) for out in (wanted, found))
    for one, other in zip((found, *ours), (wanted, *theirs), strict=True):
        error = (one.float() - other).norm() / other.norm()
        assert error < (0.012 if autocast else 1e-6), "roundings alone"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The K/V heads of each call."""
    found: list[int] = []
    plain = attention.causal_attention
    monkeypatch.setattr(
        attention, "causal_attention", lambda query, key, *rest: found.append(key.shape[1]) or plain(query, key, *rest)
    )
    return found


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_gradients_of_merged_layers(
    name: str, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 K/V heads, of which the source's attention gets each several times: with transformers' own attention they are
    the same in float32, and in bfloat16 up to twice its roundings.
    """
    source = folded.build(name).save(tmp_path / "source")
    plan, model = plan_of(source), open_model(source)
    (batch,) = batches_for(model, count=1)
    mask = torch.ones_like(batch["input_ids"])
    with LayerStore(tmp_path / "out", {}, keep=False) as store:
        fit(plan, store, [batch], steps=0)
        student = Student(plan, store, model, nullcontext)
    weights = [{key: tensor.requires_grad_() for key, tensor in layer.items()} for layer in student.start]
    learned = [tensor for layer in weights for tensor in layer.values()]

    def gradients(context: AbstractContextManager[None], lengths: range = range(2, 2049)) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(attention, "LENGTHS", lengths)
        with context, student.installed(weights):
            logits = student.logits(batch | {"attention_mask": mask}).float()
        return torch.autograd.grad(logits.logsumexp(-1).square().mean(), learned)

    exact, rounded = gradients(nullcontext(), range(0)), gradients(BFLOAT16(), range(0))
    assert not calls
    found, found_rounded = gradients(nullcontext()), gradients(BFLOAT16())
    assert calls == [3] * len(weights) * 2
    for own, theirs, own_rounded, their_rounded in zip(found, exact, found_rounded, rounded, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-6)
        if theirs.norm() > 1e-3:
            assert (own_rounded - theirs).norm() < 2 * (their_rounded - theirs).norm()
    mask[0, :5] = 0
    gradients(BFLOAT16())
    assert len(calls) == len(weights) * 2, "padding needs a mask"


def test_where_it_runs(calls: list[int]) -> None:

    def runs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: int = 1, **options: bool) -> bool:
        calls.clear()
        with attention.TrainingAttention(groups):
            scaled_dot_product_attention(query, key, value, **({"is_causal": True} | options))
        return bool(calls)

    query, key, value = own = tensors(4, 4, 256, 8, 8)
    assert runs(*own)
    assert not runs(*own, groups=2)
    with BFLOAT16():
        assert runs(*own, groups=4)
    with torch.no_grad():
        assert not runs(*own)
    assert not runs(*own, is_causal=False)
    assert not runs(query[:, :, :255], key[:, :, :255], value[:, :, :255])
    assert not runs(query[:, :, 1:], key, value)
    assert not runs(*own, dropout_p=0.5)
    long = torch.empty(1, 4, attention.LENGTHS.stop, 1, requires_grad=True)
    assert not runs(long, long, long)
    shared = query, *(tensor[:, :1].expand_as(tensor) for tensor in (key, value))
    with attention.TrainingAttention(1):
        found = scaled_dot_product_attention(*shared, is_causal=True, scale=0.3)
    torch.testing.assert_close(found, scaled_dot_product_attention(*shared, is_causal=True, scale=0.3))
