"""Fixtures of the tests of attention."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same random numbers."""
    torch.manual_seed(0)
