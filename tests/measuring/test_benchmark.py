"""Benchmarking: live K/V bytes, shapes as converted, turns that favour none, sweeps, and what a user may get wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert import convert_checkpoint
from gqa_convert.attention import register
from gqa_convert.errors import (
    ConfigError,
    GQAConvertError,
    GroupsError,
    OptionError,
    SourceNotFoundError,
    UnsupportedFamilyError,
)
from gqa_convert.families.loading import load_model
from gqa_convert.measuring.benchmark import BenchmarkOptions, benchmark_model
from gqa_convert.measuring.benchmark.cells import Cell, measure_cell
from gqa_convert.measuring.benchmark.decoding import Decoder
from gqa_convert.measuring.benchmark.memory import fitting
from gqa_convert.measuring.benchmark.plot import lines
from gqa_convert.measuring.benchmark.subject import open_subject
from gqa_convert.measuring.benchmark.timing import alternate, order, quartiles
from gqa_convert.measuring.benchmark.versions import Version, make_versions, plan_versions
from gqa_convert.measuring.results.schemas import BenchmarkFile
from tests.helpers.checkpoints import CONFIG, HEADS, WIDTH, write_llama
from tests.helpers.own_files import SIZES
from tests.helpers.tiny import make_checkpoint, make_config

QUICK = {"repetitions": 1, "warm_up": 0, "steps": 1}


def options(**changes: Any) -> BenchmarkOptions:
    return BenchmarkOptions(**({"groups": (3, 4, 12), "context": (7,), "device": "cpu"} | QUICK | changes))


def write_config(folder: Path, model_type: str, **changes: Any) -> Path:
    """A config alone: 12 query heads, a head width that is not width / heads where the family has a key for it."""
    made = CONFIG_MAPPING[model_type](**SIZES[model_type]) if model_type in SIZES else make_config(model_type)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made.to_dict() | changes, default=str))
    return folder


def by_groups(result: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {record["groups"]: record for record in result["results"]}


def versions_of(folder: Path, groups: tuple[int, ...], attention: str = "gqa") -> list[Version]:
    register()
    subject = open_subject(None, folder)
    made, _ = make_versions(
        subject, plan_versions(subject, "float32", groups), attention, torch.float32, torch.device("cpu")
    )
    return made


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("benchmark") / "llama")


def test_cache_bytes_are_those_of_the_live_cache(llama: Path) -> None:
    found = by_groups(benchmark_model(llama, options=options(batch=(2,))).as_json())
    for groups in (3, 4, 12):
        assert found[groups]["kv_bytes_per_token"] == 2 * 2 * groups * WIDTH * 4  # layers, K and V, float32
        assert found[groups]["kv_bytes"] == found[groups]["kv_bytes_per_token"] * 7 * 2


def test_cache_bytes_in_bfloat16_without_prefill(llama: Path) -> None:
    found = by_groups(benchmark_model(llama, options=options(dtype="bfloat16", prefill=False)).as_json())
    assert [found[groups]["kv_bytes_per_token"] for groups in (3, 4, 12)] == [
        2 * 2 * groups * WIDTH * 2 for groups in (3, 4, 12)
    ]
    assert found[3]["prefill_ms"] is None
    assert found[3]["sample_ms"] is None


@pytest.mark.parametrize("prefill", [True, False])
def test_an_encoder_decoder_has_two_caches(tmp_path: Path, prefill: bool) -> None:
    config = write_config(tmp_path, "t5")
    result = benchmark_model(config=config, options=options(encoder_tokens=11, batch=(2,), prefill=prefill)).as_json()
    for groups, record in by_groups(result).items():
        per_token = 2 * 2 * groups * 16 * 4  # two decoder layers; three in the encoder, which keeps none
        assert record["kv_bytes_per_token"] == record["cross_kv_bytes_per_encoder_token"] == per_token
        assert record["kv_bytes"] == 2 * (7 + 11) * per_token
        assert record["encoder_tokens"] == 11


@pytest.mark.parametrize("model_type", ["gpt_neox", "opt", "gptj", "gemma2", "mpt", "whisper", "switch_transformers"])
def test_other_kinds_of_models(tmp_path: Path, model_type: str) -> None:
    """Translated ones, own files, attention code of their own, windows and capped scores, sound, experts."""
    result = benchmark_model(config=write_config(tmp_path, model_type), options=options(groups=(3, 12))).as_json()
    found = by_groups(result)
    assert found[12]["kv_bytes"] == 4 * found[3]["kv_bytes"] > 0
    expected = {"gpt_neox": "gqa", "opt": "gqa", "gptj": "eager", "gemma2": "eager", "mpt": "eager", "whisper": "gqa"}
    assert result["attention"] == expected.get(model_type, "gqa")


@pytest.mark.parametrize("model_type", ["llama", "t5", "gpt_neox"])
def test_versions_have_the_shapes_of_a_conversion(tmp_path: Path, model_type: str) -> None:
    source = write_config(tmp_path / "source", model_type)
    config = CONFIG_MAPPING[model_type].from_pretrained(source)
    auto = transformers.AutoModelForSeq2SeqLM if model_type == "t5" else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(source)
    convert_checkpoint(str(source), str(tmp_path / "out"), 3, method="mean")
    converted, missing = load_model(tmp_path / "out", torch.float32)
    assert not missing
    timed = versions_of(source, (3, 12))[0].model
    assert type(timed) is type(converted)
    assert {name: part.shape for name, part in timed.named_parameters()} == {
        name: part.shape for name, part in converted.named_parameters()
    }
    decoders = [Decoder(model, 2, 5, 9 if model_type == "t5" else None) for model in (timed, converted)]
    for decoder in decoders:
        decoder.prefill()
        decoder.fill()
        decoder.step()
    assert decoders[0].cache_shapes() == decoders[1].cache_shapes()
    assert decoders[0].cache_bytes() == decoders[1].cache_bytes()


def test_the_own_version_has_the_own_weights_and_shares_them(llama: Path) -> None:
    register()
    subject = open_subject(llama, None)
    plans = plan_versions(subject, "float32", (3, 12))
    (grouped, own), loaded = make_versions(subject, plans, "gqa", torch.float32, torch.device("cpu"))
    expected, _ = load_model(llama, torch.float32)
    ids = torch.arange(6)[None]
    assert loaded
    with torch.no_grad():
        torch.testing.assert_close(own.model(ids).logits, expected(ids).logits)
    shared = {id(part) for part in own.model.parameters()} & {id(part) for part in grouped.model.parameters()}
    assert len(list(own.model.parameters())) - len(shared) == 2 * 2  # keys and values of two layers
    assert benchmark_model(llama, options=options()).weights == "own"
    assert benchmark_model(llama, options=options(groups=(3,))).weights == "random"


@pytest.mark.usefixtures("modeling_files_registered")
def test_a_model_whose_layers_differ_runs_beside_numbers_for_all_layers(tmp_path: Path) -> None:
    """Its cache is summed over the layers, and it keeps its weights; other versions differ in keys and values alone."""
    make_checkpoint("llama", tmp_path / "source", head_dim=8, intermediate_size=256, num_hidden_layers=3)
    convert_checkpoint(tmp_path / "source", tmp_path / "list", [12, 3, 1], method="mean")
    result = benchmark_model(tmp_path / "list", options=options(groups=(2, 12), memory=10_000_000))
    head = 2 * 8 * 4  # keys and values, head_dim, float32
    assert result.kv_heads == (12, 3, 1)
    assert result.weights == "own"
    found = {each.groups: each.kv_bytes_per_token for each in result.results}
    assert found == {2: 3 * 2 * head, 12: 3 * 12 * head, (12, 3, 1): 16 * head}
    sizes = {each.groups: each.weight_bytes or 0 for each in result.results}
    assert sizes[2] < sizes[12, 3, 1] < sizes[12]
    assert BenchmarkFile.read(json.loads(json.dumps(result.as_json())), "it") == result
    subject = open_subject(tmp_path / "list", None)
    assert [each.groups for each in plan_versions(subject, "float32", None)] == [1, 2, 3, 4, 6, 12, (12, 3, 1)]
    with pytest.raises(GroupsError, match="--groups 5 does not divide the 12 query heads"):
        plan_versions(subject, "float32", (5,))


def test_steps_are_taken_back(tmp_path: Path) -> None:
    """Every turn begins at the same context, sliding windows included."""
    for model_type, attention in (("llama", "gqa"), ("gemma2", "eager")):
        model = versions_of(write_config(tmp_path, model_type), (3,), attention)[0].model
        decoder = Decoder(model, 1, 6, None)
        decoder.prefill()
        decoder.fill()
        before = decoder.cache_shapes()
        for _ in range(3):
            decoder.step()
        assert decoder.cache_shapes() != before
        decoder.rewind()
        assert decoder.cache_shapes() == before


def test_everyone_takes_every_place() -> None:
    orders = [order(4, repetition) for repetition in range(-1, 4)]
    assert orders[1:] == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]
    assert orders[0] == [3, 0, 1, 2]


def test_a_drifting_machine_favours_none() -> None:
    """Each turn takes longer than the one before: medians stay within two turns' drift, where one contender after the
    other would be 24 turns' apart."""
    now = 1.0

    def turn() -> float:
        nonlocal now
        now += 0.05
        return now

    medians = [quartiles(each)[1] for each in alternate([turn] * 4, repetitions=8, warm_up=2)]
    assert max(medians) - min(medians) < 2.001 * 0.05
    now = 1.0
    blocks = [quartiles([turn() for _ in range(8)])[1] for _ in range(4)]
    assert max(blocks) - min(blocks) > 23.9 * 0.05


