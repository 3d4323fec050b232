"""The verifier passes good conversions of every kind, and what their models compute, cache and load
is looked at.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.rewriting import arrays
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import (
    ConfigError,
    CorruptCheckpointError,
    SourceNotFoundError,
    UnsupportedFamilyError,
)
from gqa_convert.families.loading import auto_class, load_model
from gqa_convert.verify import models, verify_checkpoint
from tests.helpers.chatglm import write_source as write_chatglm
from tests.helpers.own_files import CASES, make_source, make_source_model
from tests.helpers.tiny import make_config, make_model
from tests.helpers.verification import (
    Made,
    claim,
    details,
    edit,
    edit_json,
    failed,
    flip,
    save_byte_pairs,
)
from tests.helpers.verify_sources import SOURCES

MEAN = ConversionOptions(method="mean")
OWN_COUNT = ("t5", "bart", "gpt2", "gpt_neo")
"""Sources at whose own count of twelve stock classes load the result."""

FAST = {
    "llama",
    "phi3",
    "stablelm",
    "neox",
    "gpt2 as gpt_bigcode",
    "t5",
    "gpt2, cross",
    "falcon, 40B",
    "qwen2",
}


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        pytest.param(name, stated, marks=[] if name in FAST else [pytest.mark.slow])
        for name, source in SOURCES.items()
        for stated in source.good
    ],
)
def test_good_conversions_pass(made: Made, name: str, stated: str) -> None:
    count, method = stated.split()
    groups = int(count)
    out, source = made(name, groups, method)
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    assert report.passed
    assert json.loads(json.dumps(report.summary()))["passed"] is True
    found, kind = details(report), SOURCES[name]
    assert f"{groups} heads in each" in found["cache heads"]
    is_copy = groups == 12 and name in OWN_COUNT
    repeated = groups >= kind.changes.get(
        "num_key_value_heads", kind.changes.get("num_kv_heads", 12)
    )
    repeated |= name == "falcon, 7B"
    assert (" 0 parameters of SOURCE replaced" in found["logits"]) == repeated
    assert ("cross-attention" in found["cache heads"]) == name.startswith(
        ("t5", "switch", "bart", "whisper", "gpt2, c")
    )
    assert ("module outputs" in found) == (method in ("factor", "fit"))
    if kind.native:
        assert found["rewritten source"].endswith(f"against SOURCE, a {kind.model_type}")
    assert bool([*out.glob("gqa_*.py")]) == (kind.native is False and not is_copy)
    assert not is_copy or "num_key_value_heads" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_factor_with_a_text(made: Made, name: str) -> None:
    """Heads that absorb lie in their spans; keys of OLMo-2, which may not, are rounded means."""
    text = CalibrationOptions(
        source=made(name, 4)[1].parent / "text.txt", tokens=1000, sequence_length=30
    )
    out, source = made(name, 3, "factor", calibration=text)
    report = verify_checkpoint(out, source, logits=False)
    assert failed(report) == {}
    assert "spans" in details(report)


def test_half_precision(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """As models of more than three billion parameters run."""
    monkeypatch.setattr(models, "FLOAT32_LIMIT", 0)
    for name, groups, dtype in (("t5", 3, "bfloat16"), ("neox, tied", 3, "float16")):
        report = verify_checkpoint(*made(name, groups))
        assert failed(report) == {}
        assert dtype in details(report)["loads"]


def test_other_weight_formats(made: Made, tmp_path: Path) -> None:
    """`pytorch_model.bin` sources and results cut into other shards; Pythia's config knows no
    rope_parameters.
    """
    _, source = made("neox, half", 3)
    old = shutil.copytree(source, tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors*"))
    state = {
        name: tensor
        for file in source.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    torch.save(
        state | {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(1)},
        old / "pytorch_model.bin",
    )
    stated = json.loads((old / "config.json").read_text())
    del stated["rope_parameters"], stated["dtype"]
    stated |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "torch_dtype": "bfloat16"}
    (old / "config.json").write_text(json.dumps(stated))
    out = tmp_path / "out"
    convert_checkpoint(old, out, 4, MEAN)
    weights = out / "model.safetensors"
    state = load_file(weights)
    weights.unlink()
    save_torch_state_dict(state, out, max_shard_size=40_000)
    assert failed(verify_checkpoint(out, old)) == {}
    edit(out, "model.layers.1.self_attn.v_proj.weight", flip(0))
    assert set(failed(verify_checkpoint(out, old, logits=False))) == {"merged tensors"}
    edit_json(out / "config.json", torch_dtype="float32")
    assert set(failed(verify_checkpoint(out, old, logits=False))) == {"merged tensors", "config"}


def test_progress_goes_to_the_end(made: Made) -> None:
    stages: list[tuple[str, int, int]] = []
    verify_checkpoint(*made("llama", 3), progress=lambda *step: stages.append(step))
    for stage in ("tensors", "logits"):
        steps = [(done, of) for name, done, of in stages if name == stage]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


def test_another_source_is_refused(made: Made, tmp_path: Path) -> None:
    good, source = made("llama", 3)
    other = shutil.copytree(source, tmp_path / "other")
    edit(other, "model.layers.0.self_attn.v_proj.weight", lambda t: t + 0.5)
    for another in (other, made("llama, 4 heads", 4)[1], made("phi3", 4)[1]):
        with pytest.raises(
            SourceNotFoundError, match=f"was made from {source}, not from {another}"
        ):
            verify_checkpoint(good, another, logits=False)
    out = shutil.copytree(good, tmp_path / "out")  # the record of which does not tell
    (out / "gqa_conversion.json").unlink()
    assert "merged tensors" in failed(verify_checkpoint(out, other, logits=False))
    assert set(failed(verify_checkpoint(source, source, logits=False))) == {"config", "provenance"}


def test_the_source_that_the_record_names(made: Made, tmp_path: Path) -> None:
    good, source = made("llama", 3)
    report = verify_checkpoint(good, logits=False)
    assert report.passed
    assert report.source == str(source)
    out = shutil.copytree(good, tmp_path / "out")
    stated = json.loads((out / "gqa_conversion.json").read_text())["source"]
    claim(out, source=stated | {"id": "org/elsewhere"})
    with pytest.raises(
        SourceNotFoundError, match=r"org/elsewhere, which is not here: name .* --source"
    ):
        verify_checkpoint(out, logits=False)
    assert verify_checkpoint(out, source, logits=False).passed
    (out / "gqa_conversion.json").write_text("[]")
    with pytest.raises(SourceNotFoundError, match="names no source"):
        verify_checkpoint(out, logits=False)


@pytest.mark.parametrize("files", [(), ("data.txt",), ("config.json",), ("model.safetensors",)])
def test_what_is_no_checkpoint_is_an_error(
    made: Made, tmp_path: Path, files: tuple[str, ...]
) -> None:
    for name in files:
        (tmp_path / name).write_text('{"model_type": "llama"}')
    with pytest.raises(SourceNotFoundError, match="holds no checkpoint"):
        verify_checkpoint(tmp_path, made("llama", 3)[1])


def test_mistakes_of_the_user_are_errors(made: Made, tmp_path: Path) -> None:
    out, source = made("llama", 3)
    with pytest.raises(SourceNotFoundError, match="not a folder"):
        verify_checkpoint(tmp_path / "nothing", source)
    with pytest.raises(SourceNotFoundError):
        verify_checkpoint(out, tmp_path)
    with pytest.raises(SourceNotFoundError, match="revision"):
        verify_checkpoint(out, source, revision="main")
    damaged = shutil.copytree(source, tmp_path / "damaged")
    shard = sorted(damaged.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(CorruptCheckpointError):
        verify_checkpoint(out, damaged, logits=False)
    other = shutil.copytree(source, tmp_path / "other")
    edit_json(other / "config.json", model_type="deepseek_v3")
    out = shutil.copytree(out, tmp_path / "out")
    (out / "gqa_conversion.json").unlink()
    with pytest.raises(UnsupportedFamilyError):
        verify_checkpoint(out, other, logits=False)


# What models compute and keep
# --------------------------------------------------------------------------------------------------


def test_a_strided_repeat_in_the_model_fails_the_logits(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good tensors, but the software that runs them serves other query heads."""
    module = transformers.integrations.sdpa_attention
    monkeypatch.setattr(module, "use_gqa_in_sdpa", lambda *_: False)
    monkeypatch.setattr(module, "repeat_kv", lambda states, n: states.repeat(1, n, 1, 1))
    findings = set(failed(verify_checkpoint(*made("llama", 3))))
    assert "logits" in findings
    assert findings <= {
        "logits",
        "cached decoding",
    }  # steps of one token take another path, which is not patched


