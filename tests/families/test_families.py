"""Every family of the table against its own source: a converted model computes what the source
computes once each K/V head is replaced by its group's mean, with a cache and without one.
"""

import copy
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.cli.console.plan import show_plan
from gqa_convert.conversion.estimate import estimate_needs
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import ConfigError, GroupsError, UnsupportedFamilyError
from gqa_convert.families.engines import LOADERS
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.table import COMPOSITES, FAMILIES, REFUSALS, find_family
from tests.helpers.elsewhere import cached_heads, generated, logits
from tests.helpers.folding_cases import EXACT, Case, pool
from tests.helpers.native import CASES, REPRESENTATIVE, distance, load
from tests.helpers.tiny import HEADS, make_checkpoint


@pytest.fixture
def source(once: Callable[..., Path]) -> Callable[..., Path]:
    """A tiny checkpoint of a case."""
    return lambda case, **options: once(
        make_checkpoint, CASES[case][0], **CASES[case][1], **options
    )


def converted(folder: Path, groups: int) -> Path:
    out = folder.parent / f"groups-{groups}"
    if not out.exists():
        convert_checkpoint(folder, out, groups, ConversionOptions(method="mean"))
    return out


CONVERSIONS = [
    *((case, HEADS, 3) for case in CASES),
    *((case, *counts) for case in REPRESENTATIVE for counts in ((HEADS, 1), (6, 3))),
]
"""Cases, and the numbers of K/V heads before and after."""


@pytest.mark.parametrize(("case", "kv_heads", "groups"), CONVERSIONS)
def test_result_is_the_source_with_merged_heads(
    case: str, kv_heads: int, groups: int, source: Callable[..., Path]
) -> None:
    model_type = CASES[case][0]
    folder = source(case, **({} if kv_heads == HEADS else {"kv_heads": kv_heads}))
    model = load(folder)
    oracle = pool(Case(model_type, copy.deepcopy(model), kv_heads), groups)
    result = load(converted(folder, groups))
    plan = make_plan(open_checkpoint(folder), groups)
    before, less = (
        sum(parameter.numel() for parameter in each.parameters()) for each in (model, result)
    )
    assert plan.parameters_before - plan.parameters_after == before - less
    assert plan.kv_cache_bytes().after * kv_heads == plan.kv_cache_bytes().before * groups
    after = logits(result)
    assert distance(after, logits(oracle)) < EXACT
    assert distance(after, logits(model)) > 0.01
    assert cached_heads(result) == {"self": [groups]}
    assert generated(result) == generated(oracle) == generated(result, use_cache=False)
    if groups > 1:
        strided = pool(Case(model_type, model, kv_heads), groups, strided=True)
        assert distance(logits(strided), after) > 0.01, (
            "heads that stand apart, instead of neighbours, are not noticed"
        )


@pytest.mark.parametrize(("before", "after"), [(6, 12), (3, 6)])
@pytest.mark.parametrize("case", REPRESENTATIVE)
def test_repeated_heads_change_nothing(
    case: str, before: int, after: int, source: Callable[..., Path]
) -> None:
    folder = source(case, kv_heads=before)
    if FAMILIES[CASES[case][0]].key_norm == "per_head_list":
        with pytest.raises(GroupsError, match="one tensor per K/V head"):
            converted(folder, after)
        return
    result = load(converted(folder, after))
    assert distance(logits(result), logits(load(folder))) < EXACT
    assert cached_heads(result) == {"self": [after]}


