"""What `inspect` states is what direct computations give, and a planted number of heads shows."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.table import FAMILIES
from gqa_convert.measuring.sensitivity import merged_copies
from gqa_convert.measuring.sensitivity.inspection import (
    MergedLoss,
    inspect_checkpoint,
    sink_warnings,
)
from gqa_convert.merging.absorption_limits import find_absorption_limits
from gqa_convert.merging.attention_heads import LayerLayout
from gqa_convert.merging.merge_layer import Moments, merge_layer
from tests.helpers.calibrations import calibration_batches
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.data_helpers import span_tokenizer
from tests.helpers.folding_cases import build, pool

LENGTH = 64
TOKENS = 40 * LENGTH
FIRST_WORD = 3
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama whose 12 K/V heads are 3, each four times; and text that it wrote, so that no other
    model predicts that better.
    """
    folder = tmp_path_factory.mktemp("inspect") / "planted"
    pool(build("llama"), 3).save_pretrained(folder)  # type: ignore[operator]
    span_tokenizer(0).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(3)
    written = torch.full((TOKENS // LENGTH, 1), FIRST_WORD)
    with torch.inference_mode():
        for _ in range(LENGTH - 1):
            chances = model(input_ids=written).logits[:, -1, FIRST_WORD:].softmax(-1)
            written = torch.cat(
                [written, FIRST_WORD + torch.multinomial(chances, 1, generator=generator)], dim=1
            )
    text = folder.parent / "text.txt"
    text.write_text(" ".join(f"w{token - FIRST_WORD}" for token in written.flatten().tolist()))
    return folder, text


@pytest.fixture(scope="module")
def inspected(planted: tuple[Path, Path]) -> dict[str, Any]:
    folder, text = planted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            merged_copies, "MASSIVE", 0.0
        )  # the states at its first positions are as long as all others
        found = inspect_checkpoint(folder, calibration=str(text), calibration_tokens=TOKENS)
    return found.as_json()


def blocks_of(planted: tuple[Path, Path]) -> tuple[Tensor, Tensor]:
    """The blocks for the moments, and the last fifth."""
    batches = calibration_batches(planted[0], str(planted[1]), TOKENS, seed=0).batches
    blocks = torch.cat([batch["input_ids"] for batch in batches])
    assert blocks.shape == (TOKENS // LENGTH, LENGTH)
    return blocks[: -len(blocks) // 5], blocks[-len(blocks) // 5 :]


def moments_of(model: Any, blocks: Tensor) -> list[Array]:
    """E[x x^T] of each attention layer's input and a 1 behind it, damped by 1% of the mean of its
    diagonal. 6% of the tokens are read behind the one that begins all blocks too.
    """
    tokens = blocks.flatten()
    spread = tokens[torch.linspace(0, len(tokens) - 1, int(0.06 * len(tokens))).long()]
    begun = torch.stack([torch.full_like(spread, FIRST_WORD), spread], dim=1)
    found = []
    with torch.inference_mode():
        streams = [
            model(input_ids=ids, output_hidden_states=True).hidden_states for ids in (blocks, begun)
        ]
        states = [
            torch.cat([each.flatten(0, 1) for each in layer])
            for layer in zip(*streams, strict=True)
        ]
        seen = [
            layer.input_layernorm(rows)
            for layer, rows in zip(model.model.layers, states[:-1], strict=True)
        ]
    for states in seen:
        rows = states.double().numpy()
        moment = rows.T @ rows / len(rows)
        moment += 0.01 * np.diag(moment).mean() * np.eye(len(moment))
        whole = np.ones((len(moment) + 1, len(moment) + 1))
        whole[:-1, :-1], whole[-1, :-1], whole[:-1, -1] = moment, rows.mean(0), rows.mean(0)
        found.append(whole)
    return found


def loss_of(model: Any, blocks: Tensor) -> float:
    with torch.inference_mode():
        return float(model(input_ids=blocks, labels=blocks).loss)


def sink_length(model: Any, blocks: Tensor) -> float:
    """Of the states at the first positions behind the last layer, where that of `planted` is
    longest.
    """
    seen: list[Tensor] = []
    with (
        model.model.layers[-1].register_forward_hook(lambda _, __, output: seen.append(output)),
        torch.inference_mode(),
    ):
        model(input_ids=blocks)
    return float(seen[0][:, 0].norm(dim=-1).mean())


def test_the_planted_number_adds_no_loss(inspected: dict[str, Any]) -> None:
    assert inspected["candidates"] == [1, 2, 3, 4, 6]
    assert inspected["layers"] == 2
    increases = {each["kv_heads"]: each["increase"] for each in inspected["loss"]["by_kv_heads"]}
    assert abs(increases[3]) < 1e-4
    assert abs(increases[6]) < 1e-4
    assert min(increases[1], increases[2]) > 0.02


def test_losses_are_those_of_a_model_with_merged_weights(
    planted: tuple[Path, Path], inspected: dict[str, Any]
) -> None:
    """The merged tensors are joined and loaded; nothing is replaced while a model runs."""
    model = AutoModelForCausalLM.from_pretrained(planted[0], dtype=torch.float32).eval()
    text, held_out = blocks_of(planted)
    assert inspected["calibration"]["held_out_blocks"] == len(held_out) == 8
    assert inspected["loss"]["tokens"] == 8 * (LENGTH - 1)
    assert inspected["loss"]["source"] == pytest.approx(loss_of(model, held_out), rel=1e-5)
    moments = moments_of(model, text)
    finder = AttentionFinder(open_checkpoint(planted[0]), FAMILIES["llama"])
    for groups in (1, 4):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for layer, moment in zip(finder.layers, moments, strict=True):
            parts = LayerLayout(finder, layer)
            tensors = {name: state[name].numpy() for name in parts.names}
            limits, heads = find_absorption_limits(finder, layer), parts.split_heads(tensors)
            merged = merge_layer(heads, groups, limits, Moments(moment, moment))
            joined = parts.merge_heads(merged, tensors, layer.kv_heads)
            state |= {name: torch.from_numpy(array) for name, array in joined.items()}
        other = AutoModelForCausalLM.from_config(model.config).eval()
        other.load_state_dict(state)
        stated = next(
            each for each in inspected["loss"]["by_kv_heads"] if each["kv_heads"] == groups
        )
        assert stated["loss"] == pytest.approx(loss_of(other, held_out), rel=1e-4)
        assert stated["increase"] == pytest.approx(stated["loss"] - inspected["loss"]["source"])
        assert stated["sink"] == pytest.approx(
            sink_length(other, held_out) / sink_length(model, held_out), rel=1e-4
        )
        gaps = [loss_of(other, block[None]) - loss_of(model, block[None]) for block in held_out]
        assert stated["increase_standard_error"] == pytest.approx(
            np.std(gaps, ddof=1) / len(gaps) ** 0.5, rel=1e-2
        )


def test_t5_is_inspected_in_self_and_cross_attention(tmp_path: Path) -> None:
    model = pool(build("t5", vocab_size=620), 4)
    model.save_pretrained(tmp_path / "t5")
    span_tokenizer().save_pretrained(tmp_path / "t5")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number * number % 499}" for number in range(3000)))
    result = inspect_checkpoint(
        tmp_path / "t5", calibration=str(text), calibration_tokens=2600, candidates=[1, 4]
    ).as_json()
    assert result["layers"] == 4
    batches = calibration_batches(tmp_path / "t5", str(text), 2600, seed=0).batches
    assert len(batches[-1]["input_ids"]) == 1
    with torch.inference_mode():
        expected = float(model(**batches[-1]).loss)
    assert result["calibration"]["held_out_blocks"] == 1
    assert result["loss"]["source"] == pytest.approx(expected, rel=1e-5)
    assert result["loss"]["by_kv_heads"][1]["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["loss"]["by_kv_heads"][0]["loss"] != pytest.approx(expected, rel=1e-5)
    assert result["loss"]["by_kv_heads"][0]["increase_standard_error"] is None, "there is one block"


def test_a_sink_that_shrinks_is_warned_of() -> None:
    losses = [
        MergedLoss(1, 3.0, 0.5, sink=0.5),
        MergedLoss(2, 2.7, 0.2, sink=0.95),
        MergedLoss(4, 2.6, 0.1),
    ]
    (warning,) = sink_warnings(losses)
    assert warning.startswith(
        "with N = 1 the closed form leaves 50% of the attention sink's length"
    )


def test_the_command_for_people_and_for_scripts(planted: tuple[Path, Path]) -> None:
    options = (
        "inspect",
        planted[0],
        "-c",
        planted[1],
        "--calibration-tokens",
        TOKENS,
        "--candidates",
        "2,3",
    )
    shown = run(*options, "--device", "cpu")
    for words in (
        "12 K/V heads in 2 attention layers",
        f"measured on {TOKENS} tokens of {planted[1]}:",
        "on 504 held-out tokens of it",
        "+0.0000 ±0.0000",
        "upper bound",
    ):
        assert words in shown.stdout
    one_block = run(
        "inspect",
        planted[0],
        "-c",
        planted[1],
        "--calibration-tokens",
        2 * LENGTH,
        "--candidates",
        "2",
    )
    assert re.search(rf"source's \d\.\d+, on {LENGTH - 1} held-out tokens of it", one_block.stdout)
    assert re.search(r"^ *2 +\+\d\.\d+ *$", one_block.stdout, re.MULTILINE)
    scripts = run(*options, "--json")
    assert (scripts.stderr, scripts.stdout.count("\n")) == ("", 1)
    printed = json.loads(scripts.stdout)
    assert printed["loss"].keys() == {"source", "source_standard_error", "tokens", "by_kv_heads"}
    keys = {"kv_heads", "loss", "increase", "increase_standard_error", "sink"}
    assert printed["loss"]["by_kv_heads"][0].keys() == keys
    assert printed["loss"]["by_kv_heads"][0]["sink"] is None, "no state is massive"
    assert_mistake(
        run("inspect", planted[0], "--candidates", "1,x"),
        "'--candidates': 'x' is not a whole number above 0",
    )
    assert_mistake(run(*options[:-1], "5"), "choose among [1, 2, 3, 4, 6]")
    assert_mistake(
        run("inspect", planted[0]), "measures losses on text: name a file", "--calibration"
    )
