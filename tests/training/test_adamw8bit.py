"""AdamW with moments in 8 bits: near AdamW, and continued bit for bit from a checkpoint."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.utils._pytree import tree_leaves

from gqa_convert.errors import MissingExtraError
from gqa_convert.training import memory
from gqa_convert.training.architecture import Architecture
from gqa_convert.training.memory import Setting
from gqa_convert.training.optimizers import build_optimizer, check_optimizer
from gqa_convert.training.recipe import make_recipe
from gqa_convert.training.state import set_state, state_of
from tests.helpers.distributed_steps import BASE, read, run_in_8_bits
from tests.helpers.ranks import Job


def made(optimizer: str = "adamw8bit") -> tuple[nn.Module, Any]:
    """A model with two matrices in 8 bits, and one and a bias in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 24), nn.Linear(24, 8))
    recipe = make_recipe(BASE | {"optimizer": optimizer, "learning_rate": 1e-3, "weight_decay": 0.1})
    return model, build_optimizer(model, recipe)


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    found = []
    for number in range(first, last):
        inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(number))
        loss = (model(inputs) - inputs[:, :8]).square().mean()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + number / 10)  # plain numbers, as the loop sets them
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def test_it_is_near_adamw_with_a_quarter_of_the_moments() -> None:
    (model, optimizer), (exact, reference) = made(), made("adamw")
    losses, expected = steps(model, optimizer, 0, 8), steps(exact, reference, 0, 8)
    assert losses == pytest.approx(expected, rel=2e-2)
    assert losses != expected
    torch.manual_seed(0)
    start = nn.Linear(256, 256).weight
    moved, apart = (exact[0].weight - start).norm(), (exact[0].weight - model[0].weight).norm()
    assert 0 < apart < 0.05 * moved
    kept = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert {name for name, each in kept.items() if hasattr(each["exp_avg"], "codes")} == {"0.weight", "2.weight"}
    moment = kept["0.weight"]["exp_avg"]
    # a code for each number, a scale for each 256 of them
    assert moment.codes.nbytes + moment.scale.nbytes == 256 * 256 * (1 + 4 / 256)
    sizes = Architecture(layers=1, hidden_size=256, heads=4, kv_heads=4, head_dim=64, inner=512, vocabulary=100)
    planned = [
        memory.plan(sizes, Setting(parameters=10**6, trained=10**6, sequence_length=8, optimizer=name))["moments"]
        for name in ("adamw8bit", "adamw")
    ]
    assert planned == [2 * 10**6 * (1 + 4 / 256), 8 * 10**6]


def test_a_checkpoint_in_ordinary_tensors_continues_bit_for_bit(tmp_path: Path) -> None:
    """Also from a copy, as it is written in the background."""
    model, optimizer = made()
    unbroken = steps(model, optimizer, 0, 5)
    model, optimizer = made()
    begun = steps(model, optimizer, 0, 3)
    state = state_of(model, optimizer)
    assert {type(leaf) for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)} == {torch.Tensor}
    assert state["optimizer"]["state"]["0.weight"]["exp_avg"].dtype == torch.uint8
    staged = BlockingAsyncStager().stage(state)
    steps(model, optimizer, 3, 4)  # changes nothing that was staged
    dcp.save(staged, checkpoint_id=tmp_path / "saved", no_dist=True)
    model, optimizer = made()
    state = state_of(model, optimizer)  # before the first step
    assert not any(float(each["step"]) for each in state["optimizer"]["state"].values())
    dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    set_state(model, optimizer, state)
    assert begun + steps(model, optimizer, 3, 5) == unbroken


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_optimizer("adamw8bit")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_optimizer("adamw")
    with pytest.raises(MissingExtraError, match=r"pip install 'gqa-convert\[adamw8bit\]', or use adamw"):
        check_optimizer("adamw8bit")


@pytest.mark.slow
def test_sharded_moments_are_those_of_one_process(tmp_path: Path) -> None:
    """A block of numbers lies in one row, and rows are not divided: three steps, the last after a checkpoint."""
    for number in (1, 2):
        job = Job(run_in_8_bits, (str(tmp_path / "found"),), tmp_path / str(number), number)
        assert set(job.wait(300)) == {0}, job.text()
    alone, shared = (read(tmp_path / f"found-{kind}.npz") for kind in ("single", "fsdp"))
    # the down projection has short rows
    assert alone.pop("quantised") == shared.pop("quantised") == 7
    assert alone.keys() == shared.keys()
    for key, value in alone.items():
        off = np.abs(shared[key] - value)
        if key.startswith("weight "):  # a last digit of a gradient can give a number the code beside it
            assert off.max() < 1e-4, key
            assert (off > 2e-5).mean() < 1e-3, key
        else:
            assert off.max() < 1e-5 * value.max(), key
