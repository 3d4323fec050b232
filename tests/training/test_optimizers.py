"""The optimizers: which parameters they train, and by which steps."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.optimization import Adafactor as TransformersAdafactor

import gqa_convert
from gqa_convert.training import adafactor
from gqa_convert.training.optimizers import Adafactor, build_optimizer
from gqa_convert.training.recipe import Recipe, make_recipe
from tests.helpers.tiny import make_config, make_model

LLAMA: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "pad_token_id": 0,
}


def llama(**keys: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA | keys))


def recipe(**keys: Any) -> Recipe:
    return make_recipe({"model": "m", "output": "o", "data": "d", "tokens": "10M"} | keys)


def test_experts_without_a_token_have_gradients() -> None:
    """DDP waits for the gradient of every parameter."""
    model = make_model(make_config("mixtral", num_local_experts=8, num_experts_per_tok=1)).train()
    model(input_ids=torch.tensor([[3]]), use_cache=False).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(name: str) -> None:
    model = llama(attention_bias=True)
    optimizer = build_optimizer(model, recipe(optimizer=name, weight_decay=0.1, learning_rate=1e-3))
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len({id(parameter) for parameter in grouped}) == len(list(model.parameters()))
    for group in optimizer.param_groups:
        assert group["lr"] == 1e-3
        assert {parameter.ndim >= 2 for parameter in group["params"]} == {group["weight_decay"] == 0.1}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> float:
    """Learn one batch by heart."""
    tokens = torch.randint(1, 40, (2, 12), generator=torch.Generator().manual_seed(seed))
    loss = torch.tensor(0.0)
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_training_lowers_the_loss(name: str) -> None:
    model = llama()
    rate = {"adamw": 1e-2, "adafactor": 0.1}[name]
    optimizer = build_optimizer(model, recipe(optimizer=name, learning_rate=rate))
    first = train(model, optimizer, 1)
    assert train(model, optimizer, 30) < 0.7 * first


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_saved_state_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = llama()
    asked = recipe(optimizer=name, learning_rate=1e-2, weight_decay=0.01)
    optimizer = build_optimizer(model, asked)
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    train(model, optimizer, 3)

    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = llama()
    resumed.load_state_dict(saved["model"])
    again = build_optimizer(resumed, asked)
    again.load_state_dict(saved["optimizer"])
    train(resumed, again, 3)
    for before, after in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(before, after)


def paper_steps(weight: torch.Tensor, gradients: list[torch.Tensor], rate: float, factored: bool) -> torch.Tensor:
    """Algorithms 4 and 5 of Shazeer & Stern 2018, with the given rate in place of their relative one, in float64."""
    x = weight.double()
    rows = columns = squares = torch.zeros(())
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double()
        decay = 1 - t**-0.8
        alpha = max(1e-3, float((x**2).mean().sqrt())) * rate
        if factored:
            rows = decay * rows + (1 - decay) * (g**2 + 1e-30).sum(1)
            columns = decay * columns + (1 - decay) * (g**2 + 1e-30).sum(0)
            squares = torch.outer(rows, columns) / rows.sum()
        else:
            squares = decay * squares + (1 - decay) * (g**2 + 1e-30)
        u = g / squares.sqrt()
        x = x - alpha * u / max(1.0, float((u**2).mean().sqrt()))
    return x


@pytest.mark.parametrize(("shape", "factored"), [((5, 7), True), ((5, 7), False), ((9,), False)])
def test_adafactor_takes_the_papers_steps(
    shape: tuple[int, ...], factored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adafactor, "LEAST_FACTORED", 2 if factored else 128)
    random = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(torch.randn(shape, generator=random) * 3)
    start = parameter.detach().clone()
    gradients = [torch.randn(shape, generator=random) * 10.0**exponent for exponent in (-3, 0, 1, -6)]
    optimizer = Adafactor([parameter], lr=0.05)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = paper_steps(start, gradients, 0.05, factored)
    assert torch.allclose(parameter.double(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(parameter, start, rtol=1e-2)


def test_adafactor_is_transformers_where_both_factor() -> None:
    random = torch.Generator().manual_seed(2)
    ours = [nn.Parameter(torch.randn(shape, generator=random)) for shape in ((130, 140), (6,))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizers = [
        Adafactor(ours, lr=1e-2, weight_decay=0.1),
        TransformersAdafactor(theirs, lr=1e-2, weight_decay=0.1, scale_parameter=True, relative_step=False),
    ]
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=random)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


SHARDED = """
import sys
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from gqa_convert.training.optimizers import Adafactor

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(131, 129), nn.Tanh(), nn.Linear(129, 5))

dist.init_process_group("gloo")
whole, sharded = model(), model()
fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizers = [Adafactor(each.parameters(), lr=0.05, weight_decay=0.1) for each in (whole, sharded)]
torch.manual_seed(1)
for _ in range(3):
    batch = torch.randn(8, 131)  # the same on every process, so that averaged gradients are those of one
    for each, optimizer in zip((whole, sharded), optimizers):
        optimizer.zero_grad()
        each(batch).square().sum().backward()
        optimizer.step()
for one, other in zip(whole.parameters(), sharded.parameters()):
    torch.testing.assert_close(other.full_tensor(), one, rtol=1e-4, atol=1e-5)
    assert other.to_local().numel() < one.numel()
states = [sum(value.numel() for value in each.state[next(iter(each.state))].values()) for each in optimizers]
assert states[0] == states[1] == 131 + 129 + 1

tensors, moments = get_state_dict(sharded, optimizers[1])
save({"model": tensors, "optimizer": moments}, checkpoint_id=sys.argv[1])
resumed = model()
fully_shard(resumed, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
again = Adafactor(resumed.parameters(), lr=0.05, weight_decay=0.1)
tensors, moments = get_state_dict(resumed, again)
state = {"model": tensors, "optimizer": moments}
load(state, checkpoint_id=sys.argv[1])
set_state_dict(resumed, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
batch = torch.randn(8, 131)
for each, optimizer in ((sharded, optimizers[1]), (resumed, again)):
    optimizer.zero_grad()
    each(batch).square().sum().backward()
    optimizer.step()
for one, other in zip(sharded.parameters(), resumed.parameters()):
    assert torch.equal(one.to_local(), other.to_local())
dist.destroy_process_group()
# all is checked; gloo's threads live on in DTensor's caches, and one that still holds a tensor may abort an interpreter
# as it ends
__import__("os")._exit(0)
"""


@pytest.mark.slow
def test_adafactor_on_sharded_parameters_is_that_on_whole_ones_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(script),
        str(tmp_path / "state"),
    ]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(gqa_convert.__file__).parents[1])}
    result = subprocess.run(command, capture_output=True, text=True, env=surroundings, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
