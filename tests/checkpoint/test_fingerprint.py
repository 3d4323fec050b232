"""The fingerprint by which results of a checkpoint are known, and the records that hold it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.errors import CorruptCheckpointError, SourceNotFoundError
from tests.helpers.checkpoints import by_mean, write_llama


def test_a_conversion_records_the_fingerprint_and_the_parameters_of_its_source(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    by_mean(source, tmp_path / "out", 3)
    record = json.loads((tmp_path / "out" / "gqa_conversion.json").read_bytes())
    assert record["source"]["fingerprint"] == fingerprint(source)
    assert fingerprint(source) != fingerprint(tmp_path / "out")
    stored = {
        name: (folder / "model.safetensors").stat().st_size
        for name, folder in (("before", source), ("after", tmp_path / "out"))
    }
    for name, size in stored.items():
        assert size - 8_000 < 4 * record["parameters"][name] < size  # the header takes the rest


def checkpoint(folder: Path, *, sharded: bool = False) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    tensors = {f"layer.{number}": np.zeros(1_000, np.float32) for number in range(84)}
    save_file(tensors | {"small": np.zeros(2, np.float32)}, folder / "model.safetensors")
    if sharded:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part.safetensors"}}')
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_a_fingerprint_is_that_of_the_checkpoint(tmp_path: Path, sharded: bool) -> None:
    folder = checkpoint(tmp_path / "a" / "model", sharded=sharded)
    known = fingerprint(folder)
    assert known == fingerprint(checkpoint(tmp_path / "b", sharded=sharded))
    (folder / "README.md").write_text("a card")
    (folder / "pytorch_model.bin").write_bytes(b"weights that transformers would not load")
    assert fingerprint(folder) == known
    weights = folder / ("part.safetensors" if sharded else "model.safetensors")
    found = {known}
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(b"trained")
    found.add(fingerprint(folder))
    save_file(load_file(weights) | {"more": np.zeros(1)}, weights)
    found.add(fingerprint(folder))
    (folder / "config.json").write_text('{"model_type": "llama", "num_key_value_heads": 2}')
    found.add(fingerprint(folder))
    (folder / "gqa_conversion.json").write_text("{}")
    found.add(fingerprint(folder))
    if sharded:
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"b": "part.safetensors"}}')
        found.add(fingerprint(folder))
    assert len(found) == 5 + sharded


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_every_tensor_counts(tmp_path: Path, suffix: str) -> None:
    """Models that differ in any one tensor of many have other fingerprints."""
    folder = checkpoint(tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if suffix == "bin":
        file.unlink()

    def found() -> str:
        if suffix == "bin":
            torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, folder / "pytorch_model.bin")
        else:
            save_file(tensors, file)
        return fingerprint(folder)

    known = {found()}
    for array in tensors.values():
        array += 1
        known.add(found())
    assert len(known) == 1 + len(tensors)


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        fingerprint(tmp_path)
    with pytest.raises(CorruptCheckpointError, match="No such file"):
        fingerprint(tmp_path / "missing")
