"""The verifier on families without a native K/V-head count: good conversions pass, damage is found, and no foreign code
runs.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.families.loading import auto_class, load_model
from gqa_convert.verify import models, verify_checkpoint
from gqa_convert.verify.tokenizers import check_tokenizer
from tests.helpers.chatglm import write_source as write_chatglm
from tests.helpers.own_files import make_source
from tests.helpers.verification import (
    Conversions,
    Damage,
    change,
    claim,
    claims,
    config,
    details,
    edit,
    edit_json,
    failed,
    flip,
    remove,
    save_byte_pairs,
    save_tokenizer,
    tensor_of,
    without,
)

T5 = {"num_layers": 1, "num_decoder_layers": 2, "num_heads": 12}

SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5),
    "switch": ("switch_transformers", {}),
    "bart": ("bart", {"encoder_attention_heads": 8}),
    "bart, decoder alone": ("bart", {}),
    "whisper": ("whisper", {"encoder_attention_heads": 6}),
    "opt": ("opt", {}),
    "gpt2": ("gpt2", {"n_layer": 2}),
    "gpt2, cross": ("gpt2", {"n_layer": 2, "add_cross_attention": True}),
    "gpt_neo": ("gpt_neo", {}),
    "gpt_neox": ("gpt_neox", {}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "falcon": ("falcon", {"multi_query": False, "bias": True}),
    "falcon, 7B": ("falcon", {"multi_query": True}),
    "falcon, 40B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 6}),
}
HALF = ("gpt2", "t5")


def save_source(name: str, folder: Path) -> None:
    model_type, changes = SOURCES[name]
    make_source(model_type, folder, dtype=torch.bfloat16 if name in HALF else torch.float32, **changes)
    if name == "bart, decoder alone":
        model = transformers.BartForCausalLM.from_pretrained(folder)
        shutil.rmtree(folder)
        model.save_pretrained(folder)
    save_tokenizer(folder)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Conversions:
    return Conversions(tmp_path_factory.mktemp("verify-own"), save_source, native=False)


@pytest.mark.parametrize(
    ("name", "groups", "method", "encoder"),
    [
        ("t5", 3, "mean", False),
        ("t5", 4, "mean", True),
        ("switch", 3, "mean", True),
        ("bart", 4, "mean", False),
        ("bart", 4, "first", True),
        ("bart, decoder alone", 3, "mean", False),
        ("whisper", 3, "mean", True),
        ("opt", 3, "mean", False),
        ("gpt2", 3, "mean", False),
        ("gpt2, cross", 3, "mean", False),
        ("gpt_neo", 4, "mean", False),
        ("gpt_neox", 4, "mean", False),
        ("bloom", 6, "first", False),
        ("mpt", 4, "mean", False),
        ("falcon", 3, "mean", False),
        ("falcon, 7B", 4, "mean", False),
        ("falcon, 40B", 2, "mean", False),
        ("falcon, 40B", 12, "mean", False),
    ],
)
def test_good_conversions_pass(made: Conversions, name: str, groups: int, method: str, encoder: bool) -> None:
    out, source = made(name, groups, method, encoder=encoder)
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    found = details(report)
    assert "the package's own" in found["modelling file"]
    assert "of its own modelling file" in found["loads"]
    crosses = name.startswith(("t5", "switch", "bart", "whisper", "gpt2, cross"))
    assert ("cross-attention" in found["cache heads"]) == crosses
    assert f"{groups} heads in each" in found["cache heads"]
    assert ("encoder attention" in found["heads"]) == encoder
    repeated = groups > {"falcon, 7B": 1, "falcon, 40B": 6}.get(name, 12)
    assert (" 0 parameters of SOURCE replaced" in found["logits"]) == repeated


@pytest.mark.parametrize("name", ["t5", "bart", "gpt2", "gpt_neox"])
def test_at_the_sources_own_count_stock_classes_load_it(made: Conversions, name: str) -> None:
    out, source = made(name, 12)
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    assert "modelling file" not in details(report)
    config = json.loads((out / "config.json").read_text())
    assert "num_key_value_heads" not in config


def test_a_result_converted_again(made: Conversions, tmp_path: Path) -> None:
    """What it is made from has a modelling file already, which the new result brings along in its place."""
    for name, encoder in (("bart", True), ("gpt2", False)):
        first, _ = made(name, 4, encoder=encoder)
        for groups, more in ((2, False), (4, False), (4, True), (12, False)):
            if more and not encoder:
                continue
            out = tmp_path / f"{name}-{groups}-{more}"
            convert_checkpoint(first, out, groups, ConversionOptions(encoder=more, native=False, method="mean"))
            assert failed(verify_checkpoint(out, first)) == {}


def test_chatglm_is_proven_by_its_data_alone(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_chatglm(source)
    convert_checkpoint(source, out, 3, ConversionOptions(method="mean"))
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    found = details(report)
    assert "no class of type chatglm" in found["behaviour"]
    assert not {"loads", "logits", "cached decoding", "cache heads"} & set(found)
    name = "transformer.encoder.layers.1.self_attention.query_key_value"
    for tensor, row in ((f"{name}.weight", 3), (f"{name}.weight", -1), (f"{name}.bias", 12 * 16)):
        bad = shutil.copytree(out, tmp_path / "bad", dirs_exist_ok=True)
        edit(bad, tensor, flip(row))
        assert set(failed(verify_checkpoint(bad, source))) == {"merged tensors"}
    bad = shutil.copytree(out, tmp_path / "bad", dirs_exist_ok=True)
    edit_json(bad / "config.json", multi_query_group_num=6)
    assert set(failed(verify_checkpoint(bad, source))) == {"config"}


def blocks(tensor: torch.Tensor, *heads: int) -> list[torch.Tensor]:
    """The heads of [q | k | v], 8 rows each."""
    return list(tensor.split([8 * count for count in heads]))


def swap_query_heads(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[8:16], tensor[:8], tensor[16:]])


def swap_keys_and_values(tensor: torch.Tensor) -> torch.Tensor:
    query, key, value = blocks(tensor, 12, 3, 3)
    return torch.cat([query, value, key])


def left_interleaved(out: Path, source: Path) -> None:
    """Heads merged well, but left in the source's order: per K/V head its query heads, its key, its value."""
    rows = tensor_of(source, NEOX).reshape(12, 3, 8, -1)
    merged = rows.reshape(4, 3, 3, 8, -1)
    query, key, value = (merged[:, :, part] for part in range(3))
    together = torch.cat([query, key.double().mean(1, True).float(), value.double().mean(1, True).float()], 1)
    edit(out, NEOX, lambda tensor: together.reshape(tensor.shape))


