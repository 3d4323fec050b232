"""A fingerprint changes with the config, the record and the list of weights, and with nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.conversion.run import convert_checkpoint
from tests.helpers.checkpoints import write_llama


@pytest.mark.parametrize("shards", [1, 3])
def test_what_a_fingerprint_covers(tmp_path: Path, shards: int) -> None:
    source = write_llama(tmp_path / "source", shards=shards)
    convert_checkpoint(source, tmp_path / "out", 3, method="mean")
    before = fingerprint(tmp_path / "out")
    copy = shutil.copytree(tmp_path / "out", tmp_path / "elsewhere" / "copy")
    (copy / "README.md").write_text("a card")
    (copy / "tokenizer_config.json").write_text("{}")
    (copy / "pytorch_model.bin").write_text("not what is loaded")
    assert fingerprint(copy) == before
    listed = "model.safetensors" if shards == 1 else "model.safetensors.index.json"
    for name in ("config.json", "gqa_conversion.json", listed):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content + b" ")
        assert fingerprint(copy) != before, name
        (copy / name).write_bytes(content)
    (copy / "gqa_conversion.json").unlink()
    assert fingerprint(copy) != before


def test_a_conversion_records_the_fingerprint_and_the_parameters_of_its_source(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    convert_checkpoint(source, tmp_path / "out", 3, method="mean")
    record = json.loads((tmp_path / "out" / "gqa_conversion.json").read_bytes())
    assert record["source"]["fingerprint"] == fingerprint(source)
    assert fingerprint(source) != fingerprint(tmp_path / "out")
    stored = {
        name: (folder / "model.safetensors").stat().st_size
        for name, folder in (("before", source), ("after", tmp_path / "out"))
    }
    for name, size in stored.items():
        assert size - 8_000 < 4 * record["parameters"][name] < size  # the header takes the rest
