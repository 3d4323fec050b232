"""Merging by foldable maps, family by family.

Heads that differ by nothing but maps that attention can absorb merge without loss; and whatever is merged, the result
computes what the source's own class computes with the same numbers.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.table import FAMILIES
from gqa_convert.merging import absorption_limits as absorption_limits
from gqa_convert.merging.absorption_limits import AbsorptionLimits, find_absorption_limits
from tests.helpers import chatglm, native
from tests.helpers.folding_cases import CASES, EXACT, SOME, Maps, build, converted, placed, tie
from tests.helpers.native import distance

pytestmark = pytest.mark.usefixtures("modeling_files_registered")

MERGED = sorted(CASES.keys() - {"falcon, 7B"})
TRANSLATED = 5e-5
"""`EXACT` where norms are folded into projections."""


@pytest.mark.parametrize("name", MERGED)
def test_factored_without_loss(name: str, tmp_path: Path) -> None:
    """12 heads that are images of 3 become those 3; and what is free to be absorbed is what was read out of
    transformers.
    """
    case = build(name)
    groups = {"falcon, 40B with 4": 2}.get(name, 3)
    expected = tie(case, groups).logits()
    assert distance(case.logits(converted(case, tmp_path, groups, "factor")), expected) < EXACT
    finder = AttentionFinder(open_checkpoint(tmp_path / "source"), FAMILIES[case.model_type])
    for layer in finder.layers:
        constraints = find_absorption_limits(finder, layer)
        assert (constraints.key_constraint is not None, constraints.value_constraint is not None) == (
            case.keys_blocked,
            case.values_blocked,
        )
        assert (
            len(constraints.pairs[0])
            == len(constraints.pairs[1])
            == (case.rotated() // 2 if layer.attention_kind == "decoder" else 0)
        )


@pytest.mark.parametrize("name", SOME)
def test_result_is_the_source_with_its_numbers(name: str, tmp_path: Path) -> None:
    """Heads that have nothing in common: OUT's q, k, v and o in the source's own class, K/V heads repeated, compute
    what OUT does.
    """
    case = build(name)
    result = converted(case, tmp_path, 3, "factor")
    theirs = case.parts(result, 3, blocks=True)
    for module, own in case.parts(case.model, case.kv_heads).items():
        for (role, kind), views in own.items():
            before, found = torch.stack(views), torch.stack(theirs[module][role, kind])
            if role == "query":
                assert torch.equal(found, before) == case.keys_blocked
            else:
                mean = before.double().unflatten(0, (3, -1)).mean(1).float()
                blocked = case.keys_blocked if role == "key" else case.values_blocked
                assert torch.allclose(found, mean, rtol=1e-6, atol=1e-7) == blocked
    found = case.logits(result)
    assert distance(found, case.logits()) > 0.01
    assert distance(found, case.logits(placed(case, result, 3))) < EXACT


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("afmoe", "value"),
        ("beam", "value"),
        ("qwen3_next", "value"),
        ("qwen3_next", "key"),
        ("gemma3n_text", "key"),
        ("gemma3n_text", "value"),
        ("bitnet", "value"),
        ("nanochat", "key"),
        ("llama4_text", "key"),
        ("olmo, clipped", "key"),
        ("olmo, clipped", "value"),
        ("mpt, clipped", "value"),
        ("olmo2", "key"),
        ("lfm2", "key"),
        ("phi, key norm", "key"),
        ("cohere, key norm per head", "key"),
    ],
)
def test_folding_constraints_are_needed(name: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbing regardless of what stands in the way is no longer exact."""
    case = build(name)
    expected = tie(case, 3, anyway=role).logits()
    monkeypatch.setattr(absorption_limits, "AbsorptionLimits", lambda pairs, *_: AbsorptionLimits(pairs))
    assert distance(case.logits(converted(case, tmp_path, 3, "factor")), expected) > 0.01