def test_every_model_type_is_known() -> None:
    """Each type that transformers can load as a language model is converted or refused with a
    reason.
    """
    types = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | set(
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )
    unknown = sorted(types - FAMILIES.keys() - COMPOSITES.keys() - REFUSALS.keys())
    assert not unknown, (
        f"{', '.join(unknown)}: add a record or a reason in gqa_convert/families/facts.toml "
        "(docs/developing.md)"
    )
    converted_types = {
        family.modeling.model_type for family in FAMILIES.values() if family.modeling
    }
    # for speech; for pictures; by code of its own
    elsewhere = {"whisper", "speech_to_text", "florence2", "vision-encoder-decoder", "chatglm"}
    assert FAMILIES.keys() - converted_types - elsewhere <= types, (
        "a record's model type is unknown to transformers"
    )
    both = sorted(FAMILIES.keys() & REFUSALS.keys())
    assert not both, f"{', '.join(both)}: delete the refusal in gqa_convert/families/facts.toml"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("pegasus_x", "modelling file"),
        ("moonshine", "divides the queries by the number of K/V heads"),
        ("bert", "encoder"),
        ("mamba", "no attention"),
        ("gemma3", "wraps a decoder"),
        ("no_such_type", "unknown"),
        ("gpt_bigcode", "one K/V head or as many as query heads, and nothing between"),
        ("", "names no model_type"),
        ("qwen", "only by the code in its checkpoint"),
        (None, "names no model_type"),
    ],
)
def test_refusals_say_why(model_type: str | None, reason: str) -> None:
    with pytest.raises(UnsupportedFamilyError, match=reason) as caught:
        find_family(model_type)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("case", "options", "told"),
    [
        ("llama", {}, "transformers yes, vLLM yes, llama.cpp yes"),
        ("phi", {}, "transformers yes, vLLM yes, llama.cpp not known"),
        ("jamba", {}, "transformers yes, vLLM untested (it lists the type), llama.cpp yes"),
        ("mistral", {}, "transformers yes, vLLM yes, llama.cpp yes, up to 4 tokens"),
        ("mistral", {"sliding_window": 64}, "transformers yes, vLLM yes, llama.cpp yes"),
        ("cohere2", {}, "transformers yes, vLLM yes, up to 4 tokens, llama.cpp yes"),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 0},
            "transformers yes, vLLM yes, llama.cpp yes, up to 4 tokens",
        ),
        ("qwen2", {"use_sliding_window": False}, "transformers yes, vLLM yes, llama.cpp yes"),
    ],
)
def test_a_plan_tells_what_loads_the_result(
    case: str,
    options: dict[str, Any],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = make_plan(open_checkpoint(make_checkpoint(case, tmp_path / "source", **options)), 3)
    show_plan(plan, estimate_needs(plan, CalibrationOptions()), {})
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("loads in:")
    ]
    assert line.removeprefix("loads in:").strip() == told
    says_yes = {engine for engine in LOADERS if f"{engine} yes" in told}
    assert says_yes == set(plan.summary()["loads_in"])
    assert {engine for engine in LOADERS if f"{engine} untested" in told} == set(
        plan.summary()["listed_in"]
    )


@pytest.mark.parametrize(
    ("projection", "shape", "words"),
    [
        ("o_proj", (96, 196), "does not divide into 12 heads"),
        ("q_proj", (100, 96), "heads of 8 rows, .* states head_dim = 16"),
        ("q_proj", (193, 96), "contradicts 12 query heads of 16 rows"),
        ("k_proj", (5, 96), "contradicts 12 key heads of 16 rows"),
        ("v_proj", (0, 96), "is damaged"),
        *((f"{part}_proj", None, f"{part}_proj.* is missing") for part in "qkvo"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    projection: str, shape: tuple[int, ...] | None, words: str, tmp_path: Path
) -> None:
    source = open_checkpoint(make_checkpoint("llama", tmp_path / "source"))
    entries, name = dict(source.entries), f"model.layers.1.self_attn.{projection}.weight"
    entry = entries.pop(name)
    if shape is not None:
        entries[name] = replace(entry, shape=shape)
    changed: Any = SimpleNamespace(
        source_id=source.source_id,
        config=source.config,
        entries=entries,
        result_dtypes=source.result_dtypes,
    )
    with pytest.raises(ConfigError, match=f"model.layers.1.self_attn.*{words}") as caught:
        AttentionFinder(changed, FAMILIES["llama"])
    assert "\n" not in str(caught.value)


def test_document_is_up_to_date() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_families.py"))
    assert script["main"](["--check"]) == 0
