"""Products with repeated rows are those with the whole weight, and cost what those with the few rows do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit.attention_calls import replaced
from gqa_convert.conversion.fit.head_parameters import Assembly, as_parts
from gqa_convert.conversion.fit.repeated_rows import RepeatedRows
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.table import FAMILIES
from gqa_convert.merging.attention_heads import LayerLayout
from tests.helpers import folding_cases as folded


def _product(biased: bool, whole: bool) -> list[torch.Tensor]:
    """The output of a linear module, and the gradients of states, rows and bias."""
    generator = torch.Generator().manual_seed(0)
    states, rows, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 7, 5), (6, 5), (24,))
    )
    index = torch.arange(6).view(2, 3)[:, None].expand(2, 4, 3).reshape(-1)
    module = torch.nn.Linear(5, 24, bias=biased)
    weight = RepeatedRows(rows, index)
    given = {"weight": weight.whole() if whole else weight} | ({"bias": bias} if biased else {})
    with replaced(module, given):
        found = module(states)
    found.square().sum().backward()
    return [found, states.grad, rows.grad, *([bias.grad] if biased else [])]


@pytest.mark.parametrize("biased", [False, True])
def test_products_and_gradients(biased: bool) -> None:
    for found, wanted in zip(_product(biased, whole=False), _product(biased, whole=True), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_other_functions_see_the_whole_weight() -> None:
    weight = RepeatedRows(torch.arange(6.0).view(3, 2), torch.tensor([2, 0, 2, 1]))
    assert weight.shape == weight.whole().shape
    assert torch.equal(torch.mul(weight, 2), 2 * weight.whole())
    assert torch.equal(weight.T, weight.whole().T)
    assert torch.equal(functional.linear(torch.eye(2), weight, bias=torch.ones(4)), weight.whole().T + 1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "cohere", "falcon"])
def test_a_model_with_merged_heads(name: str, tmp_path: Path) -> None:
    """12 heads in 3 groups, in the first layer: logits and gradients stay, and keys and values take a quarter of the
    products wherever they have projections of their own.
    """
    case = folded.build(name)
    checkpoint = open_checkpoint(case.save(tmp_path))
    finder = AttentionFinder(checkpoint, FAMILIES[case.model_type])
    layout = LayerLayout(finder, finder.layers[0])
    state = case.model.state_dict()
    tensors = {each: state[each].numpy() for each in layout.names}
    source = layout.split_heads(tensors)
    merged = replace(source, keys=source.keys[::4], values=source.values[::4])
    ids = torch.arange(3, 23).view(2, 10)

    def run(repeats_products: bool) -> tuple[list[torch.Tensor], int]:
        assembly = Assembly(layout, tensors, 3, "cpu", repeats_products=repeats_products)
        parts = {role: part.requires_grad_() for role, part in as_parts(merged, "cpu").items()}
        module = case.model.get_submodule(layout.layer.module)
        with replaced(module, assembly(parts)), FlopCounterMode(display=False) as counter:
            logits = case.model(input_ids=ids).logits
        logits.square().mean().backward()
        return [logits, *(part.grad for part in parts.values())], counter.get_total_flops()

    (plain, many), (found, few) = run(False), run(True)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    hidden_size = case.model.config.hidden_size
    fused = "query_key_value" in " ".join(layout.names)
    saved = (
        2
        * ids.numel()
        * sum(len(tensors[each]) for each in layout.names if each.endswith(("k_proj.weight", "v_proj.weight")))
    )
    assert many - few == (0 if fused else saved * hidden_size * 3 // 4)
