"""A folder in which the commands of the documentation can be typed as they stand: what they name is
there, only smaller.
"""

import argparse
import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml
from transformers import T5Config

import gqa_convert
from tests.helpers import seq2seq
from tests.helpers.data_helpers import span_tokenizer
from tests.helpers.documents import ROOT, Command
from tests.helpers.evaluate_models import causal, write_rows
from tests.helpers.uptrain_runs import SMALL

HEADS = 32
"""Query heads of the models that stand in for Llama-2-7b and Flan-T5 XL, which have as many."""

_STATED = yaml.safe_load(Path(__file__).with_name("document_workplace.yaml").read_text())
NOT_RUN: dict[str, str] = _STATED["not_run"]


def _text(path: Path, start: int = 0) -> None:
    path.write_text(inspect.getsource(argparse)[start : start + 30_000], encoding="utf-8")


def _llama(path: Path, *, kv_heads: int = HEADS, positions: int = 2048) -> None:
    sizes = {"hidden_size": 32, "head_dim": 4, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    causal(path, **sizes, kv_heads=kv_heads, max_position_embeddings=positions)


def _t5(path: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 4, "num_layers": 1, "num_decoder_layers": 1, "num_heads": HEADS}
    seq2seq.model(path, "t5", span_tokenizer(), **sizes)


def _recipe(path: Path) -> None:
    keys = {
        "model": "demo-gqa3-mean",
        "data": "text.txt",
        "evaluation_data": "held-out.txt",
        "output": "runs/recipe",
    }
    path.write_text(yaml.safe_dump(keys | SMALL), encoding="utf-8")


def _t5_config(path: Path) -> None:
    """The config of a T5 with the layers and heads of T5-XXL, and everything else small."""
    sizes = {"d_model": 32, "d_kv": 4, "d_ff": 40, "vocab_size": 64}
    depth = {"num_layers": 24, "num_decoder_layers": 24, "num_heads": 64}
    config = T5Config(**sizes, **depth, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    path.write_text(json.dumps(config.to_dict()), encoding="utf-8")


FILES: dict[str, Callable[[Path], object]] = {
    "Llama-2-7b": _llama,
    "meta-llama/Llama-2-7b-hf": _llama,
    "meta-llama/Llama-3.1-8B": lambda path: _llama(
        path, kv_heads=8, positions=64
    ),  # grouped-query already, as that is
    "SOURCE": _llama,
    "MODEL": _llama,
    "flan-t5-xl": _t5,
    "google/flan-t5-xl": _t5,
    "text.txt": _text,
    "TEXT": _text,
    "test.txt": lambda path: _text(path, 40_000),
    "held-out.txt": lambda path: _text(path, 50_000),
    "test.jsonl": lambda path: write_rows(path, [{"text": inspect.getsource(json.decoder)[:3000]}]),
    "RECIPE.yaml": _recipe,
    "t5-xxl.json": _t5_config,
}
"""Files that documents assume to exist, and what makes them here."""


def reason(command: Command) -> str | None:
    """Return why a command is not run, or None if it is run."""
    if command.synopsis:
        return "a synopsis"
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, str(command))), None)


def furnish(folder: Path) -> None:
    """Provide what the root of the repository contains."""
    (folder / "gqa_convert").mkdir()
    (folder / "gqa_convert" / "demo_checkpoint").symlink_to(
        Path(gqa_convert.__file__).parent / "demo_checkpoint"
    )
    shutil.copytree(ROOT / "recipes", folder / "recipes")


def needed(folder: Path, names: list[str]) -> list[str]:
    """Make those files among `names` that do not exist yet.

    Returns:
        The commands that make the others.
    """
    wanted = [name.removeprefix("./").rstrip("/") for name in names]
    missing = [name for name in dict.fromkeys(wanted) if not (folder / name).exists()]
    for name in missing:
        if name in FILES:
            FILES[name](folder / name)
    return [command for name in missing for command in _STATED["results"].get(name, [])]


def shortened(command: Command) -> list[str]:
    """Return the arguments of gqa-convert, with options that keep the command short."""
    name, *words = [_STATED["texts"].get(word, word) for word in command.ours or ()]
    instead = dict(_STATED["instead"].get(name, {}))
    if name == "uptrain":
        recipe = words[0]
        first = next(
            (place for place, word in enumerate(words) if word.startswith("-")), len(words)
        )
        words, options = words[:first], words[first:]
        if recipe.startswith("recipes/"):
            instead |= _STATED["hub_recipes"]
        stated = dict(word.split("=", 1) for word in words[1:])
        return [
            name,
            recipe,
            *(f"{key}={value}" for key, value in (stated | instead).items()),
            *options,
        ]
    if name in ("convert", "inspect") and "--calibration" not in words:
        instead = {}
    if name == "publish" and "--dry-run" not in words:
        words.append("--dry-run")  # all but the upload
    if "--retrieval" in words:
        instead |= {
            "--lengths": "2000",
            "--questions": "6",
        }  # within the positions of the stand-ins
    if "--encoder-tokens" in words:
        instead["--encoder-tokens"] = "16"
    for option, value in instead.items():
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return [name, *words]