def test_eager_attention_is_run_too(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default attention function has a repetition of its own."""
    module = transformers.models.llama.modeling_llama
    monkeypatch.setattr(module, "repeat_kv", lambda states, n: states.repeat(1, n, 1, 1))
    assert set(failed(verify_checkpoint(*made("llama", 3)))) == {"eager attention"}
    monkeypatch.setattr(
        module, "repeat_kv", lambda states, n: states[:, :1] if n > 1 else states[:, :, :, :, None]
    )
    assert "not compared" in details(verify_checkpoint(*made("llama", 3)))["eager attention"]


def test_terms_and_metadata_stay(tmp_path: Path) -> None:
    for shards in ("5GB", "40kB"):
        source, good = tmp_path / f"source-{shards}", tmp_path / f"good-{shards}"
        make_model(make_config("llama")).save_pretrained(source, max_shard_size=shards)
        for file in source.glob("*.safetensors"):
            save_file(load_file(file), file, metadata={"format": "pt", "author": "somebody"})
        for name in ("LICENSE", "LICENSE.md", "NOTICE.txt", "README.md"):
            (source / name).write_text("terms")
        convert_checkpoint(source, good, 3, MEAN)
        (good / "README.md").write_text("a card")
        (good / "NOTICE").write_text("a user's own")
        assert failed(verify_checkpoint(good, source, logits=False)) == {}
        for name in ("LICENSE", "LICENSE.md", "NOTICE.txt"):
            out = shutil.copytree(good, tmp_path / f"of-{good.name}", dirs_exist_ok=True)
            (out / name).write_text("other terms")
            assert set(failed(verify_checkpoint(out, source, logits=False))) == {"copied files"}
            (out / name).unlink()
            assert set(failed(verify_checkpoint(out, source, logits=False))) == {"copied files"}
        for ours in good.glob("*.safetensors"):
            save_file(load_file(ours), ours, metadata={"format": "pt"})
        assert set(failed(verify_checkpoint(good, source, logits=False))) == {"tensor headers"}


def test_what_transformers_cannot_load_fails(made: Made, tmp_path: Path) -> None:
    good, source = made("llama", 3)
    out = shutil.copytree(good, tmp_path / "out")
    edit_json(out / "config.json", num_key_value_heads=4)
    assert set(failed(verify_checkpoint(out, source))) == {"config", "loads"}
    edit_json(out / "config.json", model_type="no such model")
    assert {"config", "loads"} <= set(failed(verify_checkpoint(out, source)))


@pytest.mark.parametrize(
    ("kind", "check"), [("forgetful", "cached decoding"), ("wasteful", "cache heads")]
)
def test_what_is_wrong_with_a_cache_is_found(
    made: Made, kind: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values change in it; or K/V heads are repeated before they are kept, which computes the same
    and saves nothing.
    """
    out, source = made("llama", 3)
    update = transformers.cache_utils.DynamicLayer.update

    def changed(
        self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        if keys.shape[1] != 3:
            return update(self, keys, values, *args, **options)
        if kind == "forgetful":
            return update(
                self, keys, values * 1.1 if keys.shape[2] == 1 else values, *args, **options
            )
        kept = update(
            self, *(states.repeat_interleave(4, 1) for states in (keys, values)), *args, **options
        )
        return tuple(states[:, ::4] for states in kept)

    monkeypatch.setattr(transformers.cache_utils.DynamicLayer, "update", changed)
    assert set(failed(verify_checkpoint(out, source))) == {check}


def test_a_rewriting_that_computes_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verify shares the rewriting with the converter, so only SOURCE's own class can tell."""
    monkeypatch.setattr(
        arrays, "fold_gain", lambda dtype, weight, _, rows: arrays.move(dtype, weight, rows=rows)
    )
    source = make_source("gpt_neox", tmp_path / "source")
    convert_checkpoint(source, tmp_path / "out", 3, MEAN)
    assert set(failed(verify_checkpoint(tmp_path / "out", source))) == {"rewritten source"}


# Sources of other kinds
# --------------------------------------------------------------------------------------------------


def test_a_result_converted_again(made: Made, tmp_path: Path) -> None:
    """What it is made from has a modelling file already, which the new result brings along in its
    place.
    """
    for name in ("bart", "gpt2"):
        first, _ = made(name, 4)
        for groups in (2, 4, 12):
            out = tmp_path / f"{name}-{groups}"
            convert_checkpoint(first, out, groups, ConversionOptions(native=False, method="mean"))
            assert failed(verify_checkpoint(out, first)) == {}


def test_chatglm_is_proven_by_its_data_alone(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_chatglm(source)
    convert_checkpoint(source, out, 3, MEAN)
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
    edit_json(out / "config.json", multi_query_group_num=6)
    assert set(failed(verify_checkpoint(out, source))) == {"config"}


def test_gpt2_as_it_lies_on_the_hub(tmp_path: Path) -> None:
    """No prefix, no tied head, masks that nothing reads; and a tensor that nothing is known of is
    not passed over.
    """
    source = make_source("gpt2", tmp_path / "source")
    file = source / "model.safetensors"
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, file, metadata={"format": "pt"})
    convert_checkpoint(source, tmp_path / "out", 1, MEAN)
    assert failed(verify_checkpoint(tmp_path / "out", source)) == {}
    save_file(tensors | {"h.0.attn.extra": torch.ones(1, 1, 4, 4)}, file, metadata={"format": "pt"})
    (tmp_path / "out" / "gqa_conversion.json").unlink()
    with pytest.raises(ConfigError, match=r"h\.0\.attn\.extra"):
        verify_checkpoint(tmp_path / "out", source, logits=False)


@pytest.mark.parametrize("pad", [-1, 10_000])
def test_padding_tokens_outside_the_vocabulary(tmp_path: Path, pad: int) -> None:
    source = tmp_path / "source"
    make_model(make_config("llama")).save_pretrained(source)
    edit_json(source / "config.json", pad_token_id=pad)
    convert_checkpoint(source, tmp_path / "out", 3, MEAN)
    findings = failed(verify_checkpoint(tmp_path / "out", source))
    assert findings == {} if pad < 0 else set(findings) <= {"loads"}


def test_copies_of_a_type_that_caches_repeated_heads(tmp_path: Path) -> None:
    """transformers' Falcon keeps as many keys as it has query heads, in OUT as in SOURCE."""
    source = make_source("falcon", tmp_path / "source", **CASES["falcon, 40B with 4"][1])
    convert_checkpoint(source, tmp_path / "out", 4, MEAN)
    report = verify_checkpoint(tmp_path / "out", source)
    assert failed(report) == {}
    assert "12 heads" in details(report)["cache heads"]
    edit(tmp_path / "out", "transformer.h.1.self_attention.query_key_value.weight", flip(20))
    assert set(failed(verify_checkpoint(tmp_path / "out", source, logits=False))) == {
        "untouched tensors"
    }


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
    convert_checkpoint(tmp_path / "source", tmp_path / "out", 3, MEAN)
    report = verify_checkpoint(tmp_path / "out", tmp_path / "source")
    assert failed(report) == {}
    assert "cross-attention" in details(report)["cache heads"]


# Small and large numbers
# --------------------------------------------------------------------------------------------------


def scaled(folder: Path, model_type: str, dtype: torch.dtype, scale: float) -> Path:
    """A checkpoint whose value projections are scaled."""
    model = (
        make_source_model(model_type)
        if model_type == "opt"
        else make_model(make_config(model_type))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".v_proj." in name:
                parameter.mul_(scale)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "dtype", "scale", "method"),
    [
        ("llama", torch.float16, 1e-6, "mean"),
        ("qwen2", torch.float16, 1e-6, "factor"),
        ("opt", torch.float16, 1e-6, "factor"),
        ("llama", torch.float32, 1e4, "factor"),
    ],
)
def test_values_near_the_limits_of_their_type(
    tmp_path: Path, model_type: str, dtype: torch.dtype, scale: float, method: str
) -> None:
    source = scaled(tmp_path / "source", model_type, dtype, scale)
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method=method))
    assert failed(verify_checkpoint(tmp_path / "out", source)) == {}


