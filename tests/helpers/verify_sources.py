"""Sources for the tests of the verifier: of stock types, rewritten ones, and those whose results
have a modelling file.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from tests.helpers.own_files import make_source
from tests.helpers.verification import edit_json, save_byte_pairs, save_tokenizer


@dataclass(frozen=True)
class Source:
    """A tiny random model."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shards: str = "50GB"
    native: bool | None = None
    """Whether conversions are rewritten (True) or have a modelling file (False)."""
    good: list[str] = field(default_factory=list)
    """Conversions that must be proven, such as "3 mean"."""


def _source(stated: dict[str, Any]) -> Source:
    return Source(**stated | {"dtype": getattr(torch, stated.get("dtype", "float32"))})


_STATED = yaml.safe_load(Path(__file__).with_name("verify_sources.yaml").read_text())
SIZES: dict[str, Any] = _STATED.pop("sizes")
SOURCES = {name: _source(stated) for name, stated in _STATED.items()}


def save_source(name: str, folder: Path) -> None:
    """Save a source with weights large enough for attention to matter, with a tokenizer and a
    chat template.
    """
    source = SOURCES[name]
    if source.native is not None:
        make_source(
            source.model_type, folder, dtype=source.dtype, shards=source.shards, **source.changes
        )
    else:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(source.model_type, **SIZES | source.changes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.12)
        model.to(source.dtype).save_pretrained(folder, max_shard_size=source.shards)
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    if name == "bart, decoder alone":
        transformers.BartForCausalLM.from_pretrained(folder).save_pretrained(folder)
    if (
        source.model_type == "qwen2"
    ):  # whose class splits text into bytes, whatever tokenizer.json says
        save_byte_pairs(folder, tokenizer_class="Qwen2Tokenizer", eos_token="<|endoftext|>")
        return
    save_tokenizer(folder)
    edit_json(folder / "tokenizer_config.json", eos_token="w2")
