"""Translated checkpoints compute what their sources compute: stock classes on both sides are the oracle.

The reference with fewer K/V heads is the source's own class, each group's heads replaced by their mean; how its heads
lie in its tensors is written here anew, with reshapes of whole tensors.
"""

import copy
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.checkpoint.headers import Header, build_header, parse_header
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.conversion.translation.description import Translation
from gqa_convert.conversion.translation.rows import RowTranslator
from gqa_convert.conversion.translation.tensors import translate_tensors
from gqa_convert.errors import ConfigError, NonFiniteError, OptionError, UnsupportedFormatError
from gqa_convert.families.source_sizes import read_dimensions, read_rotary
from gqa_convert.families.target_architectures import NoTargetArchitecture, TargetArchitecture
from gqa_convert.families.target_choice import engines_for, find_target_architecture
from gqa_convert.families.target_configs import translate_config
from gqa_convert.merging.methods import METHODS
from tests.helpers.checkpoints import write_llama

HEADS, WIDTH, VOCAB = 12, 16, 40
HIDDEN, INNER = HEADS * WIDTH, 56

_NEOX = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "layer_norm_eps": 1e-3,
}
_GPT = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_inner": INNER,
    "n_layer": 3,
    "n_head": HEADS,
    "n_positions": 64,
    "rotary_dim": 6,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "layer_norm_epsilon": 1e-3,
}


def _rope(theta: float, part: float, /, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part} | scaling}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2, 3],
    "long_factor": [2.0, 3, 4, 5],
    "original_max_position_embeddings": 16,
}

# Name: source type, config, home.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "neox": ("gpt_neox", _NEOX, "phi"),
    "neox-no-attention-bias": ("gpt_neox", _NEOX | {"attention_bias": False} | _rope(500.0, 0.5), "phi"),
    "neox-tied": (
        "gpt_neox",
        _NEOX | {"tie_word_embeddings": True, "hidden_act": "gelu_new"} | _rope(500.0, 1.0),
        "phi",
    ),
    "neox-linear": ("gpt_neox", _NEOX | _rope(500.0, 0.5, rope_type="linear", factor=3.0), "phi"),
    "neox-dynamic": (
        "gpt_neox",
        _NEOX | _rope(500.0, 0.5, rope_type="dynamic", factor=3.0) | {"max_position_embeddings": 8},
        "phi",
    ),
    "neox-yarn": ("gpt_neox", _NEOX | _rope(500.0, 0.5, **YARN), "phi"),
    "neox-llama3": ("gpt_neox", _NEOX | _rope(500.0, 0.5, **LLAMA3), "phi"),
    "neox-longrope": ("gpt_neox", _NEOX | _rope(500.0, 0.5, **LONGROPE), "phi"),
    "neox-sequential": ("gpt_neox", _NEOX | {"use_parallel_residual": False} | _rope(500.0, 1.0), "starcoder2"),
    "neox-sequential-tied-no-bias": (
        "gpt_neox",
        _NEOX
        | {"use_parallel_residual": False, "tie_word_embeddings": True, "attention_bias": False}
        | _rope(500.0, 1.0, **YARN),
        "starcoder2",
    ),
    "gptj": ("gptj", _GPT, "phi"),
    "gptj-all-rows-tied": ("gptj", _GPT | {"rotary_dim": WIDTH, "n_inner": None, "tie_word_embeddings": True}, "phi"),
    "codegen": ("codegen", _GPT, "phi"),
    "codegen-relu": ("codegen", _GPT | {"rotary_dim": WIDTH, "activation_function": "relu", "n_inner": None}, "phi"),
    "gpt2": ("gpt2", _GPT, "gpt_bigcode"),
    "gpt2-scaled": (
        "gpt2",
        _GPT | {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True, "tie_word_embeddings": False},
        "gpt_bigcode",
    ),
    "gpt2-unscaled": (
        "gpt2",
        _GPT | {"scale_attn_weights": False, "n_inner": None, "activation_function": "gelu"},
        "gpt_bigcode",
    ),
}

REGROUPED = [
    (name, groups) for name, case in CASES.items() for groups in ((1,) if case[0] == "gpt2" else (12, 4, 3, 1))
]