# Code and tokenizers
# --------------------------------------------------------------------------------------------------

EVIL = "from pathlib import Path\nPath({!r}).touch()\n"


def test_a_modelling_file_that_was_edited_never_runs(
    made: Made, tmp_path: Path, modules_cache: Path
) -> None:
    good, source = made("opt", 4)
    out = shutil.copytree(good, tmp_path / "out")
    marker, file = tmp_path / "ran", out / "gqa_opt.py"
    code = file.read_text()
    file.write_text(code + EVIL.format(str(marker)))
    findings = failed(verify_checkpoint(out, source))
    assert set(findings) == {"copied files"}
    assert "gqa_opt.py" in findings["copied files"]
    assert not marker.exists()
    assert not list(modules_cache.rglob("gqa_opt.py"))
    with pytest.MonkeyPatch.context() as patch:  # the same code does run where a user asks for it
        patch.setattr(
            transformers.models.auto.configuration_auto.CONFIG_MAPPING, "_extra_content", {}
        )
        transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert marker.exists()
    file.write_text(code.replace("OPT", "0PT", 1))  # one byte of a comment
    assert set(failed(verify_checkpoint(out, source))) == {"copied files"}


def test_no_other_code_in_the_folder_runs(made: Made, tmp_path: Path) -> None:
    """transformers would run a checkpoint's own generation loop too, and code that its auto_map
    names for a tokenizer.
    """
    marker = tmp_path / "ran"
    source = shutil.copytree(made("opt", 4)[1], tmp_path / "source")
    (source / "custom_generate").mkdir()
    for name in ("custom_generate/generate.py", "evil.py"):
        (source / name).write_text(EVIL.format(str(marker)))
    edit_json(
        source / "config.json",
        auto_map={"AutoTokenizer": ["evil.Tokenizer", None], "AutoModel": "evil.Model"},
    )
    convert_checkpoint(source, tmp_path / "out", 4, ConversionOptions(native=False, method="mean"))
    auto_map = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
    assert auto_map["AutoTokenizer"] == ["evil.Tokenizer", None]
    assert failed(verify_checkpoint(tmp_path / "out", source)) == {}
    assert not marker.exists()


