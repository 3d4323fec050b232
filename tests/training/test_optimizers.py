"""The optimizers: which parameters they train, and by which steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as TransformersAdafactor

from gqa_convert.training.optimizers import Adafactor, build_optimizer
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
    keys = {"model": "m", "output": "o", "data": "d", "tokens": "10M", "optimizer": name, "weight_decay": 0.1}
    optimizer = build_optimizer(model, make_recipe(keys))
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in grouped} == {id(parameter) for parameter in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))
    for group in optimizer.param_groups:
        assert {parameter.ndim >= 2 for parameter in group["params"]} == {group["weight_decay"] == 0.1}


def test_adafactor_is_that_of_transformers() -> None:
    """Also for experts, which are stacked matrices, and with gradients of very different sizes."""
    random = torch.Generator().manual_seed(2)
    ours = [nn.Parameter(3 * torch.randn(shape, generator=random)) for shape in ((13, 14), (6,), (3, 5, 7))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizers = [
        Adafactor(ours, lr=1e-2, weight_decay=0.1),
        TransformersAdafactor(theirs, lr=1e-2, weight_decay=0.1, scale_parameter=True, relative_step=False),
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
    """Takes steps on a model whole and sharded unevenly, and goes on from a checkpoint of the sharded one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from gqa_convert.training.checkpoints import set_state, state_of
    from gqa_convert.training.distributed import join, taking_part

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
        set_state(*resumed, state)
        train(2, sharded, resumed)
        for one, other in zip(sharded[0].parameters(), resumed[0].parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())


@pytest.mark.slow
def test_adafactor_on_shards_is_that_on_whole_parameters_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    job = Job(on_shards, (str(tmp_path / "state"),), tmp_path / "logs", 2)
    assert job.wait(120) == [0, 0], job.text()
