"""Tiny models with tokenizers, and `gqa-convert evaluate` within this process."""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers import seq2seq
from tests.helpers.data_helpers import demo_tokenizer, span_tokenizer
from tests.helpers.tiny import make_config, make_model

POSITIONS = 48


def causal(
    folder: Path,
    *,
    seed: int = 0,
    tokenizer: Any = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """A tiny Llama with the bundled tokenizer."""
    tokenizer = tokenizer or demo_tokenizer()
    settings = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 1,
        "max_position_embeddings": POSITIONS,
    } | config
    make_model(make_config("llama", **settings), seed=seed).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def t5(folder: Path) -> Path:
    sizes = {"d_model": 24, "d_kv": 8, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
    return seq2seq.model(folder, "t5", span_tokenizer(), **sizes)


def bart(folder: Path) -> Path:
    """An encoder-decoder without sentinels, whose decoder begins with end-of-text, and that
    knows 20 positions.
    """
    sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 20}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    tokens = {"bos_token_id": 1, "decoder_start_token_id": 1, "forced_eos_token_id": 1}
    return seq2seq.model(folder, "bart", span_tokenizer(sentinels=0), **sizes, **heads, **tokens)


def constant(
    folder: Path, tokens: Sequence[str], log_probabilities: Sequence[float], bos: str | None = None
) -> Path:
    """A model that always predicts the same distribution, with a tokenizer that cuts text into runs
    of the tokens' length.
    """
    length = len(next(token for token in tokens if token != bos))
    tokenizer = Tokenizer(
        models.WordLevel(
            {token: number for number, token in enumerate(tokens)}, unk_token=tokens[0]
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("." * length), "isolated")
    tokenizer.decoder = decoders.Fuse()
    model = make_model(
        make_config(
            "llama", vocab_size=len(tokens), num_hidden_layers=1, max_position_embeddings=POSITIONS
        )
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(1.0)
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = torch.tensor(log_probabilities)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """Run `gqa-convert evaluate` in this process and return its exit code, stdout and stderr."""
    from gqa_convert.cli import main

    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    monkeypatch.setattr(sys, "argv", ["gqa-convert", "evaluate", *map(str, arguments)])
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err