def not_interleaved(out: Path, source: Path) -> None:
    """The first rows of the source taken for its queries."""
    edit(out, NEOX, lambda tensor: torch.cat([tensor_of(source, NEOX)[:96], tensor[96:]]))


def merged_by_rows(out: Path, source: Path) -> None:
    """A transposed weight cut into heads along the wrong axis, [in, out] taken for [out, in]."""
    weight = tensor_of(source, GPT2).float().T.contiguous().reshape(96, 288)
    key, value = (weight[:, start : start + 96].reshape(96, 4, 3, 8).mean(2).reshape(96, 32) for start in (96, 192))
    edit(out, GPT2, lambda tensor: torch.cat([weight[:, :96], key, value], 1).to(tensor.dtype))


def cut_bias(out: Path, source: Path) -> None:
    """A bias of the right length, its heads dropped and not merged."""
    edit(out, OPT, lambda tensor: tensor_of(source, OPT)[: len(tensor)])


def cross_bytes(after: int) -> dict[str, Any]:
    return {"cross_kv_bytes_per_encoder_token": {"before": 1536, "after": after}}


def rolled(tensor: torch.Tensor) -> torch.Tensor:
    """Keys and values of cross-attention swapped."""
    return tensor.roll(tensor.shape[1] // 2, 1)


def swap_groups(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[16:], tensor[:16]])


def edit_map(**changes: Any) -> Damage:
    def damage(out: Path, _: Path) -> None:
        auto_map = json.loads((out / "config.json").read_text())["auto_map"]
        edit_json(out / "config.json", auto_map=auto_map | changes)

    return damage


NEOX = "gpt_neox.layers.1.attention.query_key_value.weight"
MPT = "transformer.blocks.1.attn.Wqkv.weight"
FALCON = "transformer.h.0.self_attention.query_key_value.weight"
GPT2 = "transformer.h.0.attn.c_attn.weight"
CROSS = "transformer.h.1.crossattention"
OPT = "model.decoder.layers.0.self_attn.v_proj.bias"
BART = "model.encoder.layers.0.self_attn"
BART_CROSS = "model.decoder.layers.1.encoder_attn.v_proj.weight"

