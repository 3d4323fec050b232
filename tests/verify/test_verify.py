"""The verifier passes good conversions and fails every damaged one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import CorruptCheckpointError, SourceNotFoundError, UnsupportedFamilyError
from gqa_convert.verify import verify_checkpoint
from tests.helpers.verification import (
    Conversions,
    Damage,
    change,
    claim,
    claims,
    config,
    edit,
    edit_json,
    failed,
    flip,
    remove,
)
from tests.helpers.verify_sources import NATIVE


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Conversions:
    return Conversions(tmp_path_factory.mktemp("verify"), lambda name, folder: NATIVE[name](folder))


@pytest.mark.parametrize(
    ("name", "groups", "method"),
    [
        ("llama", 3, "mean"),
        ("llama", 4, "first"),
        ("llama_one_file", 1, "mean"),
        ("llama_gqa", 2, "first"),
        ("llama_gqa", 4, "mean"),
        ("llama_gqa", 12, "mean"),
        ("qwen2", 4, "mean"),
        ("qwen2", 3, "first"),
        ("phi3", 4, "mean"),
        ("phi3", 3, "first"),
        ("olmo2", 4, "mean"),
        ("olmo2", 3, "first"),
        ("cohere", 3, "mean"),
        ("stablelm", 4, "mean"),
        ("stablelm", 3, "first"),
    ],
)
def test_good_conversions_pass(made: Conversions, name: str, groups: int, method: str) -> None:
    out, source = made(name, groups, method)
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    assert report.passed
    names = {check.name for check in report.checks}
    assert {
        "files",
        "merged tensors",
        "untouched tensors",
        "config",
        "logits",
        "cached decoding",
        "cache heads",
    } <= names
    assert json.loads(json.dumps(report.summary()))["passed"] is True


def test_other_weight_formats(made: Conversions, tmp_path: Path) -> None:
    """`pytorch_model.bin` sources and results cut into other shards."""
    _, source = made("llama", 3)
    old = shutil.copytree(source, tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors*"))
    state = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    torch.save(state, old / "pytorch_model.bin")
    convert_checkpoint(old, tmp_path / "out", 4, ConversionOptions(method="mean", max_shard_size=50_000))
    assert failed(verify_checkpoint(tmp_path / "out", old, logits=False)) == {}
    edit(tmp_path / "out", "model.layers.1.self_attn.v_proj.weight", flip(0))
    assert set(failed(verify_checkpoint(tmp_path / "out", old, logits=False))) == {"merged tensors"}


def test_progress_goes_to_the_end(made: Conversions) -> None:
    stages: list[tuple[str, int, int]] = []
    verify_checkpoint(*made("llama", 3), progress=lambda *step: stages.append(step))
    for stage in ("tensors", "logits"):
        steps = [(done, of) for name, done, of in stages if name == stage]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


ATTENTION = "model.layers.1.self_attn"
FLIPS = [
    ("llama", "model.embed_tokens.weight", 5, "untouched tensors"),
    ("llama", f"{ATTENTION}.q_proj.weight", 70, "untouched tensors"),
    ("llama", f"{ATTENTION}.k_proj.weight", 8, "merged tensors"),
    ("llama", f"{ATTENTION}.v_proj.weight", -1, "merged tensors"),
    ("llama", f"{ATTENTION}.o_proj.weight", 0, "untouched tensors"),
    ("llama", "model.layers.0.mlp.down_proj.weight", 3, "untouched tensors"),
    ("llama", "model.norm.weight", 95, "untouched tensors"),
    ("llama", "model.layers.0.input_layernorm.weight", 0, "untouched tensors"),
    ("llama", "lm_head.weight", -1, "untouched tensors"),
    ("qwen2", f"{ATTENTION}.q_proj.bias", 4, "untouched tensors"),
    ("qwen2", f"{ATTENTION}.k_proj.bias", 4, "merged tensors"),
    ("qwen2", f"{ATTENTION}.v_proj.bias", 0, "merged tensors"),
    ("qwen2", f"{ATTENTION}.k_proj.weight", 11, "merged tensors"),
    ("olmo2", f"{ATTENTION}.k_norm.weight", 9, "merged tensors"),
    ("olmo2", f"{ATTENTION}.q_norm.weight", 9, "untouched tensors"),
    ("cohere", f"{ATTENTION}.k_norm.weight", 2, "merged tensors"),
    ("stablelm", f"{ATTENTION}.k_layernorm.norms.1.weight", 0, "merged tensors"),
    ("stablelm", f"{ATTENTION}.q_layernorm.norms.11.weight", 0, "untouched tensors"),
    ("phi3", f"{ATTENTION}.qkv_proj.weight", 95, "merged tensors"),  # the last query row
    ("phi3", f"{ATTENTION}.qkv_proj.weight", 96, "merged tensors"),  # the first key row
    ("phi3", f"{ATTENTION}.qkv_proj.weight", -1, "merged tensors"),  # the last value row
]


@pytest.mark.parametrize(("name", "tensor", "row", "check"), FLIPS)
def test_one_flipped_bit_fails(made: Conversions, tmp_path: Path, name: str, tensor: str, row: int, check: str) -> None:
    """`first` copies heads, which is checked by the code for heads that no group shares."""
    method = "first" if name in ("qwen2", "cohere") else "mean"
    good, source = made(name, 3, method)
    out = shutil.copytree(good, tmp_path / "out")
    edit(out, tensor, flip(row))
    report = verify_checkpoint(out, source, logits=False)
    assert set(failed(report)) == {check}
    assert tensor in failed(report)[check]


def swap_heads(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[8:16], tensor[:8], tensor[16:]])


KEY = f"{ATTENTION}.k_proj.weight"


def strided(out: Path, source: Path) -> None:
    """Group heads 0, 3, 6, 9 where 0, 1, 2, 3 belong, in every layer."""
    for name in ("k_proj", "v_proj"):
        for layer in (0, 1):
            tensor = f"model.layers.{layer}.self_attn.{name}.weight"
            original = next(
                load_file(file)[tensor] for file in source.glob("*.safetensors") if tensor in load_file(file)
            )
            heads = original.float().reshape(4, 3, 8, 96).mean(0).reshape(24, 96)
            edit(out, tensor, lambda _, heads=heads: heads.to(torch.bfloat16))


def five_heads(out: Path, _: Path) -> None:
    """As many in every layer, and no divisor of twelve."""
    for layer in (0, 1):
        for name in ("k_proj", "v_proj"):
            edit(out, f"model.layers.{layer}.self_attn.{name}.weight", lambda tensor: torch.cat([tensor, tensor[:16]]))


def index(**totals: Any) -> Damage:
    def damage(out: Path, _: Path) -> None:
        path = out / "model.safetensors.index.json"
        stated = json.loads(path.read_text())
        stated["metadata"] |= totals
        path.write_text(json.dumps(stated))

    return damage


def truncate(out: Path) -> None:
    file = sorted(out.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-4])


def extra_tensor(out: Path, _: Path) -> None:
    file = sorted(out.glob("*.safetensors"))[0]
    save_file(load_file(file) | {"model.more.weight": torch.ones(2)}, file, metadata={"format": "pt"})


def misplace(out: Path, _: Path) -> None:
    path = out / "model.safetensors.index.json"
    stated = json.loads(path.read_text())
    files = sorted(set(stated["weight_map"].values()))
    stated["weight_map"][KEY] = files[0] if stated["weight_map"][KEY] != files[0] else files[1]
    path.write_text(json.dumps(stated))


def stale(name: str) -> Damage:
    def damage(out: Path, _: Path) -> None:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(b"x")

    return damage


def shard(number: int, change: Callable[[Path], object]) -> Damage:
    return lambda out, _: change(sorted(out.glob("*.safetensors"))[number])


NORM, VALUE = "model.norm.weight", "model.layers.0.self_attn.v_proj.weight"
NESTED = {"rope_type": "default"}
BYTES = {"before": 1, "after": 1}
DAMAGE: dict[str, tuple[Damage, str]] = {
    "swapped heads": (change(KEY, swap_heads), "merged tensors"),
    "strided groups": (strided, "merged tensors"),
    "five heads": (five_heads, "heads"),
    "missing tensor": (remove(NORM), "files"),
    "missing key": (remove(KEY), "files"),
    "missing value": (remove(VALUE), "files"),
    "extra tensor": (extra_tensor, "files"),
    "one layer with all heads": (change(KEY, lambda t: t.repeat_interleave(4, dim=0)), "merged tensors"),
    "negative zero": (change(NORM, lambda t: t * -0.0), "untouched tensors"),
    "other type": (change(NORM, lambda t: t.float()), "untouched tensors"),
    "other type of a key": (change(KEY, lambda t: t.float()), "merged tensors"),
    "other shape": (change(NORM, lambda t: t.reshape(2, -1)), "untouched tensors"),
    "not finite": (change(KEY, lambda t: t * torch.nan), "merged tensors"),
    "stale weights": (stale("model.safetensors"), "files"),
    "stale bin": (stale("pytorch_model.bin"), "files"),
    "stale weights in a folder": (stale("onnx/model.onnx"), "files"),
    "leftover": (stale(".share-probe"), "files"),
    "truncated shard": (lambda out, _: truncate(out), "files"),
    "empty shard": (shard(0, lambda file: file.write_bytes(b"")), "files"),
    "missing shard": (shard(2, Path.unlink), "files"),
    "no weights": (lambda out, _: [file.unlink() for file in out.glob("*.safetensors*")], "files"),
    "index names another file": (misplace, "files"),
    "index is no JSON": (lambda out, _: (out / "model.safetensors.index.json").write_text("{"), "files"),
    "wrong total": (index(total_size=12), "index"),
    "wrong parameters": (index(total_parameters=12), "index"),
    "wrong count": (config(num_key_value_heads=4), "config"),
    "source's count": (config(num_key_value_heads=12), "config"),
    "wrong group number": (config(multi_query_group_num=12), "config"),
    "not multi-query": (config(multi_query_attention=1), "config"),
    "changed theta": (config(rope_parameters=NESTED), "config"),
    "added theta": (config(rope_theta=1e6), "config"),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), "config"),
    "no config": (lambda out, _: (out / "config.json").unlink(), "config"),
    "config is a list": (lambda out, _: (out / "config.json").write_text("[]"), "config"),
    "changed tokenizer": (lambda out, _: edit_json(out / "tokenizer.json", version="2"), "carried files"),
    "missing template": (lambda out, _: (out / "chat_template.jinja").unlink(), "carried files"),
    "new code": (stale("modeling.py"), "carried files"),
    "claims other groups": (claims(groups=4), "provenance"),
    "claims other heads": (claims(source_kv_heads=6), "provenance"),
    "claims another type": (claims(model_type="mistral"), "provenance"),
    "claims other bytes": (claims(kv_bytes_per_token=BYTES), "provenance"),
    "claims no error": (claims(merge_error={}), "provenance"),
    "claims small errors": (
        lambda out, _: claim(out, merge_error=dict.fromkeys(errors_of(out), 0.01)),
        "provenance",
    ),
    "claims to be trained": (claims(uptraining_tokens=9), "provenance"),
    "claims another method": (claims(method="first"), "merged tensors"),
    "claims an unknown method": (claims(method="magic"), "merged tensors"),
    "claims no hashes": (lambda out, _: drop_result(out), "hashes"),
    "claims nothing": (lambda out, _: (out / "gqa_conversion.json").unlink(), "provenance"),
}


def drop_result(out: Path) -> None:
    record = json.loads((out / "gqa_conversion.json").read_text())
    del record["result"]
    (out / "gqa_conversion.json").write_text(json.dumps(record))


def errors_of(out: Path) -> list[str]:
    return list(json.loads((out / "gqa_conversion.json").read_text())["merge_error"])


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_fails(made: Conversions, tmp_path: Path, kind: str) -> None:
    good, source = made("llama", 3)
    out = shutil.copytree(good, tmp_path / "out")
    damage, check = DAMAGE[kind]
    damage(out, source)
    report = verify_checkpoint(out, source, logits=False)
    assert check in failed(report)
    assert not report.passed
    assert all("\n" not in check.detail for check in report.checks)


def test_another_source_fails(made: Conversions, tmp_path: Path) -> None:
    out, source = made("llama", 3)
    other = shutil.copytree(source, tmp_path / "other")
    edit(other, "model.layers.0.self_attn.v_proj.weight", lambda t: t + 0.5)
    assert set(failed(verify_checkpoint(out, other, logits=False))) == {"merged tensors"}
    assert not verify_checkpoint(out, made("llama_gqa", 2, "first")[1], logits=False).passed
    assert not verify_checkpoint(out, made("phi3", 4)[1], logits=False).passed


def test_the_source_itself_fails_as_its_own_conversion(made: Conversions) -> None:
    _, source = made("llama", 3)
    assert set(failed(verify_checkpoint(source, source, logits=False))) == {"config", "provenance"}


def test_a_strided_repeat_in_the_model_fails_the_logits(made: Conversions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good tensors, but the software that runs them serves other query heads."""
    out, source = made("llama", 3)
    module = transformers.integrations.sdpa_attention
    monkeypatch.setattr(module, "use_gqa_in_sdpa", lambda *_: False)
    monkeypatch.setattr(module, "repeat_kv", lambda states, n: states.repeat(1, n, 1, 1))
    findings = set(failed(verify_checkpoint(out, source)))
    assert "logits" in findings
    assert findings <= {"logits", "cached decoding"}  # steps of one token take another path, which is not patched


