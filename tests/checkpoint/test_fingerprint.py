"""A conversion records by what results of its source are known."""

import json
from pathlib import Path

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.conversion.run import convert_checkpoint
from tests.helpers.checkpoints import write_llama


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
