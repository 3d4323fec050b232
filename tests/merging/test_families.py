"""Merging by maps that attention absorbs, family by family, in transformers' own classes.

Heads that differ by nothing but such maps merge without loss, and whatever is merged, the result
computes what the source's own class computes with the same numbers, each head as often as there
were heads in its group.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.table import FAMILIES
from gqa_convert.merging.absorption_limits import AbsorptionLimits, find_absorption_limits
from gqa_convert.merging.attention_heads import LayerLayout
from gqa_convert.merging.head_grouping import reorder_heads
from tests.helpers import chatglm
from tests.helpers.folding_cases import (
    CASES,
    EXACT,
    SOME,
    Case,
    Maps,
    build,
    converted,
    placed,
    tie,
)
from tests.helpers.native import distance
from tests.helpers.selection import slow_but

pytestmark = pytest.mark.usefixtures("modeling_files_registered")

Array = np.ndarray[Any, Any]


def read_layers(
    case: Case, folder: Path
) -> list[tuple[AttentionLayer, LayerLayout, AbsorptionLimits]]:
    finder = AttentionFinder(open_checkpoint(case.save(folder)), FAMILIES[case.model_type])
    return [
        (layer, LayerLayout(finder, layer), find_absorption_limits(finder, layer))
        for layer in finder.layers
    ]


@torch.no_grad()
def move(case: Case, layout: LayerLayout, order: Array | None = None) -> None:
    """Put the heads of a layer of the model in another order."""
    found = case.model.state_dict()
    homes = {}
    for name in layout.names:  # files shorten prefixes
        homes[name] = next(key for key in found if key.endswith(name.partition(".")[2]))
    tensors = {name: found[home].numpy().copy() for name, home in homes.items()}
    heads = layout.split_heads(tensors)
    if order is not None:
        heads = reorder_heads(heads, order)
    for name, array in layout.merge_heads(heads, tensors, layout.layer.kv_heads).items():
        assert array.dtype == tensors[name].dtype
        if order is None:
            assert np.array_equal(array, tensors[name]), name
        found[homes[name]].copy_(torch.from_numpy(array.copy()))


@pytest.mark.parametrize("name", slow_but(SOME, sorted(CASES)))
def test_heads_change_places_where_nothing_is_in_the_way_and_there_only(
    name: str, tmp_path: Path
) -> None:
    """And nothing is lost, to the last bit, by splitting and merging them."""
    case = build(name)
    other = copy.deepcopy(case)
    expected, kept = case.logits(), 0
    for layer, layout, limits in read_layers(case, tmp_path):
        move(case, layout)
        assert (limits.order_constraint is not None) == case.keeps_order(layer.module)
        kept += limits.order_constraint is not None
        move(
            other if limits.order_constraint else case,
            layout,
            np.roll(np.arange(layer.kv_heads), 1),
        )
    assert distance(case.logits(), expected) < EXACT
    if (
        kept and case.model_type != "whisper"
    ):  # whose heads are named by their numbers as aligned to time
        assert distance(other.logits(), expected) > 0.01


@pytest.mark.parametrize("name", slow_but(SOME, sorted(CASES.keys() - {"falcon, 7B"})))
def test_heads_that_are_images_of_fewer_merge_without_loss(name: str, tmp_path: Path) -> None:
    """And what is free to be absorbed is what was read out of transformers."""
    case = build(name)
    groups = 2 if name == "falcon, 40B with 4" else 3
    expected = tie(case, groups).logits()
    assert distance(case.logits(converted(case, tmp_path, groups, "factor")), expected) < EXACT
    for layer, _, limits in read_layers(case, tmp_path / "source"):
        assert (limits.key_constraint is not None) == case.keys_blocked
        assert (limits.value_constraint is not None) == case.values_blocked
        assert limits.pairs.size == (case.rotated() if layer.attention_kind == "decoder" else 0)


@pytest.mark.parametrize("name", SOME)
def test_result_is_the_source_with_its_numbers(name: str, tmp_path: Path) -> None:
    """Of heads that have nothing in common; those that may not be factored are averaged."""
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
                blocked = case.values_blocked if role == "value" else case.keys_blocked
                assert torch.allclose(found, mean, rtol=1e-6, atol=1e-7) == blocked
    found = case.logits(result)
    assert distance(found, case.logits()) > 0.01
    assert distance(found, case.logits(placed(case, result, 3))) < EXACT


@pytest.mark.parametrize(
    "name", ["t5", "bart", "opt", "gpt2", "gpt_neox", "bloom", "falcon", "mpt"]
)
def test_results_are_sources_too(name: str, tmp_path: Path) -> None:
    """12 to 6 by the mean, then 6 that are images of 3 to those."""
    case = build(name)
    case.model, case.kv_heads, case.blocks = converted(case, tmp_path, 6, "mean"), 6, True
    expected = tie(case, 3).logits()
    convert_checkpoint(
        case.save(tmp_path / "again"), tmp_path / "out", 3, ConversionOptions(method="factor")
    )
    assert distance(case.logits(case.load(tmp_path / "out")), expected) < EXACT


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_an_encoder_stays_as_it_is(name: str, tmp_path: Path) -> None:
    case = build(name)
    found = dict(converted(case, tmp_path, 3, "factor").named_parameters())
    encoder = {
        name: parameter
        for name, parameter in case.model.named_parameters()
        if "encoder" in name.split(".")
    }
    assert encoder
    assert all(torch.equal(parameter, found[name]) for name, parameter in encoder.items())


def scatter(case: Case, folder: Path, groups: int) -> dict[str, set[frozenset[int]]]:
    """Tie heads, and spread those of a group over all groups; which ones belong together, by
    module.
    """
    tie(case, groups)
    found = {}
    for layer, layout, _ in read_layers(case, folder):
        size = layer.kv_heads // groups
        order = np.arange(layer.kv_heads).reshape(groups, size).T.reshape(-1)
        move(case, layout, order)
        found[layer.module] = {
            frozenset(np.flatnonzero(order // size == group).tolist()) for group in range(groups)
        }
    return found


def grouped(order: list[int], groups: int) -> set[frozenset[int]]:
    return {frozenset(group) for group in np.reshape(order, (groups, -1)).tolist()}


@pytest.mark.parametrize(
    ("name", "kv_heads", "groups"),
    [("llama", 12, 4), ("gpt2", 12, 3), ("bart", 12, 3), ("qwen2", 6, 2)],
)
def test_scattered_heads_find_one_another(
    name: str, kv_heads: int, groups: int, tmp_path: Path
) -> None:
    """From the weights alone; the record tells which heads of the source became one."""
    case = build(name, **({} if kv_heads == 12 else {"kv_heads": kv_heads}))
    together = scatter(case, tmp_path / "heads", groups)
    expected = case.logits()
    result = converted(case, tmp_path, groups, "factor")
    assert distance(case.logits(result), expected) < EXACT
    record = json.loads((tmp_path / f"factor-{groups}" / "gqa_conversion.json").read_text())
    assert {
        module: grouped(order, groups) for module, order in record["head_order"].items()
    } == together


@pytest.mark.parametrize("groups", [3, 2])
def test_chatglm(groups: int, tmp_path: Path) -> None:
    """A fused projection in a `.bin` file, and code that never runs: 6 K/V heads that are images
    of 3 or 2.
    """
    tensors = chatglm.write_source(tmp_path / "source")
    maps, width, config, size = Maps(), chatglm.WIDTH, chatglm.CONFIG, 6 // groups
    for layer in range(chatglm.LAYERS):
        for head in (head for head in range(6) if head % size):
            chosen = {
                chatglm.HEADS: maps.turning(width, width // 2, "interleaved"),
                chatglm.HEADS + 6: maps.any(width),
            }
            for kind in ("weight", "bias"):
                heads = tensors[
                    f"transformer.encoder.layers.{layer}.self_attention.query_key_value.{kind}"
                ].unflatten(0, (-1, width))
                for first, matrix in chosen.items():
                    heads[first + head] = (
                        matrix @ heads[first + head - head % size].double()
                    ).float()
    torch.save(tensors, tmp_path / "source" / "pytorch_model.bin")
    convert_checkpoint(
        tmp_path / "source", tmp_path / "out", groups, ConversionOptions(method="factor")
    )
    ids = torch.randint(chatglm.VOCAB, (9,), generator=torch.Generator().manual_seed(1))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"multi_query_group_num": groups}
    assert (tmp_path / "out" / "modeling_chatglm.py").is_file()
    found = load_file(tmp_path / "out" / "model.safetensors")
    ours = chatglm.reference(found, config | {"multi_query_group_num": groups}, ids)
    assert distance(ours, chatglm.reference(tensors, config, ids)) < EXACT
