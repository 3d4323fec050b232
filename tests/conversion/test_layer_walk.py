"""The walk computes what ordinary calls of two independent models compute, for every type of
model.
"""

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gqa_convert.conversion.layers.attention_calls import parts_of
from gqa_convert.conversion.layers.layer_walk import LayerWalk
from gqa_convert.conversion.layers.merged_attention import replaced
from gqa_convert.families.table import FAMILIES
from tests.helpers import elsewhere, native, own_files
from tests.helpers.folding_cases import build
from tests.helpers.native import distance
from tests.helpers.selection import slow_but

OTHER = re.compile("relative|bias|norm|rotary|gate|conv|A_log|dt_|D$|experts|router")


def batches_for(model: Any) -> list[dict[str, Tensor]]:
    """Two batches of different lengths with padding."""
    given, _ = elsewhere.batch(model)
    shorter = {
        name: tensor if name in ("input_features", "pixel_values") else tensor[:, :-1].contiguous()
        for name, tensor in given.items()
    }
    return [given, shorter]


def changed(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Other weights of an attention module."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: parameter.detach()
        + 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        for name, parameter in module.named_parameters()
        if parameter.dim() == 2 and not OTHER.search(name)
    }


def ordinary(
    model: Any, batches: list[dict[str, Tensor]], modules: list[nn.Module]
) -> tuple[list[Tensor], dict[nn.Module, list[tuple[Tensor, Tensor]]]]:
    """The logits of each batch, and what each module reads and returns, by ordinary calls."""
    seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {module: [] for module in modules}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        entered = args[0] if args else kwargs["hidden_states"]
        left = output if isinstance(output, Tensor) else output[0]
        seen[module].append((entered.clone(), left.clone()))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    with torch.no_grad():
        logits = [model(**batch, use_cache=False).logits for batch in batches]
    for hook in hooks:
        hook.remove()
    return logits, seen


def check(case: str) -> None:
    built = build(case)
    model = built.model.requires_grad_(False)
    batches = batches_for(model)
    output = FAMILIES[built.model_type].output
    names = list(built.parts(model, built.kv_heads))
    changes = {name: changed(model.get_submodule(name), seed) for seed, name in enumerate(names)}
    changed_model = copy.deepcopy(model)
    for name, parameters in changes.items():
        changed_model.get_submodule(name).load_state_dict(parameters, strict=False)
    modules = {name: changed_model.get_submodule(name) for name in names}
    projections = {name: module.get_submodule(output) for name, module in modules.items()}
    expected, _ = ordinary(model, batches, [])
    expected_of_student, seen = ordinary(
        changed_model, batches, [*modules.values(), *projections.values()]
    )
    walk = LayerWalk(model, batches, names, output)
    source, student = walk.streams(2)
    for layer in walk.layers:
        weights = {
            name: partial(replaced, walk.module(name), changes[name]) for name in layer.attention
        }
        for name in layer.attention:
            before = {
                other: weights[other] for other in layer.attention[: layer.attention.index(name)]
            }
            captured = student.attention(layer, name, before)
            for number, call in enumerate(captured.calls):
                entered, _ = seen[modules[name]][number]
                assert distance(call.hidden, entered) < 1e-4
                with weights[name](), torch.no_grad():
                    found = captured.run(call)
                for own, oracle in zip(
                    found, reversed(seen[projections[name]][number]), strict=True
                ):
                    assert distance(own.reshape(oracle.shape), oracle) < 1e-4
                assert torch.equal(captured.run(call)[0], call.output)
        source.advance(layer)
        student.advance(layer, weights)
    for number in range(len(batches)):
        assert distance(source.logits(number), expected[number]) < 1e-4
        assert distance(student.logits(number), expected_of_student[number]) < 1e-4
        assert distance(expected[number], expected_of_student[number]) > 1e-2


TIED = ("zamba", "zamba2", "zamba2, no rotary")
"""Types whose layers share the weights of one attention module, which the walk replaces in the
first of them alone.
"""
TWO_WIDTHS = ("gemma4_text",)  # tested with its record
EVERY_RUN = (
    "gpt2, cross-attention",
    *["llama", "phi3", "gemma2", "qwen3_next", "granite", "bloom", "falcon", "t5", "whisper"],
)
CASES = [case for case in (*native.CASES, *own_files.CASES) if case not in (*TIED, *TWO_WIDTHS)]


@pytest.mark.parametrize("case", slow_but(EVERY_RUN, CASES))
def test_a_student_equals_ordinary_calls(case: str) -> None:
    check(case)


PLACES = {
    **dict.fromkeys(("cohere", "gpt_neox", "falcon"), ""),
    **dict.fromkeys(("olmo2", "gemma2"), "self_attn.o_proj"),
    **dict.fromkeys(("llama", "granite"), "post_attention_layernorm"),
    "bart": "self_attn_layer_norm",
    "bloom": "self_attention",
    "gpt2": "ln_2",
    "mpt": "norm_2",
    "opt": "final_layer_norm",
    "t5": "layer.0",
}


@pytest.mark.parametrize("case", PLACES)
def test_the_residual_stream_is_found(case: str) -> None:
    """Behind attention or a parallel MLP; a norm between attention and the sum leaves the
    contribution itself.
    """
    options = {"residual_multiplier": 0.5} if case == "granite" else {}
    built = build(case, **options)
    model, names = built.model.requires_grad_(False), list(built.parts(built.model, built.kv_heads))
    walk = LayerWalk(model, batches_for(model), names, FAMILIES[case].output)
    found = walk.places[names[0]]
    assert found.module == f"{walk.layers[0].name}.{PLACES[case]}".rstrip(".")
    assert found.factor == pytest.approx(0.5 if case == "granite" else 1.0)


def test_batches_are_divided() -> None:
    long, short = torch.zeros(2, 600, dtype=torch.long), torch.zeros(5, 200, dtype=torch.long)
    assert [len(part["input_ids"]) for part in parts_of({"input_ids": long})] == [1, 1]
    assert [len(part["input_ids"]) for part in parts_of({"input_ids": short})] == [2, 2, 1]
