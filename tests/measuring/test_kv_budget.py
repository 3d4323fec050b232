"""A budget of K/V cache goes to the layers that need it: the optimisation, the measured costs, and
the whole command.
"""

import json
import math
import random
import tempfile
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.cli.options import cache_budget
from gqa_convert.conversion.calibration import blocks
from gqa_convert.conversion.calibration.batches import prepare_calibration
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.measuring.sensitivity import merged_copies
from gqa_convert.measuring.sensitivity.choosing import (
    choose_num_kv_heads,
    made_up_batches,
    measure_costs,
)
from gqa_convert.measuring.sensitivity.kv_budget import (
    BudgetChoice,
    KVBudget,
    LayerCosts,
    largest_uniform,
    least_sum,
)
from gqa_convert.measuring.sensitivity.merged_copies import load_inputs, score_copies
from gqa_convert.verify import verify_checkpoint
from tests.helpers.command_line import run
from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.own_files import make_source
from tests.helpers.tiny import make_checkpoint
from tests.helpers.verification import failed

pytestmark = pytest.mark.usefixtures("modeling_files_registered")

FREE = (1, 3)
"""The layers whose 12 K/V heads are multiples of 3 heads: `factor` merges them without loss, and a
mean does not.
"""
FACTORS = torch.tensor([1.0, -0.5, 2.0, 1.5])[:, None, None]
CHOSEN = [12, 3, 12, 3]
SHARE = KVBudget("62.5%", share=Fraction(5, 8))
"""What `CHOSEN` takes."""
HEAD_BYTES = 2 * 8 * 4  # keys and values, head_dim, float32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers, two of which merge without loss, with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("budget") / "source"
    make_checkpoint(
        "llama", folder, head_dim=8, intermediate_size=256, num_hidden_layers=4, vocab_size=2048
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    for number in FREE:
        attention = model.model.layers[number].self_attn
        for projection in (attention.k_proj, attention.v_proj):
            rows = projection.weight.data.reshape(3, 4, 8, -1)
            rows[:] = rows[:, :1] * FACTORS
    model.save_pretrained(folder, max_shard_size="1MB")
    demo_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    path = source.parent / "text.txt"
    path.write_text(Path(json.__file__).read_text())
    return path


@pytest.fixture(scope="module")
def converted(source: Path, text: Path) -> tuple[Path, dict[str, Any], str]:
    """The result of the command, its JSON object, and what it printed on stderr."""
    out = source.parent / "out"
    sizes = ("--calibration-tokens", "640", "--calibration-length", "64", "--device", "cpu")
    done = run(
        "convert",
        source,
        out,
        "--kv-budget",
        SHARE.stated,
        "-c",
        text,
        "-m",
        "factor",
        *sizes,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout), done.stderr


def _random_layers(generator: random.Random) -> list[LayerCosts]:
    """Layers that may differ in their heads, in their head_dim and in how costs depend on the
    number of heads.
    """
    layers = []
    for _ in range(generator.randint(1, 4)):
        kv_heads = generator.choice((1, 2, 4, 8))
        smaller = [heads for heads in (1, 2, 4) if heads < kv_heads]
        kl = {heads: generator.choice((0.0, generator.random(), None)) for heads in smaller}
        layers.append(LayerCosts("layer", kv_heads, generator.choice((2, 4, 6)), kl))
    return layers


def test_the_optimisation_finds_what_trying_everything_finds() -> None:
    generator = random.Random(0)
    for _ in range(300):
        layers = _random_layers(generator)
        least = sum(layer.head_bytes for layer in layers)
        limit = generator.randint(least, 4 * least)
        costs = [{**layer.kl, layer.kv_heads: 0.0} for layer in layers]
        possible: dict[tuple[int, ...], float] = {}
        for numbers in product(*costs):
            chosen = list(zip(numbers, costs, layers, strict=True))
            if sum(heads * layer.head_bytes for heads, _, layer in chosen) <= limit:
                each = [cost[heads] for heads, cost, _ in chosen]
                possible[numbers] = math.inf if None in each else sum(kl or 0.0 for kl in each)
        assert possible[least_sum(layers, limit)] == pytest.approx(min(possible.values()))
        assert largest_uniform(layers, limit) == max(
            each for each in possible if len(set(each)) == 1
        )


def test_the_budget_is_taken_from_the_layers_that_merge_for_free(
    source: Path, converted: tuple[Path, dict[str, Any], str]
) -> None:
    out, printed, notes = converted
    assert (
        printed["kv_heads"]
        == json.loads((out / "gqa_conversion.json").read_text())["kv_heads"]
        == CHOSEN
    )
    budget = printed["budget"]
    assert printed["kv_bytes_per_token"] == {"before": 48 * HEAD_BYTES, "after": 30 * HEAD_BYTES}
    assert budget["limit_kv_bytes_per_token"] == budget["kv_bytes_per_token"] == 30 * HEAD_BYTES
    assert (budget["source_kv_bytes_per_token"], budget["held_out_tokens"]) == (
        48 * HEAD_BYTES,
        128,
    )
    assert (budget["merged_by"], budget["margin"]) == ("closed form", 1.0)
    uniform, chosen = budget["candidates"]
    assert (uniform["rule"], uniform["kv_heads"]) == ("uniform", [6] * 4)
    assert (chosen["rule"], chosen["kv_heads"]) == (budget["chosen"], CHOSEN)
    assert chosen["kl"] < 1e-5
    assert uniform["kl"] > 1e-3
    for number, layer in enumerate(budget["layers"]):
        assert layer["module"] == f"model.layers.{number}.self_attn"
        assert list(map(int, layer["kl"])) == [1, 2, 3, 4, 6]
        assert (layer["kl"]["3"] < 1e-5) == (number in FREE)
        assert layer["kl"]["1"] > 1e-3
    assert "chosen is --kv-heads 12,3,12,3, 1,920 bytes (62.5%)" in notes
    assert "least sum of divergences 0.0000" in notes
    assert failed(verify_checkpoint(out, source)) == {}
    assert {path.name for path in out.parent.iterdir()} == {"source", "out", "text.txt"}, (
        "nothing else is left"
    )


def test_a_layer_costs_what_it_loses_on_text_and_on_made_up_records(
    source: Path, text: Path, converted: tuple[Path, dict[str, Any], str]
) -> None:
    plan = make_plan(open_checkpoint(source), 1, method="factor")
    stated = CalibrationOptions(str(text), 640, 64, device="cpu")
    inputs = load_inputs(plan, prepare_calibration(plan, stated).batches, stated)
    records = made_up_batches(plan, inputs.held_out, stated.seed)
    assert [batch["input_ids"].shape for batch in records] == [
        batch["input_ids"].shape for batch in inputs.held_out
    ]
    on_text, on_records = (
        measure_costs(inputs, held_out[:1], lambda stage, done, total: None)
        for held_out in (inputs.held_out, records)
    )
    for layer, first, second in zip(
        converted[1]["budget"]["layers"], on_text, on_records, strict=True
    ):
        for heads, cost in layer["kl"].items():
            mean = ((first.kl[int(heads)] or 0.0) + (second.kl[int(heads)] or 0.0)) / 2
            assert cost == pytest.approx(mean, rel=1e-4, abs=1e-6)
    ratios = [
        second.kl[heads] / first.kl[heads]
        for first, second in zip(on_text, on_records, strict=True)
        for heads in (1, 3)
    ]
    assert max(ratios) > 1.02 * min(ratios), "the test tells them apart"


@pytest.mark.parametrize("short_batches", [6, 2])
def test_for_fit_layers_are_fitted_and_each_only_once(
    short_batches: int,
    source: Path,
    text: Path,
    tmp_path: Path,
    converted: tuple[Path, dict[str, Any], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the second pass over the layers, and repeated; on all of the text, and on less."""
    monkeypatch.setattr(merged_copies, "_SHORT_BATCHES", short_batches)
    monkeypatch.setattr(blocks, "BATCH_TOKENS", 128)
    monkeypatch.setattr(merged_copies, "MOST_COPIES", 8)
    monkeypatch.setattr(merged_copies, "SHORT_STEPS", 2)
    made, fits, left = merged_copies.OneLayer, list[tuple[str, int, int]](), [12]

    def counted(attention: Any, layer: Any, groups: int, options: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        fits.append((attention.name, groups, options.steps))
        fit = made(attention, layer, groups, options)
        # the last batch decides, whatever share of the text is read
        numbers = [[call.number for call in part] for part in (fit._fitted, fit._validation)]
        assert numbers == [[*range(short_batches - 1)], [short_batches - 1]]
        return fit

    def choose(out: Path | None = tmp_path / "out") -> BudgetChoice:
        options = ConversionOptions(
            calibration=CalibrationOptions(str(text), 640, 64, device="cpu")
        )
        return choose_num_kv_heads(source, SHARE, options, out=out)

    monkeypatch.setattr(merged_copies, "OneLayer", counted)
    with pytest.raises(KeyboardInterrupt):
        choose()
    assert [path.name for path in tmp_path.iterdir()] == [".out.short-fits.gqa-merging"]
    left[0] = 99
    choice = choose()
    assert len(fits) == len(set(fits)) == 20
    assert {steps for *_, steps in fits} == {2}
    assert (choice.kv_heads, choice.merged_by, choice.margin) == (CHOSEN, "short fits", 0.95)
    for number, (layer, closed) in enumerate(
        zip(choice.layers, converted[1]["budget"]["layers"], strict=True)
    ):
        assert (layer.kl[3] or 0.0) < 1e-5 or number not in FREE
        if (
            number in FREE
        ):  # four heads of which three would do: gradient steps find what the closed form does not
            assert (layer.kl[4] or 0.0) < closed["kl"]["4"] / 5
    assert list(tmp_path.iterdir()) == []
    # without a result, nothing stays among the temporary files
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left[0] = 1
    with pytest.raises(KeyboardInterrupt):
        choose(None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model_type", ["t5", "opt"])
def test_a_type_that_takes_one_number_is_not_told_of_options_that_were_not_given(
    tmp_path: Path, model_type: str
) -> None:
    folder = make_source(model_type, tmp_path / "source")
    words = (
        rf"^--kv-budget chooses .* since all layers of a {model_type} have one number: "
        r"state one with --kv-heads$"
    )
    with pytest.raises(GroupsError, match=words):
        choose_num_kv_heads(folder, SHARE, ConversionOptions())


def test_a_score_is_that_of_the_whole_models(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With values of zero in place of merged heads, as in a model whose weights were edited, or
    with NaN.
    """

    merge = merged_copies.merge_by_closed_form

    def edited_values(layer: Any, attention: Any, candidates: Any) -> Any:
        for groups, tensors in zip(candidates, merge(layer, attention, candidates), strict=True):
            value = math.nan if groups == 1 else 0.0
            name = f"{attention.name}.v_proj.weight"
            yield tensors | {name: np.full_like(tensors[name], value)}

    monkeypatch.setattr(merged_copies, "merge_by_closed_form", edited_values)
    plan = make_plan(open_checkpoint(source), 1, method="factor")
    blocks = torch.randint(3, 2048, (3, 32), generator=torch.Generator().manual_seed(0))
    ragged = [{"input_ids": blocks}, {"input_ids": blocks[:1, :20]}]
    modules = [layer.module for layer in plan.layers]
    copies: list[dict[str, int]] = [{modules[1]: 3}, {modules[0]: 6, modules[3]: 3}, {}]
    text = [{"input_ids": blocks.flip(1)}]
    inputs = load_inputs(plan, [*text, *text], CalibrationOptions(device="cpu"))
    *scores, broken = score_copies(
        inputs, [*copies, {modules[2]: 1}], ragged, lambda done, total: None
    )
    assert (broken.loss.value, broken.kl.value) == (None, None)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    for copy, score in zip([{}, *copies], scores, strict=True):
        edited = AutoModelForCausalLM.from_pretrained(source).eval()
        for module in copy:
            edited.get_submodule(module).v_proj.weight.data.zero_()
        divergences: list[float] = []
        losses: list[float] = []
        for batch in ragged:
            with torch.inference_mode():
                ours, theirs = (
                    each(**batch).logits.double().log_softmax(-1) for each in (edited, model)
                )
            divergences += (theirs.exp() * (theirs - ours)).sum((1, 2)).tolist()
            losses += (
                (-ours[:, :-1].gather(2, batch["input_ids"][:, 1:, None])).sum((1, 2)).tolist()
            )
        assert score.kl.value == pytest.approx(sum(divergences) / (96 + 20), rel=1e-3, abs=1e-6)
        assert score.loss.value == pytest.approx(sum(losses) / (93 + 19), rel=1e-5)
        # of a ratio of sums over four blocks
        gaps = [
            loss - score.loss.value * size
            for loss, size in zip(losses, (31, 31, 31, 19), strict=True)
        ]
        assert score.loss.error == pytest.approx(
            (4 / 3 * sum(gap**2 for gap in gaps)) ** 0.5 / 112, rel=1e-3
        )
    assert (scores[1].kl.value or 0.0) > 1e-3


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (
            "100%",
            "is 1,000 bytes per token: state less than the 1,000 of the source, and at least 83",
        ),
        ("8.2%", "is 82 bytes"),
        ("half", "'half' is not a share: write it like 50%"),
        ("-5%", "is -50 bytes"),
        ("1KiB", "not a share"),
    ],
)
def test_a_bad_budget(stated: str, words: str) -> None:
    with pytest.raises((OptionError, typer.BadParameter), match=words):
        cache_budget(stated).limit(1000, 83)
