"""Cards of a checkpoint whose layers differ in their K/V heads: numbers by layer, bytes summed by layer."""

import json
import shutil
from pathlib import Path

import pytest

from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import PublishError
from gqa_convert.measuring.results.kv_heads import by_number, in_words, mean_heads
from gqa_convert.publishing.publish import Options, publish
from gqa_convert.publishing.remote import Place
from tests.helpers.result_files import write_json
from tests.helpers.tiny import make_checkpoint

pytestmark = pytest.mark.usefixtures("modeling_files_registered")

COUNTS = [12, 4, 3, 1]
HEAD_BYTES = 2 * 8 * 4  # keys and values, head_dim, float32
WORDS = "1 to 12 (mean 5)"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lists")
    make_checkpoint("llama", folder / "source", head_dim=8, intermediate_size=256, num_hidden_layers=4)
    convert_checkpoint(folder / "source", folder / "list", COUNTS, method="mean", command=["gqa-convert", "convert"])
    return folder


def test_numbers_in_words() -> None:
    assert (in_words(4), in_words((2, 8, 3)), mean_heads((1, 2))) == ("4", "2 to 8 (mean 4.33)", 1.5)
    assert by_number((3, 3, 3, 1, 1, 3, 2)) == "3 in layers 0-2 and 5, 2 in layer 6, 1 in layers 3-4"
    assert by_number((1, 2)) == "2 in layer 1, 1 in layer 0"


def test_a_card_states_the_number_of_each_layer(base: Path) -> None:
    publish(base / "list", Place("me/list"), Options(licence="apache-2.0"), dry_run=True)
    card = (base / "list" / "README.md").read_text()
    assert (
        "from 12 K/V heads per layer to 12 in layer 0, 4 in layer 1, 3 in layer 2, 1 in layer 3, method `mean`" in card
    )
    assert f"| K/V heads per layer | 12 | {WORDS} |" in card
    assert f"| {48 * HEAD_BYTES:,} | {20 * HEAD_BYTES:,} |" in card
    assert "trust_remote_code=True" in card
    assert "vllm serve me/list --trust-remote-code\n" in card
    assert "transformers has no class whose layers differ" in card
    assert "split the K/V heads of every layer: 1; with copied K/V heads (vLLM) also 12." in card


def test_a_card_names_llama_cpp_where_its_converter_takes_the_tokenizer(base: Path, tmp_path: Path) -> None:
    out = shutil.copytree(base / "list", tmp_path / "list")
    for byte_fallback in (True, False):
        write_json(out / "tokenizer.json", {"model": {"type": "BPE", "byte_fallback": byte_fallback}})
        publish(out, Place("me/list"), Options(licence="apache-2.0"), dry_run=True)
        assert ("convert_hf_to_gguf.py" in (out / "README.md").read_text()) == byte_fallback


def test_a_record_with_other_numbers_is_no_card(base: Path, tmp_path: Path) -> None:
    out = shutil.copytree(base / "list", tmp_path / "list")
    record = json.loads((out / "gqa_conversion.json").read_text())
    write_json(out / "gqa_conversion.json", record | {"groups": [12, 4, 1, 1]})
    with pytest.raises(PublishError, match=r"says N = 1 to 12 \(mean 4.5\), and the weights have 1 to 12 \(mean 5\)"):
        publish(out, Place("me/list"), Options(licence="apache-2.0"), dry_run=True)
