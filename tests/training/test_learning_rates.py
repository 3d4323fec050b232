"""Learning rates of single parameters, and parameters that stay as they are."""

import json
from typing import Any

import pytest
import torch

from gqa_convert.errors import RecipeError
from gqa_convert.training.learning_rates import RateRule, multipliers
from gqa_convert.training.optimizers import build_optimizer, choose_trained
from gqa_convert.training.recipe import make_recipe
from tests.helpers.distributed_steps import BASE, VOCABULARY, small_model

NAMES = ["embed_tokens.weight", "layers.0.mlp.weight", "layers.1.mlp.weight", "layers.1.norm.weight"]


def test_the_first_pattern_that_is_found_counts() -> None:
    rules = make_recipe(
        BASE | {"learning_rates": {r"layers\.1\.norm": "frozen", r"layers\.1": 0.5, "embed": 0}}
    ).learning_rates
    assert multipliers(NAMES, rules) == dict(zip(NAMES, (0.0, 1.0, 0.5, 0.0), strict=True))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("frozen", "learning_rates is frozen: it must be a mapping"),
        ({"(": 1}, "learning_rates[(] is no regular expression"),
        ({"norm": -1}, "learning_rates[norm] is -1: it must be frozen, or a number at least 0"),
        ({"norm": "slow"}, "learning_rates[norm] is slow: it must be frozen"),
    ],
)
def test_values_that_make_no_sense_are_refused(value: Any, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        make_recipe(BASE | {"learning_rates": value})
    assert message in str(raised.value)


def test_a_pattern_without_a_parameter_is_refused() -> None:
    with pytest.raises(RecipeError) as raised:
        multipliers(NAMES, [RateRule("lm_head", 0.5)])
    assert str(raised.value) == (
        "learning_rates names 'lm_head', which is found in no trained parameter: their names are like embed_tokens.weight, layers.0.mlp.weight"
    )
    with pytest.raises(RecipeError, match="freezes every trained parameter"):
        choose_trained(small_model("llama"), "all", [RateRule(".", 0.0)])


def test_rules_survive_the_resolved_recipe() -> None:
    made = make_recipe(BASE | {"learning_rates": {"norm": {"frozen": True}, "mlp": "0.1"}})
    assert made.learning_rates == (RateRule("norm", 0.0), RateRule("mlp", 0.1))
    assert make_recipe(json.loads(json.dumps(made.resolved()))) == made
    assert "learning_rates was" in made.differences(make_recipe(BASE))[0]


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_step_moves_each_parameter_by_its_rate(optimizer: str) -> None:
    """A first step of each optimizer is proportional to the rate."""
    steps = {}
    for rates in ({}, {"embed|norm": "frozen", r"layers\.0": 0.25}):
        recipe = make_recipe(BASE | {"optimizer": optimizer, **({"learning_rates": rates} if rates else {})})
        model = small_model("llama")
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        choose_trained(model, recipe.trainable, recipe.learning_rates)
        built = build_optimizer(model, recipe)
        tokens = torch.randint(2, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
        model(input_ids=tokens, labels=tokens).loss.backward()
        for group in built.param_groups:
            group["lr"] = 1e-3 * group.get("multiplier", 1.0)
        built.step()
        steps[bool(rates)] = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    for name, step in steps[True].items():
        share = 0.0 if "embed" in name or "norm" in name else 0.25 if "layers.0" in name else 1.0
        torch.testing.assert_close(step, share * steps[False][name], rtol=1e-3, atol=1e-7)