@pytest.mark.parametrize(
    "name", ["llama", "phi", "phi3", "glm", "cohere2", "gptj", "codegen", "gpt_neox, half turns", "falcon"]
)
def test_pairs_of_the_other_layout_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(name)
    other = "half" if FAMILIES[case.model_type].rotary == "interleaved" else "interleaved"
    rows = np.arange(case.rotated())
    pairs = (rows[0::2], rows[1::2]) if other == "interleaved" else (rows[: len(rows) // 2], rows[len(rows) // 2 :])
    expected = tie(case, 3).logits()
    assert distance(case.logits(converted(case, tmp_path / "right", 3, "factor")), expected) < EXACT
    with monkeypatch.context() as patch:
        patch.setattr(absorption_limits, "rotary_pairs", lambda *_: pairs)
        assert distance(case.logits(converted(case, tmp_path / "wrong", 3, "factor")), expected) > 0.01
    case = build(name)
    expected = tie(case, 3, layout=other).logits()
    assert distance(case.logits(converted(case, tmp_path / "tied", 3, "factor")), expected) > 0.01


@pytest.mark.parametrize("groups", [3, 2])
@pytest.mark.parametrize("name", native.REPRESENTATIVE)
def test_grouped_source(name: str, groups: int, tmp_path: Path) -> None:
    """12 query heads on 6 K/V heads."""
    case = build(name, kv_heads=6)
    expected = tie(case, groups).logits()
    assert distance(case.logits(converted(case, tmp_path, groups, "factor")), expected) < EXACT


TWINS = [
    "t5",
    "bart",
    "whisper",
    "opt",
    "biogpt",
    "gpt2",
    "gpt_neo",
    "gptj",
    "codegen",
    "gpt_neox",
    "persimmon",
    "bloom",
    "falcon",
    "mpt",
]
"""A model type of each modelling file."""


@pytest.mark.parametrize("name", TWINS)
def test_results_are_sources_too(name: str, tmp_path: Path) -> None:
    """12 to 6 by the mean, then 6 that are images of 3 to those."""
    case = build(name)
    case.model, case.kv_heads, case.blocks = converted(case, tmp_path, 6, "mean"), 6, True
    expected = tie(case, 3).logits()
    convert_checkpoint(case.save(tmp_path / "again"), tmp_path / "out", 3, method="factor")
    assert distance(case.logits(case.load(tmp_path / "out")), expected) < EXACT


@pytest.mark.parametrize(
    ("name", "encoder_heads", "groups"), [("t5", 12, 3), ("bart", 8, 4), ("whisper", 6, 3), ("whisper", 6, 6)]
)
def test_encoder(name: str, encoder_heads: int, groups: int, tmp_path: Path) -> None:
    """Encoder and decoder have counts of their own; a layer that has as few heads already stays as it is, bit for
    bit.
    """
    case = build(name)
    tie(case, groups)
    case.encoder, case.heads, case.kv_heads = True, encoder_heads, encoder_heads
    expected = tie(case, groups).logits()
    result = converted(case, tmp_path, groups, "factor", encoder=True)
    assert distance(case.logits(result), expected) < EXACT
    if encoder_heads == groups:
        found = dict(result.named_parameters())
        encoder = {name: parameter for name, parameter in case.model.named_parameters() if "encoder" in name.split(".")}
        assert encoder
        assert all(torch.equal(parameter, found[name]) for name, parameter in encoder.items())


@pytest.mark.parametrize("name", ["codegen", "gptj", "gpt_neox, half turns", "gpt_neox, serial, all turns", "gpt2"])
def test_translated(name: str, tmp_path: Path) -> None:
    """To phi, starcoder2 and gpt_bigcode."""
    case = build(name)
    groups = 1 if name == "gpt2" else 3
    expected = tie(case, groups).logits()
    converted = convert_checkpoint(
        case.save(tmp_path / "source"), tmp_path / "out", groups, method="factor", native=True
    )
    assert converted.plan.route == "translated"
    assert distance(case.logits(native.load(tmp_path / "out")), expected) < TRANSLATED


@pytest.mark.parametrize("groups", [3, 2])
def test_chatglm(groups: int, tmp_path: Path) -> None:
    """A fused projection in a `.bin` file, and code that never runs: 6 K/V heads that are images of 3 or 2."""
    tensors = chatglm.write_source(tmp_path / "source")
    maps, width, config, size = Maps(), chatglm.WIDTH, chatglm.CONFIG, 6 // groups
    for layer in range(chatglm.LAYERS):
        for head in (head for head in range(6) if head % size):
            chosen = {chatglm.HEADS: maps.turning(width, width // 2, "interleaved"), chatglm.HEADS + 6: maps.any(width)}
            for kind in ("weight", "bias"):
                heads = tensors[f"transformer.encoder.layers.{layer}.self_attention.query_key_value.{kind}"].unflatten(
                    0, (-1, width)
                )
                for first, matrix in chosen.items():
                    heads[first + head] = (matrix @ heads[first + head - head % size].double()).float()
    torch.save(tensors, tmp_path / "source" / "pytorch_model.bin")
    convert_checkpoint(tmp_path / "source", tmp_path / "out", groups, method="factor")
    ids = torch.randint(chatglm.VOCAB, (9,), generator=torch.Generator().manual_seed(1))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"multi_query_group_num": groups}
    assert (tmp_path / "out" / "modeling_chatglm.py").is_file()
    found = load_file(tmp_path / "out" / "model.safetensors")
    ours = chatglm.reference(found, config | {"multi_query_group_num": groups}, ids)
    assert distance(ours, chatglm.reference(tensors, config, ids)) < EXACT
