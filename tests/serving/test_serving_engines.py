"""Converted and uptrained checkpoints in engines of other makers: transformers 4.57 and CTranslate2, both as users
install them.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert import convert_checkpoint
from gqa_convert.errors import MissingExtraError
from gqa_convert.families.table import FAMILIES
from gqa_convert.serving.checking import check_serving
from gqa_convert.serving.client import CLIENTS
from gqa_convert.serving.installing import find_place, install
from gqa_convert.verify import verify_checkpoint
from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.config import check_config
from gqa_convert.verify.geometry_reader import read_geometry
from gqa_convert.verify.report import Failure
from tests.helpers.own_files import make_source_model
from tests.helpers.tiny import HEADS, make_checkpoint, randomise
from tests.helpers.uptrain_runs import DEMO
from tests.helpers.uptrain_runs import run as uptrain

pytestmark = pytest.mark.slow

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
    report = check_serving(out, names).as_json()
    assert report["prompts"][-1] > 300
    return {entry["client"]: f"{entry['status']} {entry['detail']}" for entry in report["clients"]}


def convert(source: Path) -> Path:
    convert_checkpoint(source, source.with_name("out"), 3, method="mean")
    return source.with_name("out")


def save_tokenizer(folder: Path, **special: str) -> None:
    """As transformers 5 saves one: its class has a name that no other version knows."""
    vocabulary = {f"w{number}": number for number in range(60)} | {"<unk>": 60}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special).save_pretrained(folder)
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"


def test_a_llama_with_heads_of_their_own_width(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source", head_dim=16, **rope(500_000.0))
    save_tokenizer(source, bos_token="w1", eos_token="w2")
    out = convert(source)
    found = statuses(out, OLDER, CTRANSLATE2)
    assert found[OLDER].startswith("ok 72 of 72 tokens equal")
    assert found[CTRANSLATE2].startswith(
        "not supported it assumes a head_dim of hidden_size / heads = 8, and this model's is 16"
    )
    assert verify_checkpoint(out, str(source), logits=False).passed
    assert AutoTokenizer.from_pretrained(out)("w3 w59 x")["input_ids"] == [3, 59, 60]


def test_a_tokenizer_that_ctranslate2_cannot_take(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source", **rope(500_000.0))
    save_tokenizer(source)
    assert statuses(convert(source), CTRANSLATE2)[CTRANSLATE2].startswith(
        "not supported it needs a tokenizer with bos, eos and unknown tokens"
    )


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
        vocab_size=64,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=12,
        intermediate_size=40,
        bos_token_id=1,
        eos_token_id=2,
        **rope(500.0, partial_rotary_factor=0.5),
    )
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


def longrope(width: int, **more: Any) -> dict[str, Any]:
    """Positions beyond 16 turn by other factors."""
    factors = {"short_factor": [1.0 + number for number in range(width // 2)], "long_factor": [3.0] * (width // 2)}
    return {"rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0} | factors | more}


LINEAR = rope(500.0, rope_type="linear", factor=4.0)
KINDS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    "full_attention": LINEAR["rope_parameters"],
}
ONE_BASE = KINDS | {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}

SPECIAL: dict[str, tuple[dict[str, Any], set[str]]] = {
    "apertus": (rope(500.0) | {"hidden_act": "silu"}, {"rope_theta", "rope_scaling"}),
    "falcon": (rope(500.0), {"rope_theta"}),
    "gemma3n_text": ({"rope_parameters": KINDS}, {"rope_theta", "rope_local_base_freq", "rope_scaling"}),
    "gpt_neox": (
        rope(500.0, rope_type="linear", factor=4.0, partial_rotary_factor=0.5),
        {"rotary_emb_base", "rotary_pct", "rope_scaling"},
    ),
    "gpt_oss": (rope(500.0), {"rope_theta", "rope_scaling"}),
    "llama": (
        longrope(16, original_max_position_embeddings=16),
        {"rope_theta", "rope_scaling", "original_max_position_embeddings"},
    ),
    "olmo": (LINEAR, {"rope_theta", "rope_scaling"}),
    "olmo3": ({"rope_parameters": ONE_BASE}, {"rope_theta", "rope_scaling"}),
    "persimmon": (rope(500.0, partial_rotary_factor=0.75), {"rope_theta", "partial_rotary_factor"}),
    "phi3": (
        longrope(8) | {"original_max_position_embeddings": 16},
        {"rope_theta", "partial_rotary_factor", "rope_scaling"},
    ),
    "qwen3_moe": (rope(500.0), {"rope_theta", "num_experts"}),
}
"""Model types with words of their own: config values, and what transformers 4.57 must find in config.json."""

ASK = """
import sys, torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.save(model(torch.arange(3, 43)[None]).logits, folder + ".pt")
"""


def test_types_with_words_of_their_own(tmp_path: Path) -> None:
    """All in one process: the same logits as in transformers 5, and a config whose every word is demanded."""
    outs = []
    for model_type, (values, words) in SPECIAL.items():
        source, out = tmp_path / f"{model_type} source", tmp_path / model_type
        if FAMILIES[model_type].native:
            make_checkpoint(model_type, source, **values)
        else:
            make_source_model(model_type, **values).save_pretrained(source)
        convert_checkpoint(source, out, 3 if FAMILIES[model_type].native else HEADS, method="mean")
        assert (
            AutoConfig.from_pretrained(out).rope_parameters.items()
            >= AutoConfig.from_pretrained(source).rope_parameters.items()
        )
        config, original = (json.loads((folder / "config.json").read_text()) for folder in (out, source))
        assert set(config) - set(original) - {"multi_query_attention", "multi_query_group_num"} == words | {
            "torch_dtype"
        }
        assert verify_checkpoint(out, str(source), logits=False).passed
        geometry = read_geometry(FAMILIES[model_type], original, Weights(source, Failure), Weights(out, Failure))
        for word in words:
            less = {key: value for key, value in config.items() if key != word}
            with pytest.raises(Failure, match=f"lacks {word}"):
                check_config(less, original, FAMILIES[model_type], geometry, encoder=False)
        outs.append(str(out))
    place = find_place(next(client for client in CLIENTS if client.name == OLDER))
    assert place is not None
    subprocess.run([place.python, "-c", ASK, *outs], env=place.environment(), check=True)
    for out in outs:
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            ours = model(torch.arange(3, 43)[None]).logits
        assert (torch.load(f"{out}.pt") - ours).abs().max() < 1e-5 * (ours.max() - ours.min()), out
