"""What the free memory decides is decided once, obeyed by whoever resumes, said, and recorded."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gqa_convert.conversion import fitting, resources
from gqa_convert.conversion.calibration import own_text
from gqa_convert.conversion.layers import last_stage, layer_walk, model_loading
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.progress import FitProgress
from gqa_convert.conversion.run import ConversionResult, convert_checkpoint
from gqa_convert.errors import (
    DataError,
    DeviceMemoryError,
    GQAConvertError,
    NonFiniteError,
    OptionError,
    OutputError,
)
from gqa_convert.runtime.machine import STATED
from tests.helpers import folding_cases as folded
from tests.helpers.chat_template import with_chat_template
from tests.helpers.checkpoints import digests
from tests.helpers.fitting import batches_for, calibrate_on
from tests.helpers.uptrain_runs import DEMO

GIB = 1 << 30
SHORT = {"tokens": 1280, "sequence_length": 128, "steps": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(own_text, "LENGTH", 40)
    monkeypatch.setattr(last_stage, "WORTHWHILE", 1e-9)


def free(nbytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available_memory", lambda _: int(nbytes))


def fit(out: Path, source: Path = DEMO, *, look: Any = None, **stated: Any) -> ConversionResult:
    options = CalibrationOptions(str(Path(json.__file__).parent), **SHORT | stated)
    return convert_checkpoint(
        source,
        out,
        3,
        ConversionOptions(method="fit", calibration=options),
        on_layer=look or (lambda _: None),
    )


def stop_after_a_layer(progress: FitProgress) -> None:
    if progress.layer is not None:
        raise KeyboardInterrupt


def test_a_run_that_resumes_with_less_memory_obeys_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(64 * GIB, monkeypatch)
    whole = fit(tmp_path / "whole")
    assert whole.calibration is not None
    assert whole.calibration.kl_steps == 2
    assert whole.calibration.left_out == ()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "out", look=stop_after_a_layer)
    weights = 4 * whole.plan.parameters_before
    free(1.9 * weights, monkeypatch)  # neither own text nor the last stage, if it were decided now
    assert resources.decide(whole.plan, CalibrationOptions("t", **SHORT)).no_last_stage
    resumed = fit(tmp_path / "out")
    assert resumed.calibration == whole.calibration
    assert (
        digests(tmp_path / "out")["model.safetensors"]
        == digests(tmp_path / "whole")["model.safetensors"]
    )
    free(64 * GIB, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "less", look=stop_after_a_layer)
    free(weights / 2, monkeypatch)
    monkeypatch.setattr(model_loading, "free_memory", lambda _: weights / 2)
    with pytest.raises(
        OptionError, match=r"--kl-steps 0, and run the same command again, which resumes"
    ):
        fit(tmp_path / "less")
    assert len([*(tmp_path / ".less.gqa-merging").glob("layer-*")]) == 1


def test_a_run_that_resumes_with_more_memory_obeys_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(1000, monkeypatch)
    monkeypatch.setattr(model_loading, "free_memory", lambda _: 64 * GIB)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "out", look=stop_after_a_layer)
    free(64 * GIB, monkeypatch)
    seen: list[str] = []
    result = fit(tmp_path / "out", look=lambda progress: seen.append(progress.note or ""))
    record = json.loads((tmp_path / "out" / "gqa_conversion.json").read_text())["calibration"]
    assert record["kl_steps"] == 0
    own, stage = record["left_out"]
    assert own.startswith("text of the source's own among the calibration text, because it needs ")
    assert stage.startswith("the last stage, which trains all layers together, because it needs ")
    assert f"left out: {own}; and {stage}" in seen
    assert result.calibration is not None
    assert "text of its own" not in result.calibration.text


def test_a_run_that_resumes_on_another_processor_multiplies_as_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_WIDE", 1)

    def on_processor(fast: bool, out: str, *, look: Any = None) -> Any:
        monkeypatch.setenv(STATED, json.dumps({"bfloat16": fast}))
        done = fit(tmp_path / out, look=look, mix=False)  # own text is written in either type
        return done.calibration.in_bfloat16, digests(tmp_path / out)["model.safetensors"]

    fast, slow = on_processor(True, "fast"), on_processor(False, "slow")
    assert (fast[0], slow[0]) == (True, False)
    assert fast[1] != slow[1]
    with pytest.raises(KeyboardInterrupt):
        on_processor(True, "out", look=stop_after_a_layer)
    assert on_processor(False, "out") == fast


def test_layers_of_another_command_are_neither_used_nor_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(64 * GIB, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "out", look=stop_after_a_layer, kl_steps=0)
    (kept,) = (tmp_path / ".out.gqa-merging").glob("layer-*")
    before = kept.read_bytes()
    for other, word in (
        ({"steps": 2}, "steps"),
        ({"mix": False}, "text, digest"),
        ({"seed": 1}, "seed"),
    ):
        with pytest.raises(OutputError, match=rf"keeps 1 merged layers of .* another .*{word}"):
            fit(tmp_path / "out", kl_steps=0, **other)
    assert kept.read_bytes() == before
    assert not (tmp_path / "out").exists()
    fit(tmp_path / "out", kl_steps=0)
    assert not kept.exists()


@pytest.mark.parametrize("asked", [False, True])
def test_a_last_stage_without_memory_falls_back_unless_it_was_asked_for(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = folded.build("llama")
    source = case.save(tmp_path / "source")
    calibrate_on(batches_for(case.model), monkeypatch)
    free(64 * GIB, monkeypatch)
    fit(tmp_path / "layers", source, kl_steps=0)

    def failing(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(last_stage.Student, "logits", failing)
    if asked:
        with pytest.raises(DeviceMemoryError, match="--kl-steps 0"):
            fit(tmp_path / "out", source, kl_steps=2)
        assert not (tmp_path / "out").exists()
        return
    result = fit(tmp_path / "out", source)
    assert result.calibration is not None
    assert result.calibration.kl_steps == 0
    assert result.calibration.left_out == (
        "the last stage, which trains all layers together, because it ran out of memory",
    )
    assert (
        digests(tmp_path / "out")["model.safetensors"]
        == digests(tmp_path / "layers")["model.safetensors"]
    )


# Own text


def test_own_text_is_written_after_the_users_was_read_and_no_more_than_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(64 * GIB, monkeypatch)
    written: list[int] = []
    write = own_text.OwnWriter.write

    def noted(writer: Any, tokens: int, *args: Any) -> Any:
        written.append(tokens)
        return write(writer, tokens, *args)

    monkeypatch.setattr(own_text.OwnWriter, "write", noted)
    (tmp_path / "empty.txt").write_text(" ")
    for text in ("empty.txt", ["self", str(tmp_path / "empty.txt")]):
        text = str(tmp_path / text) if isinstance(text, str) else text
        options = CalibrationOptions(text, **SHORT)
        with pytest.raises(DataError, match=r"calibration needs at least|no text|is empty"):
            convert_checkpoint(
                DEMO, tmp_path / "out", 3, ConversionOptions(method="fit", calibration=options)
            )
    assert written == []
    fit(tmp_path / "layers", kl_steps=0)
    # a tenth of the text for the layers and of what is held out, and a spare eighth of that
    assert written == [pytest.approx(0.1 * (1280 + 2048) * 9 / 8, abs=1)]
    (file,) = (tmp_path / "cache").rglob("own-text-*.jsonl")
    rows = [json.loads(line)["batch"] for line in file.read_text().splitlines()]
    assert {rows.count(batch) for batch in set(rows)} <= {*range(1, 9), *range(9, 17)}
    assert rows.count(0) <= 8


def test_a_model_that_cannot_converse_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(64 * GIB, monkeypatch)
    source = with_chat_template(tmp_path / "source")

    def refuses(*_: Any) -> None:
        raise DataError(
            "the model asks nothing where its chat template lets a user speak: name text instead"
        )

    monkeypatch.setattr(own_text._Decoder, "conversations", refuses)
    result = fit(tmp_path / "out", source, kl_steps=0)
    assert result.calibration is not None
    assert "mixed in: 10% text of its own, 8% Python sources" in result.calibration.text
    (left_out,) = result.calibration.left_out
    assert left_out.startswith(
        "conversations of the source's own among the calibration text, because the model asks"
    )


# Finite numbers


@pytest.mark.parametrize("method", ["factor", "fit"])
def test_numbers_that_the_type_cannot_hold_are_refused(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finite float16 source, whose merged heads have larger numbers."""
    case = folded.build("llama")
    for name, parameter in case.model.named_parameters():
        if name.endswith("self_attn.v_proj.weight"):
            parameter.data.sign_().mul_(6e4)
        if name.endswith("self_attn.o_proj.weight"):
            parameter.data.mul_(1e-5)
    source = case.model.half().save_pretrained(tmp_path / "source") or tmp_path / "source"
    calibrate_on(batches_for(case.model.float()), monkeypatch)
    monkeypatch.setattr(layer_walk, "check_finite", lambda *_: None)
    text = {"source": "python-stdlib", "tokens": 8, "sequence_length": 8} if method == "fit" else {}
    options = ConversionOptions(
        method=method,
        calibration=CalibrationOptions(**text, **({"steps": 0, "kl_steps": 0} if text else {})),
    )
    with pytest.raises(NonFiniteError, match="too large for F16"):
        convert_checkpoint(source, tmp_path / "out", 3, options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["mlp.down_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("method", ["factor", "fit"])
def test_a_source_that_yields_no_numbers_is_refused(
    method: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = folded.build("llama")
    with torch.no_grad():
        (
            case.model.get_parameter(place)
            if place.startswith("lm")
            else case.model.model.layers[0].mlp.down_proj.weight
        )[0, 0] = np.nan
    source = case.save(tmp_path / "source")
    calibrate_on(batches_for(case.model), monkeypatch)
    options = CalibrationOptions("python-stdlib", tokens=8, sequence_length=8, device="cpu")
    with pytest.raises(
        GQAConvertError, match=r"the source yields NaN or Inf at .* on what --calibration names"
    ) as caught:
        convert_checkpoint(
            source, tmp_path / "out", 3, ConversionOptions(method=method, calibration=options)
        )
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_activations_that_are_computed_again_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the stage runs so, to the same bytes."""
    case = folded.build("llama")
    source = case.save(tmp_path / "source")
    calibrate_on(batches_for(case.model), monkeypatch)
    seen: list[str] = []
    asked: list[bool] = []
    student = last_stage.Student

    def noted(*args: Any, recompute: bool, **options: Any) -> Any:
        asked.append(recompute)
        return student(*args, recompute=recompute, **options)

    monkeypatch.setattr(last_stage, "Student", noted)
    for name, recompute in (("kept", False), ("again", True)):
        monkeypatch.setattr(
            fitting,
            "decide",
            lambda *_, recompute=recompute: resources.Decisions(recompute=recompute),
        )
        fit(
            tmp_path / name,
            source,
            look=lambda progress: seen.append(progress.note or ""),
            kl_steps=2,
        )
        told = [
            note for note in seen if note.startswith("the last stage computes activations again")
        ]
        assert len(told) == recompute
    assert asked == [False, True]
    assert (
        digests(tmp_path / "kept")["model.safetensors"]
        == digests(tmp_path / "again")["model.safetensors"]
    )


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("RATE", 5.0, r"it took validation text from \S+ to \S+ nats per token"),
        ("WORTHWHILE", 1e9, r"the result diverges by less than 1e\+09 nats per token"),
    ],
)
def test_a_last_stage_that_changes_nothing_says_why(
    name: str, value: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its steps are far too long, and where there is too little to gain."""
    free(64 * GIB, monkeypatch)
    monkeypatch.setattr(last_stage, name, value)
    notes: list[str] = []

    def look(progress: FitProgress) -> None:
        if progress.note:
            notes.append(progress.note)

    result = fit(tmp_path / "out", look=look)
    assert result.calibration is not None
    assert result.calibration.kl is not None
    assert result.calibration.kl.after == result.calibration.kl.before
    (sentence,) = result.calibration.left_out
    assert re.fullmatch(
        f"the last stage, which trains all layers together, because {reason}", sentence
    )
    assert f"left out: {sentence}" in notes
