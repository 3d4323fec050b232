"""Converted and uptrained checkpoints in engines of other makers: transformers 4.57 and CTranslate2, both as users install them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert import convert_checkpoint
from gqa_convert.errors import MissingExtraError
from gqa_convert.plan.older_words import older_words
from gqa_convert.serving.checking import check_serving
from gqa_convert.serving.client import CLIENTS
from gqa_convert.serving.installing import find_place, install
from gqa_convert.verify import verify_checkpoint
from tests.tiny import make_checkpoint, randomise
from tests.uptrain_runs import DEMO
from tests.uptrain_runs import run as uptrain

OLDER, CTRANSLATE2 = "transformers-4.57", "ctranslate2"


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more, "max_position_embeddings": 512}


@pytest.fixture(scope="session", autouse=True)
def engines() -> None:
    """Both engines, in the user's cache of this package where they are not installed; made once."""
    for client in CLIENTS:
        if client.name in (OLDER, CTRANSLATE2) and find_place(client) is None:
            try:
                install(client)
            except MissingExtraError as problem:
                pytest.skip(f"NOT CHECKED in {client.name}: {problem}")


def statuses(out: Path, *names: str) -> dict[str, str]:
    report = check_serving(out, names)
    assert report["prompts"][-1] > 300
    return {entry["client"]: f"{entry['status']} {entry['detail']}" for entry in report["clients"]}


def convert(source: Path) -> Path:
    convert_checkpoint(source, source.with_name("out"), 3, method="mean")
    return source.with_name("out")


def save_tokenizer(folder: Path) -> None:
    """As transformers 5 saves one: its class has a name that no other version knows."""
    vocabulary = {f"w{number}": number for number in range(60)} | {"<unk>": 60}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"


def test_a_llama_with_heads_of_their_own_width(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source", head_dim=16, **rope(500_000.0))
    save_tokenizer(source)
    out = convert(source)
    found = statuses(out, OLDER, CTRANSLATE2)
    assert found[OLDER].startswith("ok 72 of 72 tokens equal")
    assert found[CTRANSLATE2].startswith("not supported it takes heads to be hidden size / heads = 8 wide, and these are 16 wide")
    assert verify_checkpoint(out, str(source), logits=False).passed
    assert AutoTokenizer.from_pretrained(out)("w3 w59 x")["input_ids"] == [3, 59, 60]


def test_a_qwen2_with_biases(tmp_path: Path) -> None:
    out = convert(make_checkpoint("qwen2", tmp_path / "source", **rope(1e6)))
    found = statuses(out, OLDER, CTRANSLATE2)
    assert {status[:11] for status in found.values()} == {"ok 72 of 72"}, found


def test_a_wrong_rotary_base_is_caught(tmp_path: Path) -> None:
    out = convert(make_checkpoint("qwen2", tmp_path / "source", **rope(1e6)))
    config = json.loads((out / "config.json").read_text())
    del config["rope_theta"]  # as transformers 5 alone would save it
    (out / "config.json").write_text(json.dumps(config))
    assert statuses(out, OLDER)[OLDER].startswith("failed prompt of 5 tokens: new token")
    verified = verify_checkpoint(out, str(tmp_path / "source"), logits=False)
    assert any("lacks rope_theta" in check.detail for check in verified.checks)


def test_a_gpt_neox_that_became_a_phi(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gpt_neox"](
        vocab_size=64, hidden_size=96, num_hidden_layers=2, num_attention_heads=12, intermediate_size=40, bos_token_id=1, eos_token_id=2,
        **rope(500.0, partial_rotary_factor=0.5),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(tmp_path / "source")
    found = statuses(convert(tmp_path / "source"), OLDER, CTRANSLATE2)
    assert found[OLDER].startswith("ok 72 of 72 tokens equal")
    assert found[CTRANSLATE2].startswith("not supported its converter reads phi")


def test_an_uptrained_checkpoint(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source", head_dim=8, vocab_size=2048, **rope(500_000.0))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((DEMO / name).read_bytes())
    convert_checkpoint(source, tmp_path / "student", 3, method="mean")
    (tmp_path / "text.txt").write_text(Path(torch.__file__).read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    uptrain(tmp_path, tmp_path / "run", tokens=128, save_every=10)
    found = statuses(tmp_path / "run" / "model", OLDER, CTRANSLATE2)
    assert {status[:2] for status in found.values()} == {"ok"}, found


def test_older_words() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert older_words({"rope_parameters": scaled, "dtype": "bfloat16"}) == {
        "rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "torch_dtype": "bfloat16",
    }  # fmt: skip
    stated = {"rope_theta": 1.0, "rope_scaling": {"type": "linear"}, "partial_rotary_factor": 1.0, "torch_dtype": "float16"}
    assert older_words({"rope_parameters": scaled, "dtype": "bfloat16"} | stated) == {}
    kinds = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    assert older_words({"model_type": "gemma3_text", "rope_parameters": kinds}) == {
        "rope_local_base_freq": 1e4, "rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    assert older_words({"model_type": "olmo3", "rope_parameters": kinds | {"rope_theta": 1e6}}) == {}
    assert older_words({"rope_parameters": None, "dtype": None}) == {}