class DriftingClock:
    """Every decode step takes a hundredth longer than the one before, whoever takes it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = 1.0

    def mark(self) -> float:
        return self.now

    def wait(self) -> None:
        return

    def seconds(self, first: float, second: float) -> float:
        return second - first


def test_a_cell_alternates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = DriftingClock(), []
    step = Decoder.step

    def slower(decoder: Decoder) -> None:
        step(decoder)
        seen.append(decoder.cache_shapes()[0][1])
        clock.pace *= 1.01
        clock.now += clock.pace

    monkeypatch.setattr(Decoder, "step", slower)
    made = versions_of(write_config(tmp_path, "llama"), (3, 4, 12))
    results = measure_cell(
        made, Cell(1, 5, None), options(repetitions=3, warm_up=0), lambda done, total: None, clock=clock
    )
    assert seen == [
        3,
        3,
        4,
        4,
        12,
        12,
        4,
        4,
        12,
        12,
        3,
        3,
        12,
        12,
        3,
        3,
        4,
        4,
    ]  # a step that does not count, and one that does
    records = [record.as_json() for record in results]
    times = [record["decode_ms_per_token"] for record in records]
    assert max(times) / min(times) < 1.05
    assert all(record["decode_ms_low"] < record["decode_ms_per_token"] < record["decode_ms_high"] for record in records)


def test_sweeps_and_the_contract(llama: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    plot = tmp_path / "speed.svg"
    result = benchmark_model(
        llama,
        options=options(batch=(1, 3), context=(5, 9), new_tokens=20),
        plot=plot,
        command=["gqa-convert", "benchmark"],
        progress=lambda stage, done, total: told.append((stage, done, total)),
    ).as_json()
    assert [(each["batch"], each["context"], each["groups"]) for each in result["results"]] == [
        (batch, context, groups) for batch in (1, 3) for context in (5, 9) for groups in (3, 4, 12)
    ]
    assert told[-1] == ("timing", 4 * 6, 4 * 6)
    head = {
        name: result[name]
        for name in (
            "kind",
            "command",
            "model_type",
            "layers",
            "dtype",
            "heads",
            "weights",
            "attention",
        )
    }
    assert head == {
        "kind": "benchmark",
        "command": ["gqa-convert", "benchmark"],
        "model_type": "llama",
        "layers": 2,
        "dtype": "float32",
        "heads": HEADS,
        "weights": "own",
        "attention": "gqa",
    }
    assert result["machine"]["device"] == "cpu"
    for record in result["results"]:
        assert record["decode_tokens_per_second"] == pytest.approx(
            1e3 * record["batch"] / record["decode_ms_per_token"]
        )
        assert record["sample_ms"] == pytest.approx(record["prefill_ms"] + 20 * record["decode_ms_per_token"])
        assert record["decode_ms_low"] <= record["decode_ms_per_token"] <= record["decode_ms_high"]
    json.dumps(result, allow_nan=False)
    assert [[record.groups for record in line] for line in lines(BenchmarkFile.read(result, "result")).values()] == [
        [3, 4, 12]
    ] * 4
    drawn = plot.read_text()
    for name in lines(BenchmarkFile.read(result, "result")):
        assert name in drawn


def test_defaults_are_the_divisors(llama: Path, tmp_path: Path) -> None:
    assert [each.groups for each in benchmark_model(llama, options=options(groups=None)).results] == [
        1,
        2,
        3,
        4,
        6,
        12,
    ]
    grouped = write_config(tmp_path, "llama", num_key_value_heads=4)
    assert [each.groups for each in benchmark_model(config=grouped, options=options(groups=None)).results] == [
        1,
        2,
        4,
    ]
    whole = benchmark_model(llama, options=BenchmarkOptions(groups=(3,), device="cpu", **QUICK)).as_json()
    assert whole["results"][0]["context"] == 32  # half of the model's positions


def test_what_fits_a_budget(llama: Path) -> None:
    result = benchmark_model(llama, options=options(memory=1_000_000)).as_json()
    assert result["memory"]["bytes"] == 1_000_000
    for groups, record in by_groups(result).items():
        parameters = sum(part.numel() for part in load_model(llama, torch.float32)[0].parameters())
        weights = 4 * (parameters - 2 * 2 * (12 - groups) * WIDTH * CONFIG["hidden_size"])
        token = 2 * 2 * groups * WIDTH * 4
        assert record["weight_bytes"] == weights
        assert record["largest_batch"] == (1_000_000 - weights) // (7 * token)
        assert record["largest_context"] == min(64, (1_000_000 - weights) // token)
    found = fitting(1000, 400, 3.0, 2.0, batch=2, context=10, encoder_tokens=30, positions=None)
    assert (found.largest_batch, found.largest_context) == (600 // 90, (300 - 60) // 3)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"groups": (5,)}, GroupsError, "--groups 5"),
        ({"groups": (24,)}, GroupsError, "--groups 24"),
        ({"groups": ()}, OptionError, "--groups"),
        ({"groups": (0,)}, OptionError, "--groups 0"),
        ({"batch": (0, 1)}, OptionError, "--batch"),
        ({"context": (63,)}, OptionError, "64 positions"),
        ({"attention": "flash"}, OptionError, "--attention 'flash'"),
        ({"dtype": "int8"}, OptionError, "--dtype"),
        ({"device": "tpu"}, OptionError, "--device"),
        ({"device": "cuda:99"}, OptionError, "--device"),
        ({"encoder_tokens": 5}, OptionError, "no encoder"),
        ({"memory": 1000}, OptionError, "weights alone"),
        ({"repetitions": 0}, OptionError, "--repetitions"),
        ({"steps": 0}, OptionError, "--steps"),
        ({"warm_up": -1}, OptionError, "--warm-up"),
    ],
    ids=str,
)
def test_mistakes(llama: Path, changes: dict[str, Any], error: type[GQAConvertError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        benchmark_model(llama, options=options(**changes))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ("absent", SourceNotFoundError, "no file"),
        ("{", ConfigError, "config.json"),
        ({}, UnsupportedFamilyError, "model_type"),
        ({"model_type": "nonsense"}, UnsupportedFamilyError, "nonsense"),
        ({"model_type": "bert"}, UnsupportedFamilyError, "encoder"),
        ({"model_type": "chatglm"}, UnsupportedFamilyError, "chatglm"),
        (CONFIG | {"num_attention_heads": "many"}, ConfigError, "refuses"),
        (CONFIG | {"hidden_act": "nonsense"}, ConfigError, "nonsense"),
        (CONFIG | {"torch_dtype": "float64"}, OptionError, "--dtype"),
        (CONFIG | {"quantization_config": {"quant_method": "awq"}}, GQAConvertError, "quantised"),
    ],
    ids=str,
)
def test_mistakes_in_configs(tmp_path: Path, config: Any, error: type[GQAConvertError], words: str) -> None:
    path = tmp_path / "config.json"
    if config != "absent":
        path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(error, match=words):
        benchmark_model(config=path, options=options())


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        call()


def test_mistakes_in_combinations(llama: Path, tmp_path: Path) -> None:
    refused(benchmark_model, "either MODEL or --config")
    refused(lambda: benchmark_model(llama, config=llama), "either MODEL or --config")
    refused(lambda: benchmark_model(config=llama, revision="main"), "--revision")
    refused(lambda: benchmark_model(llama, options=options(), plot=tmp_path / "speed.txt"), "--plot")
    refused(
        lambda: benchmark_model(config=write_config(tmp_path, "gptj"), options=options(attention="gqa")),
        "--attention gqa",
    )
    refused(
        lambda: benchmark_model(config=write_config(tmp_path, "gemma2"), options=options(attention="gqa")), "softcap"
    )
    refused(
        lambda: benchmark_model(config=write_config(tmp_path, "whisper"), options=options(encoder_tokens=3)),
        "always gives 20",
    )
