"""Ranges of files are compared byte by byte, wherever they begin and however long they are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gqa_convert.verify.checkpoint_reader import ByteRange, Weights
from gqa_convert.verify.exact import same_bytes as module
from gqa_convert.verify.exact.same_bytes import same_bytes


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 32, 45, 64])
def test_every_byte_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """In whole blocks and in the rest. What is reported adds up to all bytes, or to none where one differs."""
    monkeypatch.setattr(module, "_BLOCK", 16)
    monkeypatch.setattr(module, "_STEP", 32)
    data = bytes(range(100))
    ours, theirs = ByteRange(tmp_path / "ours", 3, nbytes), ByteRange(tmp_path / "theirs", 8, nbytes)
    ours.path.write_bytes(data)
    theirs.path.write_bytes(bytes(5) + data)
    reported: list[int] = []
    assert same_bytes(ours, theirs, reported.append)
    assert sum(reported) == nbytes
    assert len(reported) == nbytes // 32 + 1
    for place in range(nbytes):
        damaged = bytearray(bytes(5) + data)
        damaged[8 + place] ^= 128
        theirs.path.write_bytes(damaged)
        reported.clear()
        assert not same_bytes(ours, theirs, reported.append)
        assert sum(reported) == 0


def test_ranges_that_are_not_whole_differ(tmp_path: Path) -> None:
    (tmp_path / "ours").write_bytes(bytes(20))
    (tmp_path / "theirs").write_bytes(bytes(12))
    ours = ByteRange(tmp_path / "ours", 0, 16)
    assert not same_bytes(ours, ByteRange(tmp_path / "ours", 0, 15), lambda count: None)
    assert not same_bytes(ours, ByteRange(tmp_path / "theirs", 0, 16), lambda count: None), "the file ends too early"


def test_a_range_holds_the_tensor(tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(3.5), "matrix": torch.randn(3, 5).bfloat16(), "none": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = Weights(tmp_path, ValueError)
    for name, tensor in tensors.items():
        found = weights.byte_range(name)
        assert found is not None
        held = found.path.read_bytes()[found.start : found.start + found.nbytes]
        assert held == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert Weights(tmp_path, ValueError).byte_range("matrix") is None
