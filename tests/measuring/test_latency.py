"""Benchmarking: live K/V bytes, shapes as converted, turns that favour none, sweeps, and what a
user may get wrong.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from gqa_convert import convert_checkpoint
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.errors import GQAConvertError, GroupsError, OptionError
from gqa_convert.families.loading import load_model
from gqa_convert.measuring.latency import Decoder, benchmark_model, make_models, plan_versions
from gqa_convert.measuring.results import BenchmarkFile
from tests.helpers.checkpoints import HEADS, WIDTH, write_llama
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.own_files import make_source

QUICK = ("--context", "6", "--repetitions", "1", "--device", "cpu")


def options(**changes: Any) -> dict[str, Any]:
    return {"candidates": (3, 4, 12), "context": (7,), "device": "cpu", "repetitions": 1} | changes


def versions_of(folder: Path, candidates: tuple[int, ...]) -> list[Any]:
    model = open_checkpoint(folder)
    return [*make_models(model, plan_versions(model, candidates), "float32", "cpu")[0].values()]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("benchmark") / "llama")


def test_the_result_of_a_sweep(llama: Path) -> None:
    told: list[tuple[str, int, int]] = []
    result = benchmark_model(
        llama,
        **options(batch=(1, 3), context=(5, 9)),
        command=["gqa-convert", "benchmark"],
        progress=lambda stage, done, total: told.append((stage, done, total)),
    )
    assert [(cell.batch, cell.context, cell.kv_heads) for cell in result.results] == [
        (batch, context, heads) for batch in (1, 3) for context in (5, 9) for heads in (3, 4, 12)
    ]
    assert told[-5:] == [("timing", done, 4) for done in range(5)]
    assert (result.kind, result.command, result.model_type) == (
        "benchmark",
        ["gqa-convert", "benchmark"],
        "llama",
    )
    assert (result.dtype, result.heads, result.source_kv_heads) == ("float32", HEADS, HEADS)
    assert (result.attention, result.machine.device) == ("gqa", "cpu")
    for cell in result.results:
        per_token = 2 * 2 * cell.kv_heads * WIDTH * 4  # layers, K and V, float32
        assert cell.kv_bytes == per_token * cell.context * cell.batch
        assert cell.decode_ms_low <= cell.decode_ms_per_token <= cell.decode_ms_high
    assert BenchmarkFile(**json.loads(json.dumps(result.as_json(), allow_nan=False))) == result


@pytest.mark.parametrize("model_type", ["llama", "t5", "opt"])
def test_versions_have_the_shapes_of_a_conversion(tmp_path: Path, model_type: str) -> None:
    source = make_source(model_type, tmp_path / "source")
    convert_checkpoint(str(source), str(tmp_path / "out"), 3, ConversionOptions(method="mean"))
    converted, missing = load_model(tmp_path / "out", torch.float32)
    assert not missing
    timed_model, _ = versions_of(source, (3, 12))
    assert type(timed_model) is type(converted)
    assert {name: part.shape for name, part in timed_model.named_parameters()} == {
        name: part.shape for name, part in converted.named_parameters()
    }
    sizes = []
    for model in (timed_model, converted):
        decoder = Decoder(model, 2, 5)
        sizes.append(decoder.cache_bytes())
        assert decoder.turn() > 0
        assert decoder.cache_bytes() == sizes[-1], "the cache is as before the turn"
    assert sizes[0] == sizes[1] > 0


def test_the_own_version_has_the_own_weights_and_shares_them(llama: Path) -> None:
    grouped, own = versions_of(llama, (3, 12))
    expected, _ = load_model(llama, torch.float32)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        torch.testing.assert_close(own(ids).logits, expected(ids).logits)
        assert grouped(ids).logits.isfinite().all()
    places, shared = ({part.data_ptr() for part in model.parameters()} for model in (own, grouped))
    assert len(places - shared) == 2 * 2  # keys and values of two layers


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"candidates": (5,)}, GroupsError, "--candidates 5"),
        ({"context": (63,)}, OptionError, "64 positions.*at most 55"),
        ({"dtype": "int8"}, OptionError, "--dtype"),
        ({"device": "tpu"}, OptionError, "--device"),
    ],
    ids=str,
)
def test_mistakes(
    llama: Path, changes: dict[str, Any], error: type[GQAConvertError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        benchmark_model(llama, **options(**changes))
    assert caught.value.exit_code == 2


def test_speeds_are_of_the_source_and_of_nothing_else(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    shown = run("benchmark", source, "--candidates", "3,12", *QUICK).stdout
    assert "1.00x" in shown
    spreads = re.findall(r"[\d.e+]+ \([\d.e+]+ to [\d.e+]+\)", shown)
    assert len(spreads) == 2, "for each number"
    without = run("benchmark", source, "--candidates", "3,6", *QUICK).stdout
    assert "x " not in without.split("note:")[0]


def test_mistakes_take_one_line(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    assert_mistake(run("benchmark"), "MODEL")
    for wrong, found in (("two", "two"), ("0,1", "0"), ("1,-2", "-2"), ("1,,2", "")):
        assert_mistake(
            run("benchmark", source, "--batch", wrong), f"'{found}' is not a whole number above 0"
        )
    assert_mistake(run("benchmark", source, "--context", "half"), "--context", "'half'")
    assert_mistake(run("benchmark", tmp_path / "absent"), "absent")
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][1:]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    broken = run("benchmark", source, "--candidates", "3,12", *QUICK)
    assert broken.returncode == 2
    assert (
        "no fitting tensor for model.norm.weight, which is [59] where the model needs [60]"
        in broken.stderr
    )
