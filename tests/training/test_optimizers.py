"""The optimizers: which parameters they train, by which steps, and at which rates."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as TransformersAdafactor

from gqa_convert.training.adafactor import Adafactor
from gqa_convert.training.optimizers import build_optimizer, share_of_peak
from gqa_convert.training.recipe import make_recipe
from tests.helpers.ranks import Job
from tests.helpers.tiny import make_config, make_model


def test_experts_without_a_token_have_gradients() -> None:
    """DDP waits for the gradient of every parameter."""
    model = make_model(make_config("mixtral", num_local_experts=8, num_experts_per_tok=1)).train()
    model(input_ids=torch.tensor([[3]]), use_cache=False).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(name: str) -> None:
    model = make_model(make_config("llama", attention_bias=True))
    keys = {
        "model": "m",
        "output": "o",
        "data": "d",
        "tokens": "10M",
        "optimizer": name,
        "weight_decay": 0.1,
    }
    optimizer = build_optimizer(model, make_recipe(keys))
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in grouped} == {
        id(parameter) for parameter in model.parameters()
    }
    assert len(grouped) == len(list(model.parameters()))
    for group in optimizer.param_groups:
        assert {parameter.ndim >= 2 for parameter in group["params"]} == {
            group["weight_decay"] == 0.1
        }


def test_adafactor_is_that_of_transformers() -> None:
    """Also for experts, which are stacked matrices, and with gradients of very different sizes."""
    random = torch.Generator().manual_seed(2)
    ours = [
        nn.Parameter(3 * torch.randn(shape, generator=random))
        for shape in ((13, 14), (6,), (3, 5, 7))
    ]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizers = [
        Adafactor(ours, lr=1e-2, weight_decay=0.1),
        TransformersAdafactor(
            theirs, lr=1e-2, weight_decay=0.1, scale_parameter=True, relative_step=False
        ),
    ]
    for exponent in (-3, 0, 1, -6):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = 10.0**exponent * torch.randn(mine.shape, generator=random)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


def on_shards(folder: str) -> None:
    """Takes steps on a model whole and sharded unevenly, and goes on from a checkpoint of the
    sharded one.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from gqa_convert.processes import join, taking_part
    from gqa_convert.training.checkpoints import state_of

    def made(sharded: bool) -> tuple[Any, Adafactor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(13, 9), nn.Tanh(), nn.Linear(9, 5))
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, Adafactor(model.parameters(), lr=0.05, weight_decay=0.1)

    def train(steps: int, *pairs: tuple[Any, Adafactor]) -> None:
        for step in range(steps):
            batch = torch.randn(8, 13, generator=torch.Generator().manual_seed(step))
            for model, optimizer in pairs:
                optimizer.zero_grad()
                model(batch).square().sum().backward()
                optimizer.step()

    with taking_part():
        join()
        whole, sharded, resumed = made(False), made(True), made(True)
        train(3, whole, sharded)
        for one, other in zip(whole[0].parameters(), sharded[0].parameters(), strict=True):
            torch.testing.assert_close(other.full_tensor(), one, rtol=1e-4, atol=1e-5)
            assert other.to_local().numel() < one.numel()
        dcp.save(state_of(*sharded), checkpoint_id=folder)
        state = state_of(*resumed)
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(*resumed, state["optimizer"])
        train(2, sharded, resumed)
        for one, other in zip(sharded[0].parameters(), resumed[0].parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())


@pytest.mark.slow
def test_adafactor_on_shards_is_that_on_whole_parameters_and_goes_on_bit_for_bit(
    tmp_path: Path,
) -> None:
    job = Job(on_shards, (str(tmp_path / "state"),), tmp_path / "logs", 2)
    assert job.wait(120) == [0, 0], job.text()


def shares(schedule: str, steps: int, warmup: int, **keys: Any) -> list[float]:
    """The learning rates of all steps, as shares of the peak."""
    stated = {"model": "m", "output": "o", "data": "d", "tokens": "10M", "schedule": schedule}
    recipe = make_recipe(stated | keys)
    return [share_of_peak(recipe, step, steps, warmup) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (7, 7), (10, 0), (100, 2), (1000, 999)]
)
def test_warmup_rises_in_a_straight_line_and_nothing_rises_after_it(
    schedule: str, steps: int, warmup: int
) -> None:
    found = shares(schedule, steps, warmup)
    assert found[:warmup] == pytest.approx([step / warmup for step in range(1, warmup + 1)])
    assert all(0 < value <= 1 for value in found)
    assert all(after <= before for before, after in itertools.pairwise(found[max(0, warmup - 1) :]))
    if warmup < steps and schedule != "constant":
        assert shares(schedule, steps, warmup, final_learning_rate=0.2)[-1] == pytest.approx(0.2)


def test_cosine_is_half_a_period_and_wsd_falls_in_a_straight_line_at_the_end() -> None:
    assert shares("cosine", 110, 10, final_learning_rate=0.2)[59] == pytest.approx(0.6)
    assert shares("cosine", 110, 10, final_learning_rate=0)[34] == pytest.approx(
        (1 + math.sqrt(0.5)) / 2
    )
    found = shares("wsd", 100, 10, final_learning_rate=0, decay_share=0.2)
    assert found[9:80] == [1.0] * 71
    assert found[80:] == pytest.approx([(100 - step) / 20 for step in range(81, 101)])
    assert shares("constant", 1000, 0)[-1] == 1
