"""The walk computes what ordinary calls of two independent models compute, for every type of model."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gqa_convert.conversion.fit.layer_walk import LayerWalk
from tests.helpers import native, own_files
from tests.helpers.tiny import make_config, make_model

ATTENTION = re.compile(
    r"\b(self_attn|encoder_attn|attn|attention|self_attention|SelfAttention|EncDecAttention|mixer|temporal_block)$"
)
PROJECTION = re.compile("q|k_proj|W|c_attn|^k$")
OTHER = re.compile("relative|bias|norm|rotary|gate|conv|A_log|dt_|D$|experts|router")


def build(case: str) -> Any:
    if case in native.CASES:
        model_type, options = native.CASES[case]
        return make_model(make_config(model_type, **options))
    model_type, options = own_files.CASES[case]
    return own_files.make_source_model(model_type, **options)


def batches_for(model: Any) -> list[dict[str, Tensor]]:
    """Two batches of different lengths, the first with padding."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in (11, 8):
        ids = torch.randint(3, 60, (2, length), generator=generator)
        if hasattr(model.config, "num_mel_bins"):
            shape = (2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
            batches.append({"input_features": torch.randn(shape, generator=generator), "decoder_input_ids": ids})
            continue
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if length == 11:
            batch["attention_mask"][1, :3] = 0
        if model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = torch.randint(3, 60, (2, length - 4), generator=generator)
        batches.append(batch)
    return batches


def attention_of(model: Any, *, encoder: bool) -> dict[str, nn.Module]:
    """The outermost attention modules."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{outer}.") for outer in found)
        in_encoder = "encoder" in name.split(".")
        projects = any(PROJECTION.search(part) for part, _ in module.named_children())
        if ATTENTION.search(name) and projects and not is_inner and (encoder or not in_encoder):
            found[name] = module
    return found


def changed(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Other weights of an attention module."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: parameter.detach() + 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        for name, parameter in module.named_parameters()
        if parameter.dim() == 2 and not OTHER.search(name)
    }


def ordinary(model: Any, batches: list[dict[str, Tensor]], modules: list[nn.Module]) -> tuple[list[Tensor], list[Any]]:
    """The logits of each batch, and what each module reads and returns, by ordinary calls."""
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        entered = args[0] if args else kwargs["hidden_states"]
        seen.append((module, entered.clone(), (output if isinstance(output, Tensor) else output[0]).clone()))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    with torch.no_grad():
        logits = [model(**batch, use_cache=False).logits for batch in batches]
    for hook in hooks:
        hook.remove()
    return logits, seen


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


def check(case: str, *, encoder: bool = False) -> None:
    model = build(case).requires_grad_(False)
    batches = batches_for(model)
    names = list(attention_of(model, encoder=encoder))
    changes = {name: changed(model.get_submodule(name), seed) for seed, name in enumerate(names)}
    changed_model = copy.deepcopy(model)
    for name, parameters in changes.items():
        changed_model.get_submodule(name).load_state_dict(parameters, strict=False)
    expected = ordinary(model, batches, [])[0]
    expected_of_student, seen = ordinary(changed_model, batches, [changed_model.get_submodule(name) for name in names])
    walk = LayerWalk(model, batches, names)
    source, student = walk.streams(2)
    for layer in walk.layers:
        for name in layer.attention:
            before = {other: changes[other] for other in layer.attention[: layer.attention.index(name)]}
            captured = student.attention(layer, name, before)
            module = changed_model.get_submodule(name)
            oracle = [(entered, left) for each, entered, left in seen if each is module]
            for call, (entered, left) in zip(captured.calls, oracle, strict=True):
                assert distance(call.hidden, entered) < 1e-4
                if captured.output is None:
                    assert distance(captured.run(call, changes[name])[0].reshape(left.shape), left) < 1e-4
                assert torch.equal(captured.run(call)[0], call.output)
        source.advance(layer)
        student.advance(layer, {name: changes[name] for name in layer.attention})
    for number in range(len(batches)):
        assert distance(source.logits(number), expected[number]) < 1e-4
        assert distance(student.logits(number), expected_of_student[number]) < 1e-4
        assert distance(expected[number], expected_of_student[number]) > 1e-2


TIED = ("zamba", "zamba2", "zamba2, no rotary")
"""Types whose layers share the weights of one attention module, which the walk replaces in the first of them alone."""
CASES = [case for case in (*native.CASES, *own_files.CASES) if case not in TIED]


@pytest.mark.parametrize("case", CASES)
def test_a_student_equals_ordinary_calls(case: str) -> None:
    check(case)


@pytest.mark.parametrize("case", ["t5", "bart", "marian", "whisper", "switch_transformers"])
def test_a_student_reads_its_own_encoder(case: str) -> None:
    check(case, encoder=True)
