"""Earlier names of arguments and attributes still work, with a warning."""

import warnings
from typing import Any

import pytest
import torch

from gqa_convert.attention import GroupedMultiheadAttention, GroupedQueryAttention, Rotary
from gqa_convert.attention.renamed import RENAMED

OLD: dict[str, Any] = {
    "width": 24,
    "heads": 6,
    "head_width": 8,
    "value_head_width": 5,
    "key_width": 10,
    "value_width": 14,
}


def test_earlier_arguments_make_the_same_layer() -> None:
    with pytest.warns(DeprecationWarning, match="is deprecated") as caught:
        old = GroupedQueryAttention(groups=2, **OLD)
    messages = sorted(str(warning.message) for warning in caught)
    assert messages == sorted(
        f"argument {before} of GroupedQueryAttention is deprecated: use {after}" for before, after in RENAMED.items()
    )
    assert {warning.filename for warning in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = GroupedQueryAttention(groups=2, **{RENAMED[name]: value for name, value in OLD.items()})
    shapes = {name: tensor.shape for name, tensor in new.state_dict().items()}
    assert {name: tensor.shape for name, tensor in old.state_dict().items()} == shapes


def test_both_names_of_an_argument_are_refused() -> None:
    with pytest.raises(TypeError, match="both head_dim and its earlier name head_width"):
        GroupedQueryAttention(24, 6, head_dim=4, head_width=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", RENAMED)
def test_earlier_attributes_are_those_of_today(name: str) -> None:
    layer = GroupedQueryAttention(groups=2, **{RENAMED[key]: value for key, value in OLD.items()})
    with pytest.warns(DeprecationWarning, match=f"attribute {name} .* use {RENAMED[name]}") as caught:
        assert getattr(layer, name) == OLD[name]
    assert caught[0].filename == __file__
    assert hasattr(GroupedMultiheadAttention(24, 6), RENAMED[name])


def test_neither_layer_warns_by_itself() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = GroupedQueryAttention(24, 6, 2, rotary=Rotary(), causal=True)
        layer(torch.zeros(1, 3, 24))
        module = GroupedMultiheadAttention(24, 6, groups=2, kdim=10, vdim=14)
        module(torch.zeros(3, 1, 24), torch.zeros(4, 1, 10), torch.zeros(4, 1, 14))
        repr(layer), repr(module)


def test_the_earlier_method_of_rotary() -> None:
    with pytest.warns(DeprecationWarning, match="use rotary_dim"):
        assert Rotary(fraction=0.5).width(8) == 4
