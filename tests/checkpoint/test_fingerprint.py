"""The fingerprint by which results of a checkpoint are known, and the records that hold it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.source import open_checkpoint
from tests.helpers.checkpoints import by_mean, write_llama


def test_a_conversion_records_the_fingerprint_and_the_parameters_of_its_source(
    tmp_path: Path,
) -> None:
    source = write_llama(tmp_path / "source")
    by_mean(source, tmp_path / "out", 3)
    record = json.loads((tmp_path / "out" / "gqa_conversion.json").read_bytes())
    assert record["source"]["fingerprint"] == fingerprint(open_checkpoint(source))
    assert fingerprint(open_checkpoint(source)) != fingerprint(open_checkpoint(tmp_path / "out"))
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
        write_index(folder)
    return folder


def write_index(folder: Path, **metadata: str) -> None:
    """The index of a checkpoint with one file."""
    names = dict.fromkeys(load_file(folder / "part.safetensors"), "part.safetensors")
    stated = {"metadata": metadata, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(stated))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_fingerprint_is_that_of_the_checkpoint(tmp_path: Path, sharded: bool) -> None:
    folder = checkpoint(tmp_path / "a" / "model", sharded=sharded)
    known = fingerprint(open_checkpoint(folder))
    assert known == fingerprint(open_checkpoint(checkpoint(tmp_path / "b", sharded=sharded)))
    (folder / "README.md").write_text("a card")
    (folder / "pytorch_model.bin").write_bytes(b"weights that transformers would not load")
    assert fingerprint(open_checkpoint(folder)) == known
    weights = folder / ("part.safetensors" if sharded else "model.safetensors")
    found = {known}
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(b"trained")
    found.add(fingerprint(open_checkpoint(folder)))
    save_file(load_file(weights) | {"more": np.zeros(1)}, weights)
    if sharded:
        write_index(folder)
    found.add(fingerprint(open_checkpoint(folder)))
    (folder / "config.json").write_text('{"model_type": "llama", "num_key_value_heads": 2}')
    found.add(fingerprint(open_checkpoint(folder)))
    (folder / "gqa_conversion.json").write_text("{}")
    found.add(fingerprint(open_checkpoint(folder)))
    if sharded:
        write_index(folder, note="another index")
        found.add(fingerprint(open_checkpoint(folder)))
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
            torch.save(
                {name: torch.from_numpy(array) for name, array in tensors.items()},
                folder / "pytorch_model.bin",
            )
        else:
            save_file(tensors, file)
        return fingerprint(open_checkpoint(folder))

    known = {found()}
    for array in tensors.values():
        array += 1
        known.add(found())
    assert len(known) == 1 + len(tensors)


def test_files_that_went_away_are_named(tmp_path: Path) -> None:
    opened = open_checkpoint(checkpoint(tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"No such file.*model\.safetensors"):
        fingerprint(opened)
