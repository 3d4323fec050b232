"""The models: three configurations that are trained here, and the bundled one, which recipes/demo/train.py trained.

They are small enough for one core and differ where merging methods differ: rotary positions with and without biases on
the projections, learned positions with every projection fused into one Conv1D, and an encoder-decoder with relative
positions per query head. Heads times head width is not the model's width in two of them.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from gqa_convert.demo import CHECKPOINT
from gqa_convert.families.loading import load_tokenizer

DEFAULT_CACHE = Path("~/.cache/gqa-convert/quality")
DEMO = "demo"
SENTINELS = 64


@dataclass(frozen=True)
class Spec:
    """A model to train.

    Attributes:
        objective: as a recipe names it.
        context: tokens of a sample: of a causal block, or of the encoder's input.
        heads: query heads, and K/V heads.
        groups: the K/V heads to convert to: 2:1, 4:1 and one.
        tokens: of text to train on, by default.
        tokens_per_step: of text, by default.
        learning_rate: the peak.
        build: makes the model with fresh weights, for a tokenizer.
    """

    objective: Literal["causal", "span_corruption"]
    context: int
    heads: int
    groups: tuple[int, ...]
    tokens: int
    tokens_per_step: int
    learning_rate: float
    build: Callable[[Any], Any]


def quality_tokenizer(name: str) -> Any:
    """The bundled model's tokenizer as transformers loads it beside this model, for `t5` with sentinels.

    Whatever the files say, transformers cuts text for the model type `qwen2` as the published Qwen2 does, before the
    merges: training must too.
    """
    tokenizer = load_tokenizer(CHECKPOINT)
    if name == "t5":
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [f"<extra_id_{number}>" for number in range(SENTINELS)]}
        )
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder))
        SPECS[name].build(tokenizer).config.save_pretrained(folder)
        return load_tokenizer(Path(folder))


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save it under the plain class, which keeps the files' own rules wherever the model type allows it."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key not in ("is_local", "local_files_only")}
    path.write_text(
        json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n", encoding="utf-8"
    )


def _special(tokenizer: Any) -> dict[str, int]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _qwen2(tokenizer: Any) -> Any:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=320,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=16,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.04,
            **_special(tokenizer),
        )
    )


def _gpt2(tokenizer: Any) -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=192,
            n_head=12,
            n_layer=4,
            n_positions=256,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.04,
            **_special(tokenizer),
        )
    )


def _t5(tokenizer: Any) -> Any:
    special = _special(tokenizer)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=192,
            d_kv=24,
            d_ff=320,
            num_layers=3,
            num_decoder_layers=3,
            num_heads=12,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=True,
            decoder_start_token_id=special["pad_token_id"],
            **special,
        )
    )
    # One matrix for embeddings and output layer, whose logits T5 scales by 1 / sqrt(d_model). Its deviation of 1 suits
    # Adafactor's relative rates; a smaller one lets AdamW move it within a short run.
    torch.nn.init.normal_(model.shared.weight, std=0.5)
    return model


SPECS = {
    "qwen2": Spec("causal", 256, 16, (8, 4, 1), 3_500_000, 2048, 4e-3, _qwen2),
    "gpt2": Spec("causal", 256, 12, (6, 3, 1), 3_500_000, 2048, 4e-3, _gpt2),
    "t5": Spec("span_corruption", 256, 12, (6, 3, 1), 9_000_000, 4096, 3e-3, _t5),
}
MODELS = (DEMO, *SPECS)


def model_folder(name: str, cache: Path) -> Path:
    """Where a model's checkpoint is."""
    return CHECKPOINT if name == DEMO else cache.expanduser() / name


def groups_of(name: str) -> tuple[int, ...]:
    """The K/V heads to convert a model to: 2:1, 4:1 and one."""
    return (6, 3, 1) if name == DEMO else SPECS[name].groups


def heads_of(name: str) -> int:
    """The source's K/V heads."""
    return 12 if name == DEMO else SPECS[name].heads


def objective_of(name: str) -> str:
    """As a recipe names it."""
    return "causal" if name == DEMO else SPECS[name].objective


def context_of(name: str) -> int:
    """Tokens of a sample."""
    return 512 if name == DEMO else SPECS[name].context
