"""The verifier passes good conversions and fails every damaged one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import CorruptCheckpointError, OptionError, SourceNotFoundError, UnsupportedFamilyError
from gqa_convert.text.scoring.text_to_score import read_file
from gqa_convert.verify import Check, verify_checkpoint
from gqa_convert.verify.behaviour.caches import Shapes, cache_shapes, judge_cache
from gqa_convert.verify.report import Failure
from tests.helpers.verification import claim, edit, edit_json, failed, flip
from tests.helpers.verify_sources import NATIVE


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """(OUT, SOURCE) of a conversion, made once; treat both as read-only."""
    root = tmp_path_factory.mktemp("verify")
    done: dict[tuple[str, int, str], Path] = {}

    def make(name: str, groups: int, method: str = "mean") -> tuple[Path, Path]:
        source = root / name
        if not source.exists():
            NATIVE[name](source)
        key = (name, groups, method)
        if key not in done:
            done[key] = root / f"{name}-{groups}-{method}"
            convert_checkpoint(source, done[key], groups, method=method)
        return done[key], source

    return make


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
def test_good_conversions_pass(made: Callable[..., tuple[Path, Path]], name: str, groups: int, method: str) -> None:
    out, source = made(name, groups, method)
    seen: list[Check] = []
    report = verify_checkpoint(out, source, on_check=seen.append)
    assert failed(report) == {}
    assert report.passed
    assert seen == report.checks
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


def test_other_weight_formats(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """`pytorch_model.bin` sources and results cut into other shards."""
    _, source = made("llama", 3)
    old = shutil.copytree(source, tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors*"))
    state = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    torch.save(state, old / "pytorch_model.bin")
    convert_checkpoint(old, tmp_path / "out", 4, method="mean", max_shard_size=50_000)
    assert failed(verify_checkpoint(tmp_path / "out", old, logits=False)) == {}
    edit(tmp_path / "out", "model.layers.1.self_attn.v_proj.weight", flip(0))
    assert set(failed(verify_checkpoint(tmp_path / "out", old, logits=False))) == {"merged tensors"}


def test_the_loss_of_both_models_is_reported(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    out, source = made("llama", 3)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 47, (150,), generator=generator).tolist()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number}" for number in ids))
    stages: list[tuple[str, int, int]] = []
    report = verify_checkpoint(out, source, text=text, progress=lambda *step: stages.append(step))
    assert report.passed
    assert report.losses is not None
    assert report.losses["tokens"] == 149
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    total = 0.0
    for start in (0, 63, 126):  # blocks of 64 that share one token
        block = torch.tensor([ids[start : start + 64]])
        total += model(block, labels=block).loss.item() * (block.shape[1] - 1)
    assert report.losses["source"] == pytest.approx(total / 149, rel=1e-5)
    assert report.losses["out"] != report.losses["source"]
    for stage in ("tensors", "logits", "text"):
        steps = [(done, of) for name, done, of in stages if name == stage]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]
    short = verify_checkpoint(out, source, text=text, max_text_tokens=20)
    assert short.losses is not None
    assert short.losses["tokens"] == 19


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


@pytest.mark.parametrize("method", ["mean", "first"])
@pytest.mark.parametrize(("name", "tensor", "row", "check"), FLIPS)
def test_one_flipped_bit_fails(
    made: Callable[..., tuple[Path, Path]], tmp_path: Path, name: str, tensor: str, row: int, check: str, method: str
) -> None:
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


def move_index(out: Path, **totals: Any) -> None:
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"] |= totals
    path.write_text(json.dumps(index))


def truncate(out: Path) -> None:
    file = sorted(out.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-4])


def extra_tensor(out: Path) -> None:
    file = sorted(out.glob("*.safetensors"))[0]
    save_file(load_file(file) | {"model.more.weight": torch.ones(2)}, file, metadata={"format": "pt"})


def misplace(out: Path) -> None:
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][KEY] = files[0] if index["weight_map"][KEY] != files[0] else files[1]
    path.write_text(json.dumps(index))


def stale(out: Path) -> None:
    save_file({"x": torch.ones(1)}, out / "model.safetensors", metadata={"format": "pt"})


DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "swapped heads": (lambda out, _: edit(out, KEY, swap_heads), "merged tensors"),
    "strided groups": (strided, "merged tensors"),
    "missing tensor": (lambda out, _: edit(out, "model.norm.weight", lambda _: None), "tensor names"),
    "missing key": (lambda out, _: edit(out, KEY, lambda _: None), "tensor names"),
    "missing value": (lambda out, _: edit(out, "model.layers.0.self_attn.v_proj.weight", lambda _: None), "heads"),
    "extra tensor": (lambda out, _: extra_tensor(out), "tensor names"),
    "one layer with all heads": (
        lambda out, _: edit(out, KEY, lambda t: t.repeat_interleave(4, dim=0)),
        "merged tensors",
    ),
    "negative zero": (lambda out, _: edit(out, "model.norm.weight", lambda t: t * -0.0), "untouched tensors"),
    "other type": (lambda out, _: edit(out, "model.norm.weight", lambda t: t.float()), "untouched tensors"),
    "other type of a key": (lambda out, _: edit(out, KEY, lambda t: t.float()), "merged tensors"),
    "other shape": (lambda out, _: edit(out, "model.norm.weight", lambda t: t.reshape(2, -1)), "untouched tensors"),
    "not finite": (lambda out, _: edit(out, KEY, lambda t: t * torch.nan), "merged tensors"),
    "stale weights": (lambda out, _: stale(out), "files"),
    "stale bin": (lambda out, _: torch.save({}, out / "pytorch_model.bin"), "files"),
    "stale weights in a folder": (
        lambda out, _: ((out / "onnx").mkdir(), (out / "onnx" / "model.onnx").write_bytes(b"x")),
        "files",
    ),
    "leftover": (lambda out, _: (out / ".gqa-convert-unfinished").touch(), "files"),
    "truncated shard": (lambda out, _: truncate(out), "files"),
    "empty shard": (lambda out, _: sorted(out.glob("*.safetensors"))[0].write_bytes(b""), "files"),
    "missing shard": (lambda out, _: sorted(out.glob("*.safetensors"))[2].unlink(), "files"),
    "no weights": (lambda out, _: [file.unlink() for file in out.glob("*.safetensors*")], "files"),
    "index names another file": (lambda out, _: misplace(out), "files"),
    "index is no JSON": (lambda out, _: (out / "model.safetensors.index.json").write_text("{"), "files"),
    "wrong total": (lambda out, _: move_index(out, total_size=12), "index"),
    "wrong parameters": (lambda out, _: move_index(out, total_parameters=12), "index"),
    "wrong count": (lambda out, _: edit_json(out / "config.json", num_key_value_heads=4), "config"),
    "source's count": (lambda out, _: edit_json(out / "config.json", num_key_value_heads=12), "config"),
    "wrong group number": (lambda out, _: edit_json(out / "config.json", multi_query_group_num=12), "config"),
    "not multi-query": (lambda out, _: edit_json(out / "config.json", multi_query_attention=1), "config"),
    "changed theta": (
        lambda out, _: edit_json(out / "config.json", rope_parameters={"rope_type": "default"}),
        "config",
    ),
    "added theta": (lambda out, _: edit_json(out / "config.json", rope_theta=1e6), "config"),
    "quantised": (lambda out, _: edit_json(out / "config.json", quantization_config={"quant_method": "fp8"}), "config"),
    "no config": (lambda out, _: (out / "config.json").unlink(), "config"),
    "config is a list": (lambda out, _: (out / "config.json").write_text("[]"), "config"),
    "changed tokenizer": (lambda out, _: edit_json(out / "tokenizer.json", version="2"), "carried files"),
    "missing template": (lambda out, _: (out / "chat_template.jinja").unlink(), "carried files"),
    "new code": (lambda out, _: (out / "modeling.py").write_text("boo"), "carried files"),
    "claims other groups": (lambda out, _: claim(out, groups=4), "provenance"),
    "claims other heads": (lambda out, _: claim(out, source_kv_heads=6), "provenance"),
    "claims another type": (lambda out, _: claim(out, model_type="mistral"), "provenance"),
    "claims other bytes": (lambda out, _: claim(out, kv_bytes_per_token={"before": 1, "after": 1}), "provenance"),
    "claims no error": (lambda out, _: claim(out, merge_error={}), "provenance"),
    "claims small errors": (lambda out, _: claim(out, merge_error=dict.fromkeys(errors_of(out), 0.01)), "provenance"),
    "claims to be trained": (lambda out, _: claim(out, uptraining_tokens=9), "provenance"),
    "claims another method": (lambda out, _: claim(out, method="first"), "merged tensors"),
    "claims an unknown method": (lambda out, _: claim(out, method="magic"), "merged tensors"),
    "claims nothing": (lambda out, _: (out / "gqa_conversion.json").unlink(), "provenance"),
}


def errors_of(out: Path) -> list[str]:
    return list(json.loads((out / "gqa_conversion.json").read_text())["merge_error"])


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_fails(made: Callable[..., tuple[Path, Path]], tmp_path: Path, kind: str) -> None:
    good, source = made("llama", 3)
    out = shutil.copytree(good, tmp_path / "out")
    damage, check = DAMAGE[kind]
    damage(out, source)
    report = verify_checkpoint(out, source, logits=False)
    assert check in failed(report)
    assert not report.passed
    assert all("\n" not in check.detail for check in report.checks)


def test_another_source_fails(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    out, source = made("llama", 3)
    other = shutil.copytree(source, tmp_path / "other")
    edit(other, "model.layers.0.self_attn.v_proj.weight", lambda t: t + 0.5)
    assert set(failed(verify_checkpoint(out, other, logits=False))) == {"merged tensors"}
    assert not verify_checkpoint(out, made("llama_gqa", 2, "first")[1], logits=False).passed
    assert not verify_checkpoint(out, made("phi3", 4)[1], logits=False).passed


def test_the_source_itself_fails_as_its_own_conversion(made: Callable[..., tuple[Path, Path]]) -> None:
    _, source = made("llama", 3)
    assert set(failed(verify_checkpoint(source, source, logits=False))) == {"config", "provenance"}


def test_a_strided_repeat_in_the_model_fails_the_logits(
    made: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good tensors, but the software that runs them serves other query heads."""
    out, source = made("llama", 3)
    module = transformers.integrations.sdpa_attention
    monkeypatch.setattr(module, "use_gqa_in_sdpa", lambda *_: False)
    monkeypatch.setattr(module, "repeat_kv", lambda states, n: states.repeat(1, n, 1, 1))
    findings = set(failed(verify_checkpoint(out, source)))
    assert "logits" in findings
    assert findings <= {"logits", "cached decoding"}  # steps of one token take another path, which is not patched


