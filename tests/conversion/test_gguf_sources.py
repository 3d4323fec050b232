"""GGUF files as sources: planned by their headers, converted through a dequantised checkpoint that goes away again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gqa_convert.checkpoint import gguf_files, hub
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion import run
from gqa_convert.conversion.fit.calibrated import CalibrationOptions
from gqa_convert.conversion.opening import plan_source, planner_for
from gqa_convert.conversion.restating.restate import restate_checkpoint
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GQAConvertError, InterruptedRunError, NoSpaceError, SourceNotFoundError
from gqa_convert.verify import verify_checkpoint
from tests.helpers.gguf_files import write_gguf_llama
from tests.helpers.tiny import make_config, make_model
from tests.helpers.verification import failed


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama that the GGUF files are made of, in numbers that float16 has."""
    folder = tmp_path_factory.mktemp("plain") / "source"
    config = make_config("llama", head_dim=8, intermediate_size=64, vocab_size=64)
    make_model(config).half().float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gguf(plain: Path) -> Callable[[str], Path]:
    """Writes a GGUF file of a type, once."""

    def make(quantisation: str) -> Path:
        file = plain.parent / quantisation / f"model-{quantisation}.gguf"
        if not file.exists():
            file.parent.mkdir()
            write_gguf_llama(plain, file, quantisation, tokenizer=quantisation == "Q8_0")
        return file

    return make


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_that_is_not_quantised_converts_as_its_checkpoint(
    plain: Path, gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    said: list[str] = []
    convert_checkpoint(gguf("F16"), tmp_path / "out", 3, method="mean", on_note=said.append)
    convert_checkpoint(plain, tmp_path / "expected", 3, method="mean")
    ours, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert ours.keys() == expected.keys()
    assert {tensor.dtype for tensor in ours.values()} == {torch.float16}
    for name, tensor in expected.items():
        assert torch.equal(ours[name].float(), tensor.half().float()), name
    assert "GGUF file (F16" in said[0]
    assert "stays lost" not in said[0]
    assert "transformers cannot read the tokenizer" in said[-1]


def test_a_quantised_file(gguf: Callable[[str], Path], tmp_path: Path) -> None:
    file, out = gguf("Q8_0"), tmp_path / "out"
    said: list[str] = []
    convert_checkpoint(file, out, 3, method="mean", on_note=said.append)
    assert left(tmp_path) == ["out"]
    assert f"GGUF file (Q8_0, {file.stat().st_size / 1000:.1f} kB)" in said[0]
    assert "written in bfloat16" in said[0]
    assert "what Q8_0 lost stays lost" in said[0]
    assert f"of disk space in {tmp_path}/.out.gqa-dequantised until the end" in said[1]
    record = json.loads((out / "gqa_conversion.json").read_text())["source"]
    assert record["id"] == str(file)
    assert record["dequantised"] == {
        "file": file.name,
        "bytes": file.stat().st_size,
        "quantisation": "Q8_0",
        "dtype": "bfloat16",
    }
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_theta"] == 10000.0
    assert (out / "tokenizer.json").is_file()
    assert failed(verify_checkpoint(out, file)) == {}
    assert failed(verify_checkpoint(out, file.parent)) == {}
    assert left(tmp_path) == ["out"]
    model = AutoModelForCausalLM.from_pretrained(out)
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    for layer, other in zip(model.model.layers, source.model.layers, strict=True):
        heads = other.self_attn.k_proj.weight.float().view(3, 4, 8, 96)
        assert torch.equal(layer.self_attn.k_proj.weight, heads.mean(1).reshape(24, 96).bfloat16())


def test_the_plan_is_that_of_the_conversion(gguf: Callable[[str], Path], tmp_path: Path) -> None:
    file = gguf("Q8_0")
    plan, _ = plan_source(file, None, planner_for(3, "mean", CalibrationOptions()))
    made = convert_checkpoint(file, tmp_path / "out", 3, method="mean").plan
    ours, theirs = plan.summary(), made.summary()
    warnings = ours.pop("warnings")
    assert theirs.pop("warnings") == []
    assert "the source is a GGUF file (Q8_0" in warnings[0]
    assert "dequantising takes about" in warnings[1]
    different = {key for key in theirs if ours[key] != theirs[key]}
    assert different <= {"disk_bytes"}


def test_a_file_on_the_hub(gguf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshots" / "4d7a"
    snapshot.mkdir(parents=True)
    shutil.copy(gguf("F16"), snapshot / "q.gguf")
    asked: list[tuple[str, str, str | None]] = []

    def download(repository: str, name: str, revision: str | None) -> Path:
        asked.append((repository, name, revision))
        if name == "none.gguf":
            raise SourceNotFoundError("the Hub has none")
        return snapshot / name

    monkeypatch.setattr(hub, "download_file", download)
    convert_checkpoint("org/name/q.gguf", tmp_path / "out", 3, method="mean", revision="main")
    assert asked == [("org/name", "q.gguf", "main")]
    record = json.loads((tmp_path / "out" / "gqa_conversion.json").read_text())["source"]
    assert (record["id"], record["revision"]) == ("org/name/q.gguf", "4d7a")
    assert line(Path("org/name/none.gguf"), tmp_path / "other") == (
        "there is no local file org/name/none.gguf, and the Hub has none"
    )


def test_restate_writes_the_checkpoint_alone(gguf: Callable[[str], Path], tmp_path: Path) -> None:
    file = gguf("Q8_0")
    made = restate_checkpoint(file, tmp_path / "plain")
    assert made.result_model_type == "llama"
    assert "Q8_0" in made.notes[0]
    opened = open_checkpoint(tmp_path / "plain")
    assert {entry.dtype for _, _, entry in opened.tensors()} == {"BF16"}
    result = convert_checkpoint(tmp_path / "plain", tmp_path / "out", 3, method="mean")
    assert failed(verify_checkpoint(result.out, tmp_path / "plain", logits=False)) == {}


def test_a_stopped_conversion_leaves_nothing(
    gguf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        assert left(tmp_path) == [".out.gqa-dequantised"]
        raise InterruptedRunError("stopped")

    monkeypatch.setattr(run, "earlier_record", stop)
    with pytest.raises(InterruptedRunError):
        convert_checkpoint(gguf("Q8_0"), tmp_path / "out", 3, method="mean")
    assert left(tmp_path) == []


def test_merged_layers_of_a_stopped_fit_keep_what_they_were_made_from(
    gguf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        (tmp_path / ".out.gqa-merging").mkdir()
        raise InterruptedRunError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(run, "earlier_record", stop)
        with pytest.raises(InterruptedRunError):
            convert_checkpoint(gguf("Q8_0"), tmp_path / "out", 3, method="mean")
    hidden = tmp_path / ".out.gqa-dequantised"
    before = (hidden / "model.safetensors").stat().st_ino
    monkeypatch.setattr(
        run,
        "earlier_record",
        lambda _: before == (hidden / "model.safetensors").stat().st_ino or pytest.fail("written anew"),
    )
    monkeypatch.setattr(run, "record_conversion", stop_now)
    with pytest.raises(ZeroDivisionError):
        convert_checkpoint(gguf("Q8_0"), tmp_path / "out", 3, method="mean")
    assert not hidden.exists()


def stop_now(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


def line(source: Path, out: Path) -> str:
    with pytest.raises(GQAConvertError) as caught:
        convert_checkpoint(source, out, 3)
    assert not out.exists()
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_mistakes(gguf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder, out = gguf("Q8_0"), tmp_path / "models", tmp_path / "out"
    folder.mkdir()
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m.gguf"):
        shutil.copy(file, folder / name)
    assert line(folder, out) == (
        f"{folder} holds 2 GGUF models (m-Q4_K_M.gguf, m-Q8_0.gguf): name one of them, as {folder}/m-Q4_K_M.gguf"
    )
    part = folder / "big-00001-of-00003.gguf"
    shutil.copy(file, part)
    assert "is part 1 of 3: join the parts with llama.cpp's `llama-gguf-split --merge" in line(part, out)
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:-2000])
    assert "damaged.gguf is truncated or damaged (" in line(damaged, out)
    damaged.write_bytes(b"<html>" * 100)
    assert "does not begin with GGUF's mark" in line(damaged, out)
    assert "heads" in line_of_groups(file, out)
    assert line(folder / "none.gguf", out) == f"there is no file {folder}/none.gguf: check the path"
    with pytest.raises(GQAConvertError, match="is local and has no revision 'main': omit --revision"):
        convert_checkpoint(file, out, 3, revision="main")
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    with pytest.raises(GQAConvertError, match=r"gqa-convert restate .*Q8_0.gguf PLAIN"):
        open_checkpoint(file)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(NoSpaceError, match=r"1\.0 kB free, and dequantising"):
        convert_checkpoint(file, out, 3, method="mean")
    monkeypatch.setattr(gguf_files, "find_spec", lambda _: None)
    assert line(file, out).endswith("pip install 'gqa-convert[gguf]'")


def line_of_groups(file: Path, out: Path) -> str:
    with pytest.raises(GQAConvertError) as caught:
        convert_checkpoint(file, out, 5, method="mean")
    return str(caught.value)


def test_an_architecture_that_transformers_cannot_read(tmp_path: Path) -> None:
    import gguf as library

    file = tmp_path / "model.gguf"
    writer = library.GGUFWriter(str(file), "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "cannot be read by transformers" in line(file, tmp_path / "out")
    assert left(tmp_path) == ["model.gguf"]