def test_damaged_tensors_fail_the_logits_too(made: Conversions, tmp_path: Path) -> None:
    good, source = made("phi3", 4)
    out = shutil.copytree(good, tmp_path / "out")
    edit(out, "model.layers.0.mlp.down_proj.weight", lambda t: t * 1.05)
    assert {"untouched tensors", "logits", "cached decoding"} == set(failed(verify_checkpoint(out, source)))
    edit(out, f"{ATTENTION}.qkv_proj.weight", lambda t: torch.cat([t[:96], t[104:112], t[96:104], t[112:]]))
    assert {"merged tensors", "logits"} <= set(failed(verify_checkpoint(out, source)))


def test_what_transformers_cannot_load_fails(made: Conversions, tmp_path: Path) -> None:
    good, source = made("llama", 3)
    out = shutil.copytree(good, tmp_path / "out")
    edit_json(out / "config.json", num_key_value_heads=4)
    assert set(failed(verify_checkpoint(out, source))) == {"config", "loads"}
    edit_json(out / "config.json", model_type="no such model")
    assert {"config", "loads"} <= set(failed(verify_checkpoint(out, source)))


def test_missing_norms_of_heads_fail_to_load(made: Conversions, tmp_path: Path) -> None:
    good, source = made("stablelm", 4)
    out = shutil.copytree(good, tmp_path / "out")
    name = f"{ATTENTION}.k_layernorm.norms.2.weight"
    edit(out, name, lambda _: None)
    stated = json.loads((out / "model.safetensors.index.json").read_text())
    del stated["weight_map"][name]
    (out / "model.safetensors.index.json").write_text(json.dumps(stated))
    assert {"tensor names", "merged tensors", "loads"} <= set(failed(verify_checkpoint(out, source)))