def test_results_load_through_the_packages_own_copy(made: Made, tmp_path: Path) -> None:
    """Outside verification, code in a checkpoint never runs, but results load without it."""
    out = shutil.copytree(made("gpt_neox", 4)[0], tmp_path / "out")
    (out / "gqa_gpt_neox.py").write_text("raise AssertionError('this must never run')\n")
    model, missing = load_model(out, torch.float32)
    assert missing == []
    assert type(model).__module__ == "gqa_convert.families.modeling.gqa_gpt_neox"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"architectures": ["GQABartForCausalLM"], "model_type": "gqa_bart"},
            "AutoModelForCausalLM",
        ),
        (
            {"architectures": ["BartModel"], "model_type": "bart", "is_encoder_decoder": False},
            "AutoModelForCausalLM",
        ),
        ({"architectures": ["BartModel"], "model_type": "bart"}, "AutoModelForSeq2SeqLM"),
        ({"model_type": "t5"}, "AutoModelForSeq2SeqLM"),
        (
            {"architectures": ["GQAWhisperModel"], "model_type": "gqa_whisper"},
            "AutoModelForSpeechSeq2Seq",
        ),
        (
            {"architectures": ["GQAMarianMTModel"], "model_type": "gqa_marian"},
            "AutoModelForSeq2SeqLM",
        ),
        ({"architectures": None, "model_type": "llama"}, "AutoModelForCausalLM"),
        ({}, "AutoModelForCausalLM"),
    ],
)
def test_the_auto_class_of_a_checkpoint(config: dict[str, Any], expected: str) -> None:
    assert auto_class(config) == expected