MERGED, UNTOUCHED, CONFIG, CLAIMS = {"merged tensors"}, {"untouched tensors"}, {"config"}, {"provenance"}
CODE = {"modelling file"}
GROUPS = {"t5": 3, "mpt": 3, "gpt2, cross": 3, "falcon, 40B": 2}
"""Where it is not 4."""
ENCODER = "bart, encoder too"

DAMAGE: dict[str, tuple[str, Damage, set[str]]] = {
    "query heads swapped": ("gpt_neox", change(NEOX, swap_query_heads), MERGED),
    "left interleaved": ("gpt_neox", left_interleaved, MERGED),
    "queries not taken apart": ("gpt_neox", not_interleaved, MERGED),
    "one bit of a query head": ("falcon, 40B", change(FALCON, flip(40)), MERGED),
    "keys and values swapped": ("mpt", change(MPT, swap_keys_and_values), MERGED),
    "bias not merged": ("opt", lambda out, source: edit(out, OPT, lambda _: tensor_of(source, OPT)), MERGED),
    "bias cut": ("opt", cut_bias, MERGED),
    "bias missing": ("opt", remove(OPT), {"tensor names", "merged tensors"}),
    "transposed weight": ("gpt2", merged_by_rows, MERGED),
    "one bit of a column": ("gpt2", change(GPT2, flip(40)), MERGED),
    "one bit of a bias": ("gpt2", change("transformer.h.1.attn.c_attn.bias", flip(96)), MERGED),
    "cross-attention": ("gpt2, cross", change(f"{CROSS}.c_attn.weight", rolled), MERGED),
    "queries of cross-attention": ("gpt2, cross", change(f"{CROSS}.q_attn.weight", flip(0)), UNTOUCHED),
    "values of cross-attention": ("bart", change(BART_CROSS, flip(0)), MERGED),
    "encoder left alone, changed": ("bart", change(f"{BART}.k_proj.weight", flip(95)), UNTOUCHED),
    "encoder converted, changed": (ENCODER, change(f"{BART}.k_proj.bias", flip(0)), MERGED),
    "encoder converted to another count": (ENCODER, change(f"{BART}.v_proj.weight", lambda t: t[:24]), {"heads"}),
    "encoder said to be converted": ("bart", claims(encoder=True), CLAIMS),
    "encoder said to be left alone": (ENCODER, claims(encoder=False), CLAIMS),
    "encoder's count in the config": ("bart", config(encoder_num_key_value_heads=4), CONFIG),
    "encoder's count missing": (ENCODER, without("encoder_num_key_value_heads"), CONFIG),
    "heads in the cross-attention cache": ("t5", claims(**cross_bytes(1536)), CLAIMS),
    "no cross-attention cache": ("t5", claims(cross_kv_bytes_per_encoder_token=None), CLAIMS),
    "a cross-attention cache": ("gpt2", claims(**cross_bytes(384)), CLAIMS),
    "another route": ("gpt2", claims(route="native"), CLAIMS),
    "more bytes": ("gpt2", claims(kv_bytes_per_token={"before": 1, "after": 1}), CLAIMS),
    "stock type": ("t5", config(model_type="t5"), CONFIG),
    "stock class": ("t5", config(architectures=["T5ForConditionalGeneration"]), CONFIG),
    "no auto_map": ("t5", without("auto_map"), CONFIG | CODE),
    "another file": ("gpt_neo", edit_map(AutoModelForCausalLM="evil.Model"), CONFIG | CODE),
    "one file more": ("gpt_neo", edit_map(AutoModelForVision="evil.Model"), CONFIG | CODE),
    "a tokenizer's code": ("gpt_neo", edit_map(AutoTokenizer="evil.Tokenizer"), CONFIG),
    "another count": ("mpt", config(num_key_value_heads=4), CONFIG),
    "no tokenizer class": ("mpt", without("tokenizer_class"), CONFIG),
    "no modelling file": ("mpt", lambda out, _: (out / "gqa_mpt.py").unlink(), CODE),
    "a modelling file cut short": ("mpt", lambda out, _: (out / "gqa_mpt.py").write_text("import torch\n"), CODE),
    "another file of code": (
        "mpt",
        lambda out, _: (out / "gqa_opt.py").write_text("import torch\n"),
        {"carried files"},
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(made: Conversions, tmp_path: Path, kind: str) -> None:
    case, damage, checks = DAMAGE[kind]
    name = case.removesuffix(", encoder too")
    good, source = made(name, GROUPS.get(name, 4), encoder=case != name)
    out = shutil.copytree(good, tmp_path / "out")
    damage(out, source)
    report = verify_checkpoint(out, source, logits=False)
    assert set(failed(report)) == checks
    assert all("\n" not in check.detail for check in report.checks)


@pytest.mark.parametrize(
    ("name", "tensor", "changed"),
    [
        ("gpt_neox", NEOX, swap_query_heads),
        ("t5", "encoder.block.0.layer.0.SelfAttention.v.weight", swap_groups),
    ],
)
def test_damaged_tensors_fail_the_logits_too(
    made: Conversions, tmp_path: Path, name: str, tensor: str, changed: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    good, source = made(name, GROUPS.get(name, 4))
    out = shutil.copytree(good, tmp_path / "out")
    edit(out, tensor, changed)
    assert "logits" in failed(verify_checkpoint(out, source))


EVIL = "from pathlib import Path\nPath({!r}).touch()\n"


def test_a_modelling_file_that_was_edited_never_runs(made: Conversions, tmp_path: Path, modules_cache: Path) -> None:
    good, source = made("opt", 4)
    out = shutil.copytree(good, tmp_path / "out")
    marker = tmp_path / "ran"
    file = out / "gqa_opt.py"
    code = file.read_text()
    file.write_text(code + EVIL.format(str(marker)))
    findings = failed(verify_checkpoint(out, source))
    assert set(findings) == {"modelling file", "loads"}
    assert "not executed" in findings["loads"]
    assert not marker.exists()
    with pytest.MonkeyPatch.context() as patch:  # the same code does run where it is vouched for
        patch.setattr(transformers.models.auto.configuration_auto.CONFIG_MAPPING, "_extra_content", {})
        load_model(out, torch.float32, run_code=True)
    assert marker.exists()
    copies = set(modules_cache.rglob("gqa_opt.py"))
    file.write_text(code.replace("OPT", "0PT", 1))  # one byte of a comment
    assert set(failed(verify_checkpoint(out, source))) == {"modelling file", "loads"}
    assert set(modules_cache.rglob("gqa_opt.py")) == copies


def test_no_other_code_in_the_folder_runs(made: Conversions, tmp_path: Path) -> None:
    """transformers would run a checkpoint's own generation loop too, and code that its auto_map names for a
    tokenizer.
    """
    marker = tmp_path / "ran"
    source = shutil.copytree(made("opt", 4)[1], tmp_path / "source")
    (source / "custom_generate").mkdir()
    (source / "custom_generate" / "generate.py").write_text(EVIL.format(str(marker)))
    (source / "evil.py").write_text(EVIL.format(str(marker)))
    edit_json(source / "config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None], "AutoModel": "evil.Model"})
    convert_checkpoint(source, tmp_path / "out", 4, ConversionOptions(native=False, method="mean"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]["AutoTokenizer"] == [
        "evil.Tokenizer",
        None,
    ]
    assert failed(verify_checkpoint(tmp_path / "out", source)) == {}
    assert not marker.exists()


def test_another_tokenizer_is_found(made: Conversions, tmp_path: Path) -> None:
    good, source = made("mpt", 4)
    out = shutil.copytree(good, tmp_path / "out")
    path = out / "tokenizer.json"
    path.write_text(path.read_text().replace('"Whitespace"', '"WhitespaceSplit"'))
    assert set(failed(verify_checkpoint(out, source))) == {"carried files", "tokenizer"}
    path.unlink()
    assert check_tokenizer(source, path.parent.parent) == "SOURCE has none"


def test_the_tokenizer_of_a_whisper_is_found_by_its_class(tmp_path: Path) -> None:
    """SOURCE names none, so that transformers chooses by the model type, which is another in OUT."""
    source, out = make_source("whisper", tmp_path / "source"), tmp_path / "out"
    save_byte_pairs(source)
    convert_checkpoint(source, out, 3, ConversionOptions(method="mean"))
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    assert details(report)["tokenizer"].startswith("WhisperTokenizer")
    edit_json(out / "config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert set(failed(verify_checkpoint(out, source))) == {"config", "tokenizer"}
    edit_json(out / "config.json", tokenizer_class="WhisperTokenizer", model_type="whisper")
    assert set(failed(verify_checkpoint(out, source))) == {"config"}


def test_results_load_through_the_packages_own_copy(made: Conversions, tmp_path: Path) -> None:
    """Outside verification, code in a checkpoint never runs, but results load without it."""
    out = shutil.copytree(made("gpt_neox", 4)[0], tmp_path / "out")
    (out / "gqa_gpt_neox.py").write_text("raise AssertionError('this must never run')\n")
    model, missing = load_model(out, torch.float32)
    assert missing == []
    assert type(model).__module__ == "gqa_convert.families.modeling.gqa_gpt_neox"
    model, missing = load_model(made("bart", 4)[0], torch.float32)
    assert missing == []
    assert type(model).__name__ == "GQABartForConditionalGeneration"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["GQABartForCausalLM"], "model_type": "gqa_bart"}, "AutoModelForCausalLM"),
        ({"architectures": ["BartModel"], "model_type": "bart", "is_encoder_decoder": True}, "AutoModelForSeq2SeqLM"),
        ({"architectures": ["BartModel"], "model_type": "bart", "is_encoder_decoder": False}, "AutoModelForCausalLM"),
        ({"architectures": ["BartModel"], "model_type": "bart"}, "AutoModelForSeq2SeqLM"),
        ({"model_type": "t5"}, "AutoModelForSeq2SeqLM"),
        ({"model_type": "gqa_whisper"}, "AutoModelForSpeechSeq2Seq"),
        ({"model_type": "gpt2"}, "AutoModelForCausalLM"),
        ({"architectures": ["GQAMarianMTModel"], "model_type": "gqa_marian"}, "AutoModelForSeq2SeqLM"),
        (
            {"architectures": ["GQAWhisperModel"], "model_type": "gqa_whisper", "is_encoder_decoder": True},
            "AutoModelForSpeechSeq2Seq",
        ),
        ({"architectures": None, "model_type": "llama"}, "AutoModelForCausalLM"),
        ({}, "AutoModelForCausalLM"),
    ],
)
def test_the_auto_class_of_a_checkpoint(config: dict[str, Any], expected: str) -> None:
    assert auto_class(config) == expected


def test_an_encoder_with_as_many_heads_as_groups(tmp_path: Path) -> None:
    """Whether it was converted is the same to its tensors; config and provenance must agree on it."""
    source = make_source("bart", tmp_path / "source", encoder_attention_heads=4)
    for encoder in (False, True):
        out = tmp_path / f"out-{encoder}"
        convert_checkpoint(source, out, 4, ConversionOptions(encoder=encoder, method="mean"))
        assert failed(verify_checkpoint(out, source, logits=encoder)) == {}
        claim(out, encoder=not encoder)
        assert set(failed(verify_checkpoint(out, source, logits=False))) == {"config"}


def test_old_configs_name_their_heads_otherwise(tmp_path: Path) -> None:
    source = make_source("gpt2", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["num_attention_heads"] = config.pop("n_head")
    (source / "config.json").write_text(json.dumps(config))
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(native=False, method="mean"))
    assert failed(verify_checkpoint(tmp_path / "out", source)) == {}


def test_whisper_without_its_encoder(tmp_path: Path) -> None:
    """Distilled Whisper's decoder alone reads an encoder's states given to it in another way."""
    whole = make_source("whisper", tmp_path / "whole")
    transformers.WhisperForCausalLM.from_pretrained(whole).save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "out", 3, ConversionOptions(method="mean"))
    report = verify_checkpoint(tmp_path / "out", tmp_path / "source")
    assert failed(report) == {}
    assert "cross-attention" in details(report)["cache heads"]


def test_half_precision(made: Conversions, monkeypatch: pytest.MonkeyPatch) -> None:
    """As models of more than three billion parameters run."""
    monkeypatch.setattr(models, "FLOAT32_LIMIT", 0)
    for name in HALF:
        report = verify_checkpoint(*made(name, 3))
        assert failed(report) == {}
        assert "in bfloat16" in details(report)["loads"]