def build(name: str, dtype: torch.dtype = torch.float32, head: bool = True) -> PreTrainedModel:
    """A source with random weights large enough for attention to matter, and random gains and biases everywhere."""
    torch.manual_seed(7)
    model_type, fields, _ = CASES[name]
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(fields))
    model = (AutoModelForCausalLM if head else AutoModel).from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.0 if any(part in parameter_name for part in ("embed", "wte", "wpe")) else 0.1)
            elif parameter_name.endswith("weight"):
                parameter.uniform_(0.3, 1.7)
            else:
                parameter.normal_(0, 0.3)
    return model.to(dtype)


class Disk:
    """A single-file checkpoint, read with nothing of the tool but its header parser."""

    def __init__(self, folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        self.raw = raw
        self.header: Header = parse_header(raw[8 : 8 + length], len(raw), str(folder))
        self.config = json.loads((folder / "config.json").read_text())
        self.longest = 0

    def read(self, tensor: str, first: int, rows: int) -> np.ndarray[Any, Any]:
        entry = self.header.tensors[tensor]
        array = np.frombuffer(self.raw, DTYPES[entry.dtype], entry.elements, entry.start).reshape(entry.shape)
        assert 0 <= first <= first + rows <= len(array)
        self.longest = max(self.longest, array[first : first + rows].size)
        return array[first : first + rows]


def translate(source: Path, target: Path, groups: int, method: Any = "mean") -> tuple[Translation, RowTranslator]:
    """What the converter will do, in small."""
    disk = Disk(source)
    target_architecture = find_target_architecture(disk.config, groups)
    assert isinstance(target_architecture, TargetArchitecture), target_architecture
    translation = translate_tensors(disk.header.tensors, disk.config, target_architecture, groups, METHODS[method])
    executor = RowTranslator(disk.read, seed=3)
    data = []
    for tensor in translation.tensors:
        parts = []
        for block in executor.blocks(tensor):
            assert block.flags.c_contiguous
            assert block.dtype == DTYPES[tensor.dtype]
            assert block.shape[1:] == tensor.shape[1:]
            parts.append(block.tobytes())
        data.append(b"".join(parts))
        assert len(data[-1]) == tensor.nbytes, tensor.name
    target.mkdir()
    described = [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in translation.tensors]
    (target / "model.safetensors").write_bytes(build_header(described, {"format": "pt"}) + b"".join(data))
    (target / "config.json").write_text(json.dumps(translate_config(disk.config, target_architecture, groups)))
    return translation, executor


def load(folder: Path, head: bool = True, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model, info = (AutoModelForCausalLM if head else AutoModel).from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, dtype=dtype
    )
    assert not any(info.values()), info
    return model.eval()


def repeat_merged(model: PreTrainedModel, groups: int) -> None:
    """Replace every group's K/V heads by copies of their mean, in place."""

    def pooled(heads: torch.Tensor) -> torch.Tensor:
        grouped = heads.double().reshape(groups, HEADS // groups, *heads.shape[1:])
        return grouped.mean(1, keepdim=True).expand_as(grouped).reshape(heads.shape).to(heads.dtype)

    with torch.no_grad():
        for name, tensor in model.named_parameters():
            rest = tensor.shape[1:]
            if "query_key_value" in name:
                heads = tensor.view(HEADS, 3, WIDTH, *rest)
                heads[:, 1], heads[:, 2] = pooled(heads[:, 1]), pooled(heads[:, 2])
            elif "qkv_proj" in name:
                heads = tensor.view(4, 3, HEADS // 4, WIDTH, *rest)
                for part in (1, 2):
                    whole = heads[:, part].reshape(HEADS, WIDTH, *rest)
                    heads[:, part] = pooled(whole).view(4, HEADS // 4, WIDTH, *rest)
            elif "k_proj" in name or "v_proj" in name:
                tensor.copy_(pooled(tensor.view(HEADS, WIDTH, *rest)).reshape(tensor.shape))
            elif "c_attn" in name:
                heads = tensor.view(-1, 3, HEADS, WIDTH)
                for part in (1, 2):
                    heads[:, part] = pooled(heads[:, part].transpose(0, 1)).transpose(0, 1)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """A left-padded batch of two."""
    ids = torch.randint(2, VOCAB, (2, 20), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    ids[1, :6] = 0
    return ids, mask


def logits(model: PreTrainedModel) -> torch.Tensor:
    """At every position that is no padding."""
    ids, mask = tokens()
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits[mask.bool()].float()


def greedy(model: PreTrainedModel) -> list[list[int]]:
    ids, mask = tokens()
    return model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0).tolist()


@pytest.mark.parametrize(("name", "groups"), REGROUPED)
def test_equals_the_source(name: str, groups: int, tmp_path: Path) -> None:
    source = build(name)
    source.save_pretrained(tmp_path / "source")
    converted = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups, native=True, method="mean")
    assert converted.plan.route == "translated"
    assert converted.plan.parameters_after == sum(
        tensor.numel() for tensor in load_file(tmp_path / "out" / "model.safetensors").values()
    )
    repeat_merged(source, groups)
    result = load(tmp_path / "out")
    assert result.config.model_type == CASES[name][2]
    expected, found = logits(source), logits(result)
    assert expected.std() > 0.5  # a model whose logits hardly vary would prove nothing
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert greedy(result) == greedy(source)
    cache = result(input_ids=tokens()[0]).past_key_values
    assert all(layer.keys.shape[-3] == groups for layer in cache.layers)
    changed = {change.name for change in converted.plan.changes if change.before != change.after}
    assert set(converted.merge_error) == changed
    assert all(0.1 < error < 1 for error in converted.merge_error.values())


def test_a_plan_lists_the_projections_that_take_the_folded_maps(tmp_path: Path) -> None:
    build("neox").save_pretrained(tmp_path / "source")
    plan = make_plan(open_checkpoint(tmp_path / "source"), 3, method="factor")
    listed = {change.name for change in plan.changes if change.before == change.after}
    assert plan.target_architecture is not None
    assert {name.split(".")[-2] for name in listed} == {"q_proj", "dense"}
    pooled = make_plan(open_checkpoint(tmp_path / "source"), 3, method="mean")
    assert all(change.before != change.after for change in pooled.changes)


def test_the_converter_writes_what_the_translation_says(tmp_path: Path) -> None:
    """Bit for bit, from sharded sources too."""
    build("neox").save_pretrained(tmp_path / "source")
    build("neox").save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    translate(tmp_path / "source", tmp_path / "small", 3)
    expected = load_file(tmp_path / "small" / "model.safetensors")
    for source in ("source", "sharded"):
        convert_checkpoint(tmp_path / source, tmp_path / f"{source}-out", 3, method="mean")
        found = {
            name: tensor
            for file in (tmp_path / f"{source}-out").glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        assert found.keys() == expected.keys()
        assert all(
            torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in expected.items()
        )


def test_the_route_is_chosen(tmp_path: Path) -> None:
    for name in ("neox", "gpt2"):
        build(name).save_pretrained(tmp_path / name)
    neox, gpt2 = (open_checkpoint(tmp_path / name) for name in ("neox", "gpt2"))
    assert make_plan(neox, 3).route == "translated"
    assert make_plan(neox, 3).config["model_type"] == "phi"
    assert make_plan(neox, 3, native=False).route == "own file"
    assert make_plan(neox, HEADS).route == "native"
    assert make_plan(neox, HEADS, native=True).config["model_type"] == "phi"
    assert make_plan(gpt2, 1).config["model_type"] == "gpt_bigcode"
    assert make_plan(gpt2, 3).route == "own file"
    with pytest.raises(
        OptionError, match="no stock class computes the same as this gpt2: gpt_bigcode, which is GPT-2 otherwise"
    ):
        make_plan(gpt2, 3, native=True)


def test_no_modelling_file_where_none_is_needed(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    with pytest.raises(OptionError, match="leave the option out"):
        make_plan(open_checkpoint(tmp_path / "llama"), 3, native=False)
    assert make_plan(open_checkpoint(tmp_path / "llama"), 3, native=True).route == "native"


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("neox", 1e-13),
        ("neox-no-attention-bias", 1e-13),
        ("neox-sequential", 1e-13),
        ("gptj", 1e-6),
        ("codegen", 1e-6),
        ("gpt2", 1e-7),
    ],
)
def test_the_algebra_is_exact(name: str, tolerance: float, tmp_path: Path) -> None:
    """In float64 nothing but float64's own rounding is left; GPT-J and CodeGen have float32 scores, gpt_bigcode a
    float32 softmax.
    """
    source = build(name, torch.float64)
    source.save_pretrained(tmp_path / "source")
    translate(tmp_path / "source", tmp_path / "out", 1)
    repeat_merged(source, 1)
    ids = tokens()[0][:1]
    with torch.no_grad():
        expected, found = (model(ids).logits for model in (source, load(tmp_path / "out", dtype=torch.float64)))
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize(
    ("name", "fields", "engines"),
    [
        ("neox", {}, {"transformers", "vLLM"}),
        ("neox-sequential", {}, {"transformers", "vLLM", "llama.cpp"}),
        ("neox-sequential", {"hidden_act": "relu"}, {"transformers", "vLLM"}),
        ("neox-sequential-tied-no-bias", {}, {"transformers"}),
        ("gpt2", {}, {"transformers", "vLLM", "llama.cpp"}),
    ],
)
def test_engines(name: str, fields: dict[str, Any], engines: set[str]) -> None:
    config = with_config(name, **fields)
    target_architecture = find_target_architecture(config, 1)
    assert isinstance(target_architecture, TargetArchitecture)
    assert engines_for(config, target_architecture) == engines


def test_real_names_and_old_config_keys(tmp_path: Path) -> None:
    """Pythia's names, its config's keys and its stale buffers."""
    source = build("neox")
    source.save_pretrained(tmp_path / "source")
    disk = Disk(tmp_path / "source")
    assert {"embed_out.weight", "gpt_neox.layers.0.attention.query_key_value.weight"} <= set(disk.header.tensors)
    config = disk.config
    config["rope_parameters"] = None
    config |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "torch_dtype": "float32"}
    del config["rope_parameters"], config["dtype"]
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    _append(tmp_path / "source", {"gpt_neox.layers.1.attention.bias": np.ones((1, 1, 4, 4), np.float32)})
    translation, _ = translate(tmp_path / "source", tmp_path / "out", 4)
    assert translation.dropped == ("gpt_neox.layers.1.attention.bias",)
    repeat_merged(source, 4)
    expected = logits(source)
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, atol=1e-4, rtol=0)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["dtype"] == written["torch_dtype"] == "float32"
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 10000
    assert written["partial_rotary_factor"] == written["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert not {"rotary_pct", "rotary_emb_base", "use_parallel_residual"} & set(written)
    assert written["num_key_value_heads"] == written["multi_query_group_num"] == 4
    assert written["multi_query_attention"] is True


def _append(folder: Path, extra: dict[str, np.ndarray[Any, Any]], without: tuple[str, ...] = ()) -> None:
    """Rewrite a checkpoint with tensors more, changed or fewer."""
    disk = Disk(folder)
    arrays = {
        name: disk.read(name, 0, entry.shape[0]) for name, entry in disk.header.tensors.items() if name not in without
    } | extra
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()} | {np.dtype(np.int8): "I8"}
    described = [(name, names[array.dtype], array.shape, array.nbytes) for name, array in arrays.items()]
    data = b"".join(array.tobytes() for array in arrays.values())
    (folder / "model.safetensors").write_bytes(build_header(described, {"format": "pt"}) + data)


@pytest.mark.parametrize("name", ["neox", "neox-sequential", "gptj", "codegen", "gpt2"])
def test_a_model_without_its_head(name: str, tmp_path: Path) -> None:
    source = build(name, head=False)
    source.save_pretrained(tmp_path / "source")
    assert not any(
        "." in source.base_model_prefix and key.startswith(source.base_model_prefix) for key in source.state_dict()
    )
    translate(tmp_path / "source", tmp_path / "out", 1)
    repeat_merged(source, 1)
    ids, _ = tokens()
    with torch.no_grad():
        expected, found = source(ids).last_hidden_state, load(tmp_path / "out", head=False)(ids).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_gpt2_as_it_lies_on_the_hub(tmp_path: Path) -> None:
    """Without a prefix, without its tied head, with the causal mask of old."""
    source = build("gpt2")
    source.save_pretrained(tmp_path / "source")
    disk = Disk(tmp_path / "source")
    names = list(disk.header.tensors)
    plain = {
        name.removeprefix("transformer."): disk.read(name, 0, disk.header.tensors[name].shape[0]) for name in names
    }
    _append(tmp_path / "source", plain | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}, tuple(names))
    translate(tmp_path / "source", tmp_path / "out", 1)
    repeat_merged(source, 1)
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(source), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["neox", "neox-sequential", "gptj", "codegen", "gpt2"])
def test_half_types(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The written weights, computed with in float32, are as near as one rounding of each allows."""
    source = build(name, dtype)
    source.save_pretrained(tmp_path / "source")
    translate(tmp_path / "source", tmp_path / "out", 1)
    source = source.float()
    repeat_merged(source, 1)
    expected, found = logits(source), logits(load(tmp_path / "out"))
    assert (found - expected).norm() < (0.02 if dtype == torch.bfloat16 else 0.003) * expected.norm()
    tensors = Disk(tmp_path / "out").header.tensors
    assert {entry.dtype for entry in tensors.values()} == {"BF16" if dtype == torch.bfloat16 else "F16"}


def test_folding_rounds_once(tmp_path: Path) -> None:
    build("neox", torch.bfloat16).save_pretrained(tmp_path / "source")
    translate(tmp_path / "source", tmp_path / "out", 3)
    old, new = Disk(tmp_path / "source"), Disk(tmp_path / "out")

    def whole(disk: Disk, name: str) -> np.ndarray[Any, Any]:
        return disk.read(name, 0, disk.header.tensors[name].shape[0]).astype(np.float32)

    layer = "gpt_neox.layers.1."
    fused = whole(old, f"{layer}attention.query_key_value.weight").reshape(3, 4, 3, WIDTH, HIDDEN)
    gain, beta = (whole(old, f"{layer}input_layernorm.{kind}") for kind in ("weight", "bias"))
    mean = (((fused[:, 0] + fused[:, 1]) + fused[:, 2]) + fused[:, 3]) / np.float32(4)
    key = (mean[:, 1].reshape(-1, HIDDEN) * gain).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(whole(new, "model.layers.1.self_attn.k_proj.weight"), key)
    bias = whole(old, f"{layer}attention.query_key_value.bias").reshape(3, 4, 3, WIDTH).mean(1)[:, 2].reshape(-1)
    bias = bias + mean[:, 2].reshape(-1, HIDDEN) @ beta
    np.testing.assert_allclose(whole(new, "model.layers.1.self_attn.v_proj.bias"), bias, rtol=2**-8, atol=1e-6)
    inner_gain = whole(old, f"{layer}post_attention_layernorm.weight")
    inner = (whole(old, f"{layer}mlp.dense_h_to_4h.weight") * inner_gain).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(whole(new, "model.layers.1.mlp.fc1.weight"), inner)


@pytest.mark.parametrize("name", ["neox", "gptj", "gpt2"])
def test_first_and_random(name: str, tmp_path: Path) -> None:
    """`first` is the first head of each group; `random` depends on the seed alone and keeps the deviation."""
    source = build(name)
    source.save_pretrained(tmp_path / "source")
    for method in ("first", "random"):
        translate(tmp_path / "source", tmp_path / method, 1, method)
    translate(tmp_path / "source", tmp_path / "again", 1, "random")
    assert (tmp_path / "random" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()
    with torch.no_grad():
        for parameter_name, tensor in source.named_parameters():
            rest = tensor.shape[1:]
            if "query_key_value" in parameter_name:
                tensor.view(HEADS, 3, WIDTH, *rest)[:, 1:] = tensor.view(HEADS, 3, WIDTH, *rest)[:1, 1:].clone()
            elif "k_proj" in parameter_name or "v_proj" in parameter_name:
                tensor.view(HEADS, WIDTH, *rest)[:] = tensor.view(HEADS, WIDTH, *rest)[:1].clone()
            elif "c_attn" in parameter_name:
                heads = tensor.view(*tensor.shape[:-1], 3, HEADS, WIDTH)
                heads[..., 1:, :, :] = heads[..., 1:, :1, :].clone()
    torch.testing.assert_close(logits(load(tmp_path / "first")), logits(source), atol=1e-4, rtol=0)
    assert torch.isfinite(logits(load(tmp_path / "random"))).all()


def test_random_bias_sees_the_random_weight(tmp_path: Path) -> None:
    """What a folded norm adds goes through the numbers that were drawn, not through the source's."""
    build("neox").save_pretrained(tmp_path / "source")
    translate(tmp_path / "source", tmp_path / "out", 1, "random")
    disk = Disk(tmp_path / "source")
    name = "gpt_neox.layers.0.attention.query_key_value.bias"
    zero = {
        name: np.zeros(3 * HIDDEN, np.float32),
        "gpt_neox.layers.0.input_layernorm.weight": np.ones(HIDDEN, np.float32),
    }
    _append(tmp_path / "source", zero)
    translate(tmp_path / "source", tmp_path / "plain", 1, "random")
    plain = Disk(tmp_path / "plain")
    key = plain.read("model.layers.0.self_attn.k_proj.weight", 0, WIDTH)
    beta = disk.read("gpt_neox.layers.0.input_layernorm.bias", 0, HIDDEN)
    np.testing.assert_allclose(plain.read("model.layers.0.self_attn.k_proj.bias", 0, WIDTH), key @ beta, atol=1e-5)
    gain = disk.read("gpt_neox.layers.0.input_layernorm.weight", 0, HIDDEN)
    folded = Disk(tmp_path / "out").read("model.layers.0.self_attn.k_proj.weight", 0, WIDTH)
    np.testing.assert_allclose(folded, key * gain, rtol=1e-6)
    deviation = (
        disk.read("gpt_neox.layers.0.attention.query_key_value.weight", 0, 3 * HIDDEN).reshape(HEADS, 3, -1)[:, 1].std()
    )
    assert key.std() == pytest.approx(float(deviation), rel=0.05)


def test_merge_error_is_the_sources_own(tmp_path: Path) -> None:
    build("neox").save_pretrained(tmp_path / "source")
    translation, executor = translate(tmp_path / "source", tmp_path / "out", 4)
    disk = Disk(tmp_path / "source")
    fused = disk.read("gpt_neox.layers.2.attention.query_key_value.weight", 0, 3 * HIDDEN).astype(np.float64)
    heads = fused.reshape(4, 3, 3, WIDTH * HIDDEN)[:, :, 1]
    expected = np.linalg.norm(heads - heads.mean(1, keepdims=True)) / np.linalg.norm(heads)
    assert executor.errors()["model.layers.2.self_attn.k_proj.weight"] == pytest.approx(expected, rel=1e-6)
    merged = {tensor.name: tensor.merged for tensor in translation.tensors if tensor.merged}
    found = merged["model.layers.2.self_attn.v_proj.weight"]
    assert found is not None
    assert (found.roles, found.before, found.after) == (("value",), (HIDDEN, HIDDEN), (4 * WIDTH, HIDDEN))
    assert len(merged) == 3 * 4
    assert [(layer.module, layer.kv_heads, layer.key_head_dim) for layer in translation.layers][2] == (
        "model.layers.2.self_attn",
        12,
        16,
    )


def test_memory_is_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read is longer than a block, however large the tensors; and the result does not depend on the block."""
    build("gptj").save_pretrained(tmp_path / "source")
    translate(tmp_path / "source", tmp_path / "large", 3)
    monkeypatch.setattr("gqa_convert.conversion.translation.rows._BLOCK_NUMBERS", 600)
    translate(tmp_path / "source", tmp_path / "small", 3)
    assert (tmp_path / "large" / "model.safetensors").read_bytes() == (
        tmp_path / "small" / "model.safetensors"
    ).read_bytes()
    disk = Disk(tmp_path / "source")
    target_architecture = find_target_architecture(disk.config, 3)
    assert isinstance(target_architecture, TargetArchitecture)
    executor = RowTranslator(disk.read)
    for tensor in translate_tensors(disk.header.tensors, disk.config, target_architecture, 3).tensors:
        assert all(block.size <= 600 or block.shape[0] == 1 for block in executor.blocks(tensor))
    assert disk.longest <= 2 * 768  # rows of every other number are read with those between


def test_what_is_copied_is_named(tmp_path: Path) -> None:
    """The writer may copy these bytes without looking at them."""
    build("neox").save_pretrained(tmp_path / "source")
    translation, _ = translate(tmp_path / "source", tmp_path / "out", 4)
    old, new = Disk(tmp_path / "source"), Disk(tmp_path / "out")
    copied = {tensor.name: ranges for tensor in translation.tensors if (ranges := tensor.copied_ranges)}
    assert {"lm_head.weight", "model.layers.0.mlp.fc2.weight", "model.layers.0.self_attn.dense.bias"} <= set(copied)
    assert not any("q_proj" in name or "fc1" in name or name.endswith("input_layernorm.weight") for name in copied)
    for name, ranges in copied.items():
        parts = [old.read(*part) for part in ranges]
        np.testing.assert_array_equal(np.concatenate(parts), new.read(name, 0, new.header.tensors[name].shape[0]))


def with_config(name: str, **fields: Any) -> dict[str, Any]:
    model_type, config, _ = CASES[name]
    return {"model_type": model_type} | config | fields


@pytest.mark.parametrize(
    ("config", "groups", "reason"),
    [
        (with_config("gpt2"), 3, "either one K/V head"),
        (with_config("gpt2", add_cross_attention=True), 1, "cross-attention"),
        (with_config("neox", use_parallel_residual=False), 3, "4 rotary dimensions of 16"),
        (with_config("neox", rope_scaling={"type": "ntk", "factor": 2.0}), 3, "'ntk'"),
        (with_config("neox", rotary_pct=0.2), 3, "no pairs"),
        (with_config("neox", rotary_pct=1.5), 3, "makes no sense"),
        (with_config("neox", rope_parameters={"full": {"rope_theta": 1.0}}), 3, "differ between layers"),
        (with_config("neox", auto_map={"AutoModel": "x.Y"}), 3, "contains modelling code"),
        (
            with_config("neox", architectures=["GPTNeoXForSequenceClassification"]),
            3,
            "GPTNeoXForSequenceClassification",
        ),
        (with_config("neox", pad_token_id=40), 3, "padding token"),
        (with_config("gptj", rotary_dim=None), 3, "rotary_dim = None"),
        (with_config("gptj", rotary_dim=18), 3, "rotary_dim = 18"),
        ({"model_type": "bloom"}, 3, "bloom"),
    ],
)
def test_no_home(config: dict[str, Any], groups: int, reason: str) -> None:
    found = find_target_architecture(config, groups)
    assert isinstance(found, NoTargetArchitecture)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_config("neox", num_attention_heads=11), "11 heads, which do not divide"),
        (with_config("neox", hidden_size="192"), "hidden_size = '192'"),
        (with_config("codegen", n_head=6), "multiple of 4"),
    ],
)
def test_impossible_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_target_architecture(config, 3)


def test_rotary_factor_survives_rounding() -> None:
    """Clients compute int(width * factor): 29 rows of 100 must not become 28."""
    for width in range(2, 260, 2):
        for rotated in range(2, width + 1, 2):
            config = {"model_type": "gptj", "n_embd": width, "n_head": 1, "n_layer": 1, "rotary_dim": rotated}
            rotary = read_rotary(config, read_dimensions(config))
            assert not isinstance(rotary, NoTargetArchitecture)
            assert int(width * rotary.factor) == rotated
            assert rotary.factor <= 1


def test_damaged_sources(tmp_path: Path) -> None:
    source = tmp_path / "source"
    build("neox").save_pretrained(source)
    good = (source / "model.safetensors").read_bytes()
    key = "gpt_neox.layers.1.attention.query_key_value.weight"
    array = Disk(source).read(key, 0, 3 * HIDDEN)
    damaged = array.copy()
    damaged[WIDTH] = np.nan
    half = {
        "gpt_neox.layers.1.input_layernorm.weight": np.full(HIDDEN, 6e4, np.float16),
        key: np.full_like(array, 2.0, np.float16),
    }
    for extra, without, error, message in (
        (
            {"gpt_neox.layers.3.attention.dense.weight": array},
            (),
            ConfigError,
            "does not belong to a gpt_neox checkpoint with 3 layers",
        ),
        ({}, (key,), ConfigError, "is missing: the checkpoint is incomplete"),
        ({}, ("embed_out.weight",), ConfigError, "embed_out.weight is missing"),
        ({}, ("gpt_neox.embed_in.weight",), ConfigError, "holds no tensor gpt_neox.embed_in.weight"),
        (
            {},
            ("gpt_neox.layers.1.attention.query_key_value.bias",),
            ConfigError,
            "is missing: the checkpoint is incomplete",
        ),
        ({key: array[:-1]}, (), ConfigError, "has shape"),
        ({key: array.astype(np.int8)}, (), UnsupportedFormatError, "has type I8"),
        ({key: damaged}, (), NonFiniteError, "holds NaN or Inf"),
        (half, (), NonFiniteError, "too large for F16"),
    ):
        (source / "model.safetensors").write_bytes(good)
        _append(source, extra, without)
        with pytest.raises(error, match=message):
            translate(source, tmp_path / "out", 3)


def test_tokenizer_stays_the_sources(tmp_path: Path) -> None:
    """A folder that names no tokenizer class gets its model type's, and the home's type would bring another."""
    from transformers import GPTNeoXTokenizerFast

    words = {chr(33 + index): index for index in range(30)} | {"<|endoftext|>": 30, "Ġ": 31, "Ġ!": 32}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("Ġ", "!")]))
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    build("neox").save_pretrained(tmp_path / "source")
    tokenizer.save(str(tmp_path / "source" / "tokenizer.json"))
    translate(tmp_path / "source", tmp_path / "out", 3)
    for folder in (tmp_path / "source", tmp_path / "out"):
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text("{}")
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "source", tmp_path / "out"))
    assert type(before) is type(after) is GPTNeoXTokenizerFast
    assert before("! !$%").input_ids == after("! !$%").input_ids


def test_gpt2_tokenizer_keeps_its_special_tokens(tmp_path: Path) -> None:
    """transformers 5 has no tokenizer class of its own for gpt_bigcode, and GPT-2's folder on the Hub names no special
    tokens.
    """
    words = {chr(33 + index): index for index in range(30)} | {"<|endoftext|>": 30}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    build("gpt2").save_pretrained(tmp_path / "source")
    translate(tmp_path / "source", tmp_path / "out", 1)
    target_architecture = find_target_architecture(with_config("gpt2"), 1)
    assert isinstance(target_architecture, TargetArchitecture)
    for folder, extra in (("source", {}), ("out", dict(target_architecture.special_tokens))):
        tokenizer.save(str(tmp_path / folder / "tokenizer.json"))
        (tmp_path / folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64} | extra))
    before, after = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("source", "out"))
    assert before.special_tokens_map == after.special_tokens_map
    assert before('!"#<|endoftext|>').input_ids == after('!"#<|endoftext|>').input_ids == [0, 1, 2, 30]


def test_every_linear_bias_is_there(tmp_path: Path) -> None:
    """Old clients would leave a missing bias at random."""
    build("gptj").save_pretrained(tmp_path / "source")
    translate(tmp_path / "source", tmp_path / "out", 3)
    result = load(tmp_path / "out")
    linears = [name for name, module in result.named_modules() if isinstance(module, nn.Linear)]
    assert {f"{name}.bias" for name in linears} <= set(Disk(tmp_path / "out").header.tensors)
    assert not result.model.layers[0].self_attn.q_proj.bias.any()
