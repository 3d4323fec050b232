"""A folder in which the commands of the documentation can be typed as they stand: what they name is there, only
smaller.
"""

import argparse
import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import T5Config, T5ForConditionalGeneration

import gqa_convert
from tests.helpers.data_helpers import span_tokenizer
from tests.helpers.documents import ROOT, Command
from tests.helpers.evaluate_models import causal, write_rows
from tests.helpers.tiny import randomise
from tests.helpers.uptrain_runs import SMALL

HEADS = 32
"""Query heads of the models that stand in for Llama-2-7b and Flan-T5 XL, which have as many."""

NOT_RUN = {
    r"convert_hf_to_gguf\.py": "a program of llama.cpp, which the tests' environment lacks",
    r"^(\S*/)?pip install": "fetches packages: .ci/run types the README's line",
    r"^python3 -m venv|^source ": "likewise",
    r"^(\S*/)?python -m pytest": "this suite",
    r"^python (docs/make_families|tools/derive_families)\.py": "write files of the repository, which tests/families compares",
    r"^(\S*/)?gqa-convert demo$": "takes minutes: tests/demo/test_demo.py runs it with less text",
    r"^torchrun |^accelerate launch": "starts processes of its own, mostly on GPUs: tests/training/test_distributed_runs.py has such runs",
    r"^sbatch ": "needs a cluster",
    r"^cp demo-gqa3/": "puts files into a folder that TRL wrote, which the tests' environment lacks",
    r"^lm_eval ": "runs a program of its own, which the tests' environment lacks",
    r"^llama-server ": "a serving engine, which the tests' environment lacks",
    r"^\S*/vllm serve ": "a serving engine, which the tests' environment lacks",
    r"^python (benchmarks/|-m benchmarks)": "measures, for minutes or hours",
    r"^gqa-convert benchmark .*--engine ": "runs a serving engine, which the tests' environment lacks",
    r"^gqa-convert check-serving ": "runs serving engines, which the tests' environment lacks",
}
"""Commands that the tests only parse, and the reason."""

NOT_EXECUTED = {"datasets": "downloads a dataset"}
"""Packages whose import keeps the tests from executing a block of Python, and the reason."""

INSTEAD: dict[str, dict[str, str]] = {
    "convert": {"--calibration-tokens": "240", "--calibration-length": "40", "--fit-steps": "2", "--kl-steps": "1"},
    "inspect": {"--calibration-tokens": "300"},
    "evaluate": {"--tokens": "400", "--window": "32"},
    "benchmark": {
        "--batch": "1",
        "--context": "16",
        "--repetitions": "1",
        "--new-tokens": "2",
    },
    "uptrain": {key: str(value) for key, value in SMALL.items()}
    | {
        "micro_batch_size": "2",
        "save_every": "6",
        "evaluate_every": "6",
        "evaluation_tokens": "64",
    },
}
"""Options that keep a command short; they replace or extend those that the document gives."""

TEXTS = {"python-stdlib": "text.txt", "python-stdlib:held-out": "held-out.txt"}
"""Tokenising all of Python's own sources takes some seconds."""

HUB_RECIPES = {
    "model": "demo-gqa3-mean",
    "teacher": "gqa_convert/demo_checkpoint",
    "data": "text.txt",
    "evaluation_data": "held-out.txt",
}
"""Keys of a recipe that would need the Hub."""


def _text(path: Path, start: int = 0) -> None:
    path.write_text(inspect.getsource(argparse)[start : start + 30_000], encoding="utf-8")


def _llama(path: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "head_dim": 4,
        "num_attention_heads": HEADS,
        "kv_heads": HEADS,
        "max_position_embeddings": 2048,
    }
    causal(path, **sizes, num_hidden_layers=2)


def _llama3(path: Path) -> None:
    """Grouped-query already, as Llama 3.1 8B is."""
    causal(
        path,
        hidden_size=32,
        head_dim=4,
        num_attention_heads=HEADS,
        kv_heads=8,
        max_position_embeddings=64,
        num_hidden_layers=2,
    )


def _t5(path: Path) -> None:
    tokenizer = span_tokenizer()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "d_model": 32,
        "d_kv": 4,
        "d_ff": 40,
        "num_layers": 1,
        "num_heads": HEADS,
    }
    model = T5ForConditionalGeneration(T5Config(**sizes, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0))
    randomise(model)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _recipe(path: Path) -> None:
    keys = {"model": "demo-gqa3-mean", "data": "text.txt", "evaluation_data": "held-out.txt", "output": "runs/recipe"}
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
    "meta-llama/Llama-3.1-8B": _llama3,
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

RESULTS = {
    "Llama-2-7b-gqa8": ["gqa-convert convert Llama-2-7b Llama-2-7b-gqa8 --groups 8 --method mean"],
    "flan-t5-xl-gqa8": ["gqa-convert convert flan-t5-xl flan-t5-xl-gqa8 --groups 8 --method mean"],
    "OUT": ["gqa-convert convert SOURCE OUT --groups 8"],
    "demo-gqa3": ["gqa-convert convert gqa_convert/demo_checkpoint demo-gqa3 --groups 3"],
    "demo-gqa3-mean": ["gqa-convert convert gqa_convert/demo_checkpoint demo-gqa3-mean --groups 3 --method mean"],
    "runs": [
        "gqa-convert convert SOURCE runs/gqa8 --groups 8 --method mean",
        "gqa-convert evaluate SOURCE runs/gqa8 --data text.txt --json > runs/evaluate.json",
        "gqa-convert benchmark SOURCE --candidates 1,8,32 --json > runs/benchmark.json",
    ],
}
"""Folders that documents assume to exist, and the commands that make them."""


def reason(command: Command) -> str | None:
    """Return why a command is not run, or None if it is run."""
    if command.synopsis:
        return "a synopsis"
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, str(command))), None)


def furnish(folder: Path) -> None:
    """Provide what the root of the repository contains."""
    (folder / "gqa_convert").mkdir()
    (folder / "gqa_convert" / "demo_checkpoint").symlink_to(Path(gqa_convert.__file__).parent / "demo_checkpoint")
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
    return [command for name in missing for command in RESULTS.get(name, [])]


def shortened(command: Command) -> list[str]:
    """Return the arguments of gqa-convert, with options that keep the command short."""
    name, *words = [TEXTS.get(word, word) for word in command.ours or ()]
    instead = dict(INSTEAD.get(name, {}))
    if name == "uptrain":
        recipe = words[0]
        first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
        words, options, instead = words[:first], words[first:], dict(INSTEAD["uptrain"])
        if recipe.startswith("recipes/"):
            instead |= HUB_RECIPES
        stated = dict(word.split("=", 1) for word in words[1:])
        return [name, recipe, *(f"{key}={value}" for key, value in (stated | instead).items()), *options]
    if name in ("convert", "inspect") and "--calibration" not in words:
        instead = {}
    if name == "publish" and "--dry-run" not in words:
        words.append("--dry-run")  # all but the upload
    if "--retrieval" in words:
        instead |= {"--lengths": "2000", "--questions": "6"}  # within the positions of the stand-ins
    if "--encoder-tokens" in words:
        instead["--encoder-tokens"] = "16"
    for option, value in instead.items():
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return [name, *words]
