"""Checkpoints as they lie on the Hub, with the configs and tensor names of known repositories and small random weights.

The configs, in `hub_configs.json`, are those of the repositories, with small sizes and without keys that nothing here
depends on. The weights have the names in the repositories' files: without prefixes or with stale buffers, duplicated
where the repository duplicates them, in the repository's type.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from huggingface_hub import save_torch_state_dict

from tests.helpers.tiny import randomise

CONFIGS = json.loads(Path(__file__).with_name("hub_configs.json").read_text())
"""By repository."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class HubSource:
    """What a repository has beside its config."""

    auto: str = "AutoModelForCausalLM"
    """The auto class that its weights are made with."""
    prefix: str = ""
    """What transformers puts in front of its names and the repository does not."""
    buffers: Tensors = field(default_factory=dict)
    """The stale buffers of each of its two layers, by names with `#` for the layer."""
    duplicated: dict[str, str] = field(default_factory=dict)
    """Names in the files by the name under which the same tensor stands there too."""
    left_out: str = ""
    """A name that the files lack, because transformers ties it."""
    files: tuple[str, ...] = ("safetensors",)
    """`safetensors`, `bin`, or `old bin` for the format before torch 1.6; all but the last in shards where there is
    `sharded` too.
    """
    type_of_copy: str | None = None
    """The model type of the result, where it is not that of the source."""
    fit: bool = False
    """Whether fit is tried on it."""


def write_hub_source(name: str, folder: Path) -> Path:
    """Write a repository's folder."""
    source, tensors = HUB_SOURCES[name], hub_tensors(name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name], indent=2) + "\n")
    shard = "20KB" if "sharded" in source.files else "1GB"
    if "old bin" in source.files:
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    if "bin" in source.files:
        save_torch_state_dict(tensors, folder, safe_serialization=False, max_shard_size=shard)
    if "safetensors" in source.files:  # which refuses tensors that share memory
        save_torch_state_dict({key: each.clone() for key, each in tensors.items()}, folder, max_shard_size=shard)
    return folder


def hub_tensors(name: str) -> Tensors:
    """The tensors of a repository's files, in its type."""
    source, config = HUB_SOURCES[name], CONFIGS[name]
    torch.manual_seed(0)
    made_of = transformers.AutoConfig.for_model(**config)
    model = getattr(transformers, source.auto).from_config(made_of, dtype=torch.float32)
    randomise(model)
    dtype = getattr(torch, config.get("torch_dtype", "float32"))
    made = {key: tensor.to(dtype) for key, tensor in model.state_dict().items()}
    made |= {copy: made[original] for copy, original in source.duplicated.items()}
    made.pop(source.left_out, None)
    made = {key.removeprefix(source.prefix): tensor for key, tensor in made.items()}
    for layer in ("0", "1"):
        made |= {key.replace("#", layer): tensor.clone() for key, tensor in source.buffers.items()}
    return made


def _causal_mask(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(64, 64).tril().view(1, 1, 64, 64).to(dtype)


def _speeds(width: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, width, 2) / width)


_SELF = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_CROSS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_SEQ2SEQ = "AutoModelForSeq2SeqLM"

HUB_SOURCES: dict[str, HubSource] = {
    "meta-llama/Llama-2-7b-hf": HubSource(
        buffers={"model.layers.#.self_attn.rotary_emb.inv_freq": _speeds(8)},
        files=("bin", "safetensors"),
        fit=True,
    ),
    "EleutherAI/pythia-1b": HubSource(
        buffers={
            "gpt_neox.layers.#.attention.bias": _causal_mask(torch.uint8),
            "gpt_neox.layers.#.attention.masked_bias": torch.tensor(-1e9).half(),
            "gpt_neox.layers.#.attention.rotary_emb.inv_freq": _speeds(2).half(),
        },
        files=("bin", "safetensors", "sharded"),
        type_of_copy="phi",
        fit=True,
    ),
    "EleutherAI/gpt-j-6b": HubSource(
        buffers={
            "transformer.h.#.attn.bias": _causal_mask(torch.uint8),
            "transformer.h.#.attn.masked_bias": torch.tensor(-1e9),
        },
        files=("bin",),
        type_of_copy="phi",
    ),
    "Helsinki-NLP/opus-mt-en-de": HubSource(
        _SEQ2SEQ,
        duplicated={f"model.{part}.embed_tokens.weight": "model.shared.weight" for part in ("encoder", "decoder")},
        left_out="lm_head.weight",
        files=("old bin",),
        type_of_copy="gqa_marian",
    ),
    "t5-small": HubSource(
        _SEQ2SEQ,
        duplicated={f"{part}.embed_tokens.weight": "shared.weight" for part in ("encoder", "decoder")}
        | {_CROSS: _SELF},
        files=("bin",),
        type_of_copy="gqa_t5",
    ),
    "facebook/opt-350m": HubSource(files=("bin",), type_of_copy="gqa_opt", fit=True),
    "openai-community/gpt2": HubSource(
        prefix="transformer.",
        buffers={"h.#.attn.bias": _causal_mask(torch.float32)},
        left_out="lm_head.weight",
        type_of_copy="gqa_gpt2",
        fit=True,
    ),
    "mosaicml/mpt-7b": HubSource(left_out="lm_head.weight", files=("bin", "sharded"), type_of_copy="gqa_mpt", fit=True),
    "openai/whisper-tiny": HubSource(
        "AutoModelForSpeechSeq2Seq", left_out="proj_out.weight", type_of_copy="gqa_whisper"
    ),
}
"""By the repository that each one imitates."""
