"""Checkpoints as they lie on the Hub, with the configs and tensor names of known repositories and
small random weights.

The configs, in `hub_configs.json`, are those of the repositories, with small sizes and without keys
that nothing here depends on. The weights have the names in the repositories' files: without
prefixes or with stale buffers, duplicated where the repository duplicates them, in the repository's
type.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
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
    buffers: dict[str, list[Any]] = field(default_factory=dict)
    """The stale buffers of each of its two layers, by names with `#` for the layer; see
    `buffer`.
    """
    duplicated: dict[str, str] = field(default_factory=dict)
    """Names in the files by the name under which the same tensor stands there too."""
    left_out: str = ""
    """A name that the files lack, because transformers ties it."""
    files: str = "safetensors"
    """`safetensors`, `bin`, or `old bin` for the format before torch 1.6; all but the last in
    shards where there is `sharded` too.
    """
    type_of_copy: str | None = None
    """The model type of the result, where it is not that of the source."""
    fit: bool = False
    """Whether fit is tried on it."""


_STATED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
HUB_SOURCES = {name: HubSource(**stated) for name, stated in _STATED.items()}
"""By the repository that each one imitates."""


def write_hub_source(name: str, folder: Path) -> Path:
    """Write a repository's folder."""
    tensors, files = hub_tensors(name), HUB_SOURCES[name].files.split(", ")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name], indent=2) + "\n")
    shard = "20KB" if "sharded" in files else "1GB"
    if "old bin" in files:
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    if "bin" in files:
        save_torch_state_dict(tensors, folder, safe_serialization=False, max_shard_size=shard)
    if "safetensors" in files:  # which refuses tensors that share memory
        save_torch_state_dict(
            {key: each.clone() for key, each in tensors.items()}, folder, max_shard_size=shard
        )
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
        made |= {key.replace("#", layer): buffer(*stated) for key, stated in source.buffers.items()}
    return made


def buffer(kind: str, dtype: str = "float32", width: int = 0) -> torch.Tensor:
    """A stale buffer: a causal mask, the rotary speeds of heads of a width, or a very small
    number.
    """
    made = torch.tensor(-1e9)
    if kind == "causal mask":
        made = torch.ones(64, 64).tril().view(1, 1, 64, 64)
    if kind == "speeds":
        made = 10000.0 ** -(torch.arange(0, width, 2) / width)
    return made.to(getattr(torch, dtype))
