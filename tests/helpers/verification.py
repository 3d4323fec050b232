"""Reports, damage to checkpoints, and a tokenizer, for the tests of the verifier."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gqa_convert.verify import VerificationReport
from tests.helpers.data_helpers import word_tokenizer

Damage = Callable[[Path, Path], object]
"""Changes OUT, given OUT and SOURCE."""

Made = Callable[..., tuple[Path, Path]]
"""The fixture `made`: OUT and SOURCE of a conversion."""


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of words w0 to w46."""
    word_tokenizer([*(f"w{number}" for number in range(47)), "<unk>"]).save_pretrained(folder)


def save_byte_pairs(folder: Path, **stated: Any) -> None:
    """Save a tokenizer in GPT-2's manner, whose class tokenizer_config.json does not name; without
    that file if nothing is stated in it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {chr(33 + index): index for index in range(30)} | {
        "<|endoftext|>": 30,
        "Ġ": 31,
        "Ġ!": 32,
    }
    tokenizer = Tokenizer(models.BPE(words, [("Ġ", "!")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if stated:
        (folder / "tokenizer_config.json").write_text(json.dumps(stated))


def details(report: VerificationReport) -> dict[str, str]:
    """The detail of every check by its name."""
    return {check.name: check.detail for check in report.checks}


def failed(report: VerificationReport) -> dict[str, str]:
    """The detail of every failed check by its name."""
    return {check.name: check.detail for check in report.checks if not check.passed}


def edit(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace a tensor of a folder, or drop it, and record the new hash so that the other checks
    have to find it.
    """
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            new = change(tensors.pop(name).clone())
            if new is not None:
                tensors[name] = new
            save_file(tensors, file, metadata={"format": "pt"})
            _record_hash(file)
            return
    raise AssertionError(f"no tensor {name}")


def _record_hash(file: Path) -> None:
    record = file.parent / "gqa_conversion.json"
    written = json.loads(record.read_text())["written"] if record.is_file() else {}
    if "sha256" in written.get(file.name, {}):
        written[file.name]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        edit_json(record, written=written)


def flip(row: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Flip the lowest bit of the last number of a row."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        numbers = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
        numbers.view(len(numbers), -1)[row, -1] ^= 1
        return tensor

    return change


def edit_json(path: Path, **changes: Any) -> None:
    """Change entries of a JSON object on disk."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(value, indent=2))


def claim(out: Path, **changes: Any) -> None:
    """Change claims of the provenance record."""
    edit_json(out / "gqa_conversion.json", **changes)


def tensor_of(folder: Path, name: str) -> torch.Tensor:
    """A tensor of a folder of safetensors files."""
    return next(
        tensors[name]
        for file in folder.glob("*.safetensors")
        if name in (tensors := load_file(file))
    )


def change(name: str, new: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    """Replace a tensor."""
    return lambda out, _: edit(out, name, new)


def remove(name: str) -> Damage:
    """Drop a tensor."""
    return change(name, lambda _: None)


def config(**changes: Any) -> Damage:
    """Change entries of the config."""
    return lambda out, _: edit_json(out / "config.json", **changes)


def without(key: str) -> Damage:
    """Drop an entry of the config."""

    def damage(out: Path, _: Path) -> None:
        path = out / "config.json"
        value = json.loads(path.read_text())
        del value[key]
        path.write_text(json.dumps(value))

    return damage


def claims(**changes: Any) -> Damage:
    """Change claims of the provenance record."""
    return lambda out, _: claim(out, **changes)
