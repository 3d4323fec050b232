"""Comparing bits: torch compares words, whatever number of bytes there is and wherever they begin."""

import pytest
import torch

from gqa_convert.verify.exact.merge_errors import MergeError
from gqa_convert.verify.numbers import bits_differ, same_bits


@pytest.mark.parametrize("first", [0, 1, 2, 4, 6, 8])
def test_every_byte_counts_at_every_length_and_place(first: int) -> None:
    data = torch.arange(64, dtype=torch.uint8)
    for nbytes in (0, 1, 2, 3, 4, 6, 8, 12, 16, 23, 24, 40):
        ours = data[first : first + nbytes]
        assert same_bits(ours, ours.clone())
        for place in range(nbytes):
            theirs = ours.clone()
            theirs[place] ^= 128
            assert not same_bits(ours, theirs)
            assert bits_differ(ours, theirs) == "1 number(s)"


def test_numbers_are_compared_by_their_bits() -> None:
    numbers = torch.tensor([float("nan"), 0.0, 1.0, 2.0], dtype=torch.bfloat16)
    assert same_bits(numbers, numbers.clone())
    assert not same_bits(numbers, torch.tensor([float("nan"), -0.0, 1.0, 2.0], dtype=torch.bfloat16))
    assert not same_bits(numbers, numbers.view(torch.int16))
    assert not same_bits(numbers, numbers.reshape(2, 2))
    assert same_bits(numbers.reshape(2, 2).T, numbers[[0, 2, 1, 3]].reshape(2, 2)), "a transposed view"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_merge_errors_over_several_blocks(dtype: torch.dtype) -> None:
    heads = torch.randn(3, 5, 14001, generator=torch.Generator().manual_seed(0)).to(dtype)
    merged = heads.double().mean(0).to(dtype)
    error = MergeError()
    error.add(iter(heads), merged)
    expected = (heads.double() - merged.double()).norm() / heads.double().norm()
    assert error.value() == pytest.approx(float(expected), rel=1e-12)