def test_damaged_tensors_fail_the_logits_too(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    good, source = made("phi3", 4)
    out = shutil.copytree(good, tmp_path / "out")
    edit(out, "model.layers.0.mlp.down_proj.weight", lambda t: t * 1.05)
    assert {"untouched tensors", "logits"} == set(failed(verify_checkpoint(out, source)))
    edit(out, f"{ATTENTION}.qkv_proj.weight", lambda t: torch.cat([t[:96], t[104:112], t[96:104], t[112:]]))
    assert {"merged tensors", "logits"} <= set(failed(verify_checkpoint(out, source)))


def test_what_transformers_cannot_load_fails(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    good, source = made("llama", 3)
    out = shutil.copytree(good, tmp_path / "out")
    edit_json(out / "config.json", num_key_value_heads=4)
    assert set(failed(verify_checkpoint(out, source))) == {"config", "loads"}
    edit_json(out / "config.json", model_type="no such model")
    assert {"config", "loads"} <= set(failed(verify_checkpoint(out, source)))


def test_missing_norms_of_heads_fail_to_load(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    good, source = made("stablelm", 4)
    out = shutil.copytree(good, tmp_path / "out")
    edit(out, f"{ATTENTION}.k_layernorm.norms.2.weight", lambda _: None)
    assert {"tensor names", "merged tensors", "loads"} <= set(failed(verify_checkpoint(out, source)))


def layer(heads: int) -> SimpleNamespace:
    return SimpleNamespace(keys=torch.zeros(1, heads, 4, 8), values=torch.zeros(1, heads, 4, 8))


def test_the_cache_is_counted() -> None:
    def shapes(*layers: object) -> list[Shapes]:
        return cache_shapes(SimpleNamespace(layers=list(layers)))

    empty = SimpleNamespace(conv_states=None)
    good = shapes(layer(3), empty, layer(3))
    source = shapes(layer(12), empty, layer(12))
    assert "2 layers" in judge_cache(good, source, 3, "")
    for bad in (shapes(layer(3), layer(12)), source, shapes(layer(3)), shapes(empty)):
        with pytest.raises(Failure):
            judge_cache(bad, source, 3, "none")
    with pytest.raises(Failure, match="no keys"):
        cache_shapes(())


def test_a_wrong_cache_fails_cached_decoding(
    made: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, source = made("llama", 3)
    update = transformers.cache_utils.DynamicLayer.update

    def forgetful(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any) -> Any:
        return update(
            self, keys, values * 1.1 if keys.shape[2] == 1 and keys.shape[1] == 3 else values, *args, **options
        )

    monkeypatch.setattr(transformers.cache_utils.DynamicLayer, "update", forgetful)
    assert set(failed(verify_checkpoint(out, source))) == {"cached decoding"}


def test_text_in_json_is_its_text(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    documents = ["first text", "second text"]
    files = {
        "plain.txt": "first text\n\nsecond text",
        "lines.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in documents),
        "array.json": json.dumps([{"text": text} for text in documents], indent=1),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert read_file(tmp_path / name) == files["plain.txt"]
    (tmp_path / "rows.json").write_text('[{"content": "w1"}]')
    with pytest.raises(OptionError, match="has no 'text', found content"):
        verify_checkpoint(*made("llama", 3), text=tmp_path / "rows.json")


def test_mistakes_of_the_user_are_errors(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    out, source = made("llama", 3)
    with pytest.raises(SourceNotFoundError, match="not a folder"):
        verify_checkpoint(tmp_path / "nothing", source)
    with pytest.raises(SourceNotFoundError):
        verify_checkpoint(out, tmp_path)
    with pytest.raises(SourceNotFoundError, match="revision"):
        verify_checkpoint(out, source, revision="main")
    with pytest.raises(OptionError):
        verify_checkpoint(out, source, text=tmp_path / "no.txt")
    damaged = shutil.copytree(source, tmp_path / "damaged")
    truncate(damaged)
    with pytest.raises(CorruptCheckpointError):
        verify_checkpoint(out, damaged, logits=False)
    edit_json(damaged / "config.json", model_type="gpt0")
    with pytest.raises(UnsupportedFamilyError):
        verify_checkpoint(out, damaged, logits=False)


def test_the_result_is_really_smaller(made: Callable[..., tuple[Path, Path]]) -> None:
    """The fixture is what the other tests take it for."""
    out, _ = made("llama", 3)
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                if name.endswith(("k_proj.weight", "v_proj.weight")):
                    assert tensors.get_slice(name).get_shape() == [24, 96]
    assert isinstance(AutoModelForCausalLM.from_pretrained(out).model.layers[0].self_attn.k_proj, nn.Linear)