def test_another_tokenizer_is_found(made: Made, tmp_path: Path) -> None:
    good, source = made("mpt", 4)
    out = shutil.copytree(good, tmp_path / "out")
    path = out / "tokenizer.json"
    path.write_text(path.read_text().replace('"WhitespaceSplit"', '"Whitespace"'))
    assert set(failed(verify_checkpoint(out, source))) == {"copied files", "tokenizer"}


def test_a_tokenizer_may_have_the_former_name_of_its_class_and_nothing_else(
    made: Made, tmp_path: Path
) -> None:
    good, source = (shutil.copytree(each, tmp_path / each.name) for each in made("llama", 3))
    edit_json(source / "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    edit_json(good / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert "copied files" not in failed(verify_checkpoint(good, source, logits=False))
    edit_json(good / "tokenizer_config.json", model_max_length=7)
    assert "copied files" in failed(verify_checkpoint(good, source, logits=False))


def test_the_tokenizer_of_a_whisper_is_found_by_its_class(tmp_path: Path) -> None:
    """SOURCE names none, so that transformers chooses by the model type, which is another in
    OUT.
    """
    source, out = make_source("whisper", tmp_path / "source"), tmp_path / "out"
    save_byte_pairs(source)
    convert_checkpoint(source, out, 3, MEAN)
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    assert details(report)["tokenizer"].startswith("WhisperTokenizer")
    edit_json(out / "config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert set(failed(verify_checkpoint(out, source))) == {"config", "tokenizer"}


@pytest.mark.parametrize(("model_type", "groups"), [("gpt_neox", 3), ("gpt2", 1)])
def test_tokenizers_of_rewritten_sources(model_type: str, groups: int, tmp_path: Path) -> None:
    """The same ids and texts, whatever class transformers has for OUT's type."""
    source, out = make_source(model_type, tmp_path / "source"), tmp_path / "out"
    for stated in ({}, {"model_max_length": 64}):
        save_byte_pairs(source, **stated)
        convert_checkpoint(source, out, groups, ConversionOptions(overwrite=True, method="mean"))
        report = verify_checkpoint(out, source)
        assert failed(report) == {}
        ours, theirs = (
            word for word in details(report)["tokenizer"].split() if "Tokenizer" in word
        )
        assert (ours != theirs) == (model_type == "gpt2")
    if model_type == "gpt2":
        (out / "tokenizer_config.json").unlink()
        assert set(failed(verify_checkpoint(out, source))) == {"copied files", "tokenizer"}