def test_a_wrong_cache_fails_cached_decoding(made: Conversions, monkeypatch: pytest.MonkeyPatch) -> None:
    out, source = made("llama", 3)
    update = transformers.cache_utils.DynamicLayer.update

    def forgetful(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any) -> Any:
        return update(
            self, keys, values * 1.1 if keys.shape[2] == 1 and keys.shape[1] == 3 else values, *args, **options
        )

    monkeypatch.setattr(transformers.cache_utils.DynamicLayer, "update", forgetful)
    assert set(failed(verify_checkpoint(out, source))) == {"cached decoding"}


def test_a_cache_of_all_heads_fails(made: Conversions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention computes the same if K/V heads are repeated before they are kept, and no memory is saved."""
    out, source = made("llama", 3)
    update = transformers.cache_utils.DynamicLayer.update

    def wasteful(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any) -> Any:
        if keys.shape[1] != 3:
            return update(self, keys, values, *args, **options)
        kept = update(self, *(states.repeat_interleave(4, 1) for states in (keys, values)), *args, **options)
        return tuple(states[:, ::4] for states in kept)

    monkeypatch.setattr(transformers.cache_utils.DynamicLayer, "update", wasteful)
    assert set(failed(verify_checkpoint(out, source))) == {"cache heads"}


def test_mistakes_of_the_user_are_errors(made: Conversions, tmp_path: Path) -> None:
    out, source = made("llama", 3)
    with pytest.raises(SourceNotFoundError, match="not a folder"):
        verify_checkpoint(tmp_path / "nothing", source)
    with pytest.raises(SourceNotFoundError):
        verify_checkpoint(out, tmp_path)
    with pytest.raises(SourceNotFoundError, match="revision"):
        verify_checkpoint(out, source, revision="main")
    damaged = shutil.copytree(source, tmp_path / "damaged")
    truncate(damaged)
    with pytest.raises(CorruptCheckpointError):
        verify_checkpoint(out, damaged, logits=False)
    other = shutil.copytree(source, tmp_path / "other")
    edit_json(other / "config.json", model_type="deepseek_v3")
    with pytest.raises(UnsupportedFamilyError):
        verify_checkpoint(out, other, logits=False)
