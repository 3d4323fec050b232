"""Checkpoints that load by code of their own, rewritten for stock classes: logits against forward passes that are
written down in tests/helpers/remote_types.py, and every way in which a checkpoint may not be what its type says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM

from gqa_convert import convert_checkpoint, verify_checkpoint
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.restating import remote_code_types as types
from gqa_convert.conversion.restating.restate import restate_checkpoint
from gqa_convert.errors import ConfigError, GQAConvertError, RemoteCodeError, UnsupportedFamilyError
from gqa_convert.families.table import FAMILIES, REFUSALS, RESTATED, find_family
from tests.helpers.checkpoints import digests
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.remote_types import REFERENCES, VOCABULARY, Reference
from tests.helpers.tiny import randomise

IDS = torch.randint(0, VOCABULARY, (23,), generator=torch.Generator().manual_seed(0))


def restated(folder: Path, case: str, **config: Any) -> tuple[Reference, Path]:
    reference = REFERENCES[case]()
    source = reference.save(folder / "source", **config)
    if case == "baichuan, second version":
        (source / "modeling_baichuan.py").write_text(
            "class NormHead(nn.Module): ...\nraise SystemExit('must not run')\n"
        )
    restate_checkpoint(source, folder / "stock")
    return reference, folder / "stock"


def logits(folder: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(IDS[None]).logits[0]


@pytest.mark.parametrize("case", REFERENCES)
def test_the_stock_class_computes_what_the_types_own_code_computes(case: str, tmp_path: Path) -> None:
    reference, stock = restated(tmp_path, case)
    wanted = reference(IDS)
    error = (logits(stock).double() - wanted).norm() / wanted.norm()
    assert error < 1e-5, f"{case}: {error:.2e}"
    config = json.loads((stock / "config.json").read_text())
    assert config["model_type"] == RESTATED[reference.config["model_type"]]
    assert not any(key.startswith(("AutoConfig", "AutoModel")) for key in config.get("auto_map", {}))


@pytest.mark.parametrize("case", ["internlm2", "baichuan, second version", "qwen", "minicpm"])
def test_a_rewritten_checkpoint_is_converted_and_verified(case: str, tmp_path: Path) -> None:
    _, stock = restated(tmp_path, case)
    groups = 2 if case == "internlm2" else 3
    convert_checkpoint(stock, tmp_path / "out", groups, ConversionOptions(method="mean"))
    assert verify_checkpoint(tmp_path / "out", stock).passed


def test_tokenizer_code_stays_and_modelling_code_goes(tmp_path: Path) -> None:
    source = REFERENCES["qwen"]().save(tmp_path / "source")
    for name in ("modeling_qwen.py", "configuration_qwen.py", "tokenization_qwen.py", "qwen.tiktoken"):
        (source / name).write_text("raise SystemExit('must not run')\n")
    result = restate_checkpoint(source, tmp_path / "stock")
    names = {path.name for path in (tmp_path / "stock").iterdir()}
    own = {"config.json", "model.safetensors", "gqa_restated.json"}
    assert names == own | {"tokenization_qwen.py", "qwen.tiktoken"}
    assert json.loads((tmp_path / "stock" / "config.json").read_text())["auto_map"] == {
        "AutoTokenizer": ["tokenization_qwen.T", None]
    }
    assert "48 tokens" in result.notes[0]


@pytest.mark.parametrize(
    ("model_type", "shape", "old"),
    [
        (
            "RefinedWeb",
            {"new_decoder_architecture": True, "num_kv_heads": 4},
            {"n_head_kv": 4, "alibi": False, "parallel_attn": True},
        ),
        ("RefinedWebModel", {"multi_query": True}, {"multi_query": True, "parallel_attn": True}),
        (
            "RefinedWebModel",
            {"multi_query": False, "alibi": True, "bias": True, "parallel_attn": False},
            {"multi_query": False, "alibi": True, "bias": True, "parallel_attn": False},
        ),
    ],
)
def test_the_first_falcons(model_type: str, shape: dict[str, Any], old: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    model = FalconForCausalLM(FalconConfig(**sizes, **shape)).eval()
    randomise(model)
    model.save_pretrained(tmp_path / "source")
    with torch.no_grad():
        wanted = model(IDS[None]).logits[0]
    stated = {
        "model_type": model_type,
        "architectures": ["RWForCausalLM"],
        "n_head": 12,
        "n_layer": 2,
        "hidden_size": 96,
    }
    stated |= {
        "vocab_size": VOCABULARY,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
        "torch_dtype": "float32",
    }
    (tmp_path / "source" / "config.json").write_text(json.dumps(stated | old))
    restate_checkpoint(tmp_path / "source", tmp_path / "stock")
    assert torch.equal(logits(tmp_path / "stock"), wanted)
    if model_type == "RefinedWeb":
        assert make_plan(open_checkpoint(tmp_path / "stock"), 2).source_kv_heads == 4


def test_torch_files_are_read_too(tmp_path: Path) -> None:
    reference = REFERENCES["baichuan"]()
    source = reference.save(tmp_path / "source")
    (source / "model.safetensors").unlink()
    torch.save(reference.tensors, source / "pytorch_model.bin")
    restate_checkpoint(source, tmp_path / "stock")
    wanted = reference(IDS)
    assert (logits(tmp_path / "stock").double() - wanted).norm() < 1e-5 * wanted.norm()


def test_unit_rows_of_half_precision_are_rounded_once(tmp_path: Path) -> None:
    reference = REFERENCES["baichuan, second version"]()
    reference.tensors = {name: tensor.bfloat16() for name, tensor in reference.tensors.items()}
    source = reference.save(tmp_path / "source")
    (source / "modeling_baichuan.py").write_text("class NormHead(nn.Module): ...")
    restate_checkpoint(source, tmp_path / "stock")
    head = reference.tensors["lm_head.weight"].double()
    found = load_file(tmp_path / "stock" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(found, (head / head.norm(dim=1, keepdim=True)).bfloat16())


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Baichuan 13B": ("baichuan", {"max_position_embeddings": None}, "ALiBi"),
    "InternLM2, another scaling": ("internlm2", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling"),
    "InternLM2, a reward model": (
        "internlm2",
        {"architectures": ["InternLM2ForRewardModel"]},
        "InternLM2ForRewardModel",
    ),
    "MiniCPM with experts": ("minicpm", {"num_experts": 8}, "experts"),
    "MiniCPM, sparse": ("minicpm", {"sparse_config": {"topk": 4}}, "sparse"),
    "MiniCPM, no counts": ("minicpm", {"num_hidden_layers": None}, "num_hidden_layers"),
    "open_llama, stable embedding": ("open_llama", {"use_stable_embedding": True}, "use_stable_embedding"),
    "open_llama, by default": ("open_llama", {"use_stable_embedding": None}, "use_stable_embedding"),
    "Qwen, other biases": ("qwen", {"no_bias": False}, "no_bias"),
    "Qwen, other widths": ("qwen", {"kv_channels": 16}, "kv_channels"),
    "StableLM, parallel": ("stablelm_epoch", {"use_parallel_residual": True}, "use_parallel_residual"),
    "a K/V-head count that nothing reads": ("baichuan", {"num_key_value_heads": 3}, "num_key_value_heads"),
    "InternLM, unknown positions": ("internlm", {"rotary": {"base": 1e4, "type": "yarn"}}, "rotary"),
    "fewer layers": ("internlm2", {"num_hidden_layers": 1}, "model.layers.1"),
    "more layers": ("Yi", {"num_hidden_layers": 3}, "model.layers.2"),
    "other heads": ("phi-msft", {"n_head_kv": 6}, "Wqkv"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_stock_class_computes_is_refused_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    case, config, word = REFUSED[name]
    source = REFERENCES[case]().save(tmp_path / "source", **config)
    before = digests(tmp_path)
    with pytest.raises((UnsupportedFamilyError, ConfigError), match=word):
        restate_checkpoint(source, tmp_path / "stock")
    assert digests(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert source.is_dir()


def test_a_tensor_that_is_missing_or_strange(tmp_path: Path) -> None:
    for number, change in enumerate(("missing", "strange")):
        reference = REFERENCES["internlm2"]()
        if change == "missing":
            del reference.tensors["model.layers.1.feed_forward.w3.weight"]
        else:
            reference.tensors["vit.weight"] = torch.zeros(2)
        with pytest.raises(ConfigError, match="w3.weight is missing" if change == "missing" else "vit.weight"):
            restate_checkpoint(reference.save(tmp_path / f"source{number}"), tmp_path / f"stock{number}")


@pytest.mark.parametrize("model_type", RESTATED)
def test_convert_says_what_to_do(model_type: str) -> None:
    with pytest.raises(RemoteCodeError, match=rf"gqa-convert convert SOURCE PLAIN.*{RESTATED[model_type]}"):
        find_family(model_type)


def test_the_tables_agree() -> None:
    assert types.RESTATED.keys() == RESTATED.keys()
    assert set(RESTATED.values()) <= set(FAMILIES)
    assert not set(RESTATED) & (set(FAMILIES) | set(REFUSALS))


def test_stock_types_need_no_rewriting(tmp_path: Path) -> None:
    source = REFERENCES["Yi"]().save(tmp_path / "source", model_type="llama")
    with pytest.raises(GQAConvertError, match="loads without custom code: convert it directly"):
        restate_checkpoint(source, tmp_path / "stock")


def test_the_commands_rewrite_a_source_and_leave_nothing_beside_the_result(tmp_path: Path) -> None:
    source = REFERENCES["qwen"]().save(tmp_path / "source")
    out = tmp_path / "out"
    made = run("convert", source, out, "--groups", 3, "-m", "mean", "--json")
    assert made.returncode == 0, made.stderr
    assert "note: the same up to 48 tokens" in made.stderr
    assert "is rewritten for stock classes in a folder beside" in made.stderr
    summary = json.loads(made.stdout)
    assert (summary["source"], summary["model_type"], summary["groups"]) == (str(source), "qwen2", 3)
    assert json.loads((out / "gqa_conversion.json").read_text())["source"]["id"] == str(source)
    verified = run("verify", out, "--source", source, "--json")
    assert verified.returncode == 0, verified.stdout
    assert json.loads(verified.stdout)["source"] == str(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    whole = run("convert", source, tmp_path / "plain", "--groups", 12, "-q")
    assert (whole.returncode, whole.stdout, whole.stderr) == (0, "", "")
    restate_checkpoint(source, tmp_path / "stock")
    name = "model.safetensors"
    assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()


def test_what_is_refused_before_and_after_a_source_is_rewritten(tmp_path: Path) -> None:
    source = REFERENCES["qwen"]().save(tmp_path / "source")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    for out, groups, words in (("mine", 3, "thesis.tex"), ("out", 5, "--groups 5"), ("source", 3, "exists already")):
        refused = run("convert", source, tmp_path / out, "--groups", groups, "--overwrite", "-q")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert words in refused.stderr
    assert_mistake(
        run("convert", source, "--groups", 3, "--dry-run"), "--dry-run cannot plan", "rewrites it as a qwen2"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "source"]
