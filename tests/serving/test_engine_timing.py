"""benchmark --engine: real processes, whose engines are fakes."""

from pathlib import Path
from typing import Any

import pytest

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.errors import MissingExtraError, OptionError, UnsupportedFamilyError, WorkerError
from gqa_convert.measuring.latency.run import BenchmarkOptions
from gqa_convert.measuring.results import BenchmarkFile, load_result
from gqa_convert.serving.engines import Engine
from gqa_convert.serving.timing import time_engine
from tests.helpers.checkpoints import write_llama
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.fake_engine import write_interpreter
from tests.helpers.tiny import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
FAKE = {"fake": Engine("tests.helpers.fake_engine", ("numpy",), "luck")}
QUICK = ("--context", "6", "--new-tokens", "40", "--repetitions", "3")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAKE_MODE", "times")


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """A source with 12 K/V heads, and a model with 3."""
    counts = {"source": 12, "gqa3": 3}
    return [make_checkpoint("llama", tmp_path / name, num_key_value_heads=heads) for name, heads in counts.items()]


def options(**changes: Any) -> BenchmarkOptions:
    return BenchmarkOptions(**({"context": (4,), "new_tokens": 5, "repetitions": 1} | changes))


@pytest.mark.usefixtures("fake")
def test_the_times_of_the_models(models: list[Path]) -> None:
    """The fake takes a millisecond for each K/V head, sequence, token of the context and new token."""
    result = time_engine("fake", models, options(batch=(1, 2), context=(4, 8), new_tokens=2), engines=FAKE)
    assert [(cell.model, cell.groups, cell.batch, cell.context) for cell in result.results] == [
        (str(model), heads, batch, context)
        for model, heads in zip(models, (12, 3), strict=True)
        for batch in (1, 2)
        for context in (4, 8)
    ]
    for cell in result.results:
        assert isinstance(cell.groups, int)
        expected = cell.groups * cell.batch * cell.context
        assert cell.decode_ms_per_token == pytest.approx(expected)
        assert cell.prefill_ms == pytest.approx(expected)
        assert cell.sample_ms == pytest.approx(cell.prefill_ms + 2 * cell.decode_ms_per_token)
        assert cell.decode_tokens_per_second == pytest.approx(1e3 * cell.batch / cell.decode_ms_per_token)
        assert cell.kv_bytes is None
    assert [cell.fingerprint for cell in result.results[::4]] == [fingerprint(model) for model in models]
    assert result.fingerprint == fingerprint(models[0])
    assert (result.engine, result.kv_heads, result.attention) == ("fake", 12, None)


@pytest.mark.usefixtures("fake")
def test_what_an_engine_can_not_time(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="choose from fake"):
        time_engine("vllm", models, options(), engines=FAKE)
    with pytest.raises(UnsupportedFamilyError, match="modelling file"):
        time_engine("fake", [write_llama(tmp_path / "own", config={"model_type": "gqa_opt"})], options(), engines=FAKE)
    monkeypatch.setenv("FAKE_MODE", "instant")
    with pytest.raises(WorkerError, match="raise --new-tokens"):
        time_engine("fake", models, options(), engines=FAKE)
    monkeypatch.setenv("FAKE_MODE", "raises")
    with pytest.raises(WorkerError, match=r"did not run .*source \(failed\): RuntimeError: no tensor"):
        time_engine("fake", models, options(), engines=FAKE)
    with pytest.raises(MissingExtraError, match="has no no-such-package: luck"):
        time_engine("fake", models, options(), engines={"fake": Engine("fake", ("no-such-package",), "luck")})


def test_the_command_runs_the_adapters(models: list[Path], tmp_path: Path) -> None:
    """In another interpreter, whose packages have the engines' interfaces."""
    python = write_interpreter(tmp_path / "python")
    for model in models:
        (model / "tokenizer.json").write_text("{}")
    timed = ("benchmark", *models, "--engine", "vllm", "--python", f"vllm={python}", *QUICK)
    told = run(*timed, "--batch", "1,2", "--dtype", "bfloat16", "--json")
    assert told.returncode == 0, told.stderr
    (tmp_path / "result.json").write_text(told.stdout)
    result = load_result(tmp_path / "result.json")
    assert isinstance(result, BenchmarkFile)
    assert (result.engine, result.engine_version, result.dtype) == ("vllm", "9.9", "bfloat16")
    assert [(cell.groups, cell.batch) for cell in result.results] == [(12, 1), (12, 2), (3, 1), (3, 2)]
    timed = ("benchmark", models[1], "--engine", "llama.cpp", "--python", f"llama.cpp={python}", *QUICK)
    shown = run(*timed, "--dtype", "bfloat16")
    assert "llama.cpp 9.9" in shown.stdout, shown.stderr
    assert str(models[1]) in "".join(shown.stdout.split())
    assert "1.00x" in shown.stdout
    refused = run(*timed, "--dtype", "bfloat16", "--batch", "2")
    assert refused.returncode == 1
    assert "one sequence at a time" in refused.stderr


def test_mistakes_take_one_line(models: list[Path]) -> None:
    assert_mistake(run("benchmark", *models), "2 models", "--candidates")
    assert_mistake(run("benchmark", models[0], "--engine", "tgi"), "'tgi'", "llama.cpp, vllm")
    assert_mistake(run("benchmark", models[0], "--python", "vllm=x"), "--python belongs to --engine")
    refused = run("benchmark", models[0], "--engine", "vllm", "--candidates", "3")
    assert_mistake(refused, "--candidates does not go with --engine")
    assert_mistake(run("benchmark", models[0], "--engine", "vllm"), "install vllm")
