"""Tokens per second of `gqa-convert uptrain`, beside a bare loop in plain torch on the same model,
text lengths and optimizer.

    python benchmarks/uptrain_speed.py --output docs/results/uptrain-cpu.json
    python benchmarks/uptrain_speed.py --processes 2

Every round runs the command and the bare loop once, in an order that alternates, each in processes
of its own. A run's figure is the median over its steps without the first three. The figure to read
is the ratio within a round, as a median with its range. The bare loop does nothing but forward,
cross-entropy, backward, clipping and step, on tensors that are there already.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "gqa_convert" / "demo_checkpoint"
LENGTH, MICRO_BATCH, ACCUMULATION = 256, 4, 2
"""Tokens of a sample, samples of a forward pass, and forward passes of a step."""
WARM_UP = 3
"""The steps of a run that do not count."""


def make_model(folder: Path) -> None:
    """Write a random Llama of the bundled model's size with 12 query heads and 3 K/V heads, and
    text for it.
    """
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_hidden_layers": 5,
        "vocab_size": 2048,
    }
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3}
    config = transformers.LlamaConfig(
        **sizes, **heads, max_position_embeddings=LENGTH, tie_word_embeddings=True
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    transformers.AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder / "model")
    words = np.random.default_rng(0).integers(0, 10_000, 300_000)
    (folder / "text.txt").write_text(
        " ".join(f"word{number}" for number in words), encoding="utf-8"
    )


def launched(command: list[str], arguments: argparse.Namespace, folder: Path) -> None:
    """Run `python COMMAND` in as many processes as are asked for."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    environment["ACCELERATE_USE_CPU"] = "true"
    launcher = [sys.executable]
    if arguments.processes > 1:
        environment["OMP_NUM_THREADS"] = "1"
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(arguments.processes),
        ]
    done = subprocess.run(
        [*launcher, *command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)


def run_uptrain(arguments: argparse.Namespace, folder: Path, number: int) -> float:
    """Tokens per second of the command."""
    tokens = LENGTH * MICRO_BATCH * ACCUMULATION * arguments.processes
    output = folder / f"run-{number}"
    recipe = {
        "model": str(folder / "model"),
        "data": str(folder / "text.txt"),
        "output": str(output),
        "tokens": tokens * arguments.steps,
        "tokens_per_step": tokens,
        "sequence_length": LENGTH,
        "micro_batch_size": MICRO_BATCH,
        "precision": "no",
        "save_every": 10**6,
    }
    path = folder / f"run-{number}.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    launched(["-m", "gqa_convert", "uptrain", str(path)], arguments, folder)
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[WARM_UP:]
    return float(statistics.median(json.loads(line)["tokens_per_second"] for line in lines))


def run_bare(arguments: argparse.Namespace, folder: Path, number: int) -> float:
    """Tokens per second of the bare loop, which this script runs in other processes."""
    result = folder / f"bare-{number}.json"
    launched(
        [__file__, *sys.argv[1:], "--bare", str(folder), "--output", str(result)], arguments, folder
    )
    return float(json.loads(result.read_text(encoding="utf-8")))


def bare_loop(arguments: argparse.Namespace) -> None:
    """Train in this process, and write the tokens per second of all processes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    model: Any = transformers.LlamaForCausalLM.from_pretrained(
        arguments.bare / "model", dtype=torch.float32
    )
    model.train()
    if processes > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    ids = torch.randint(2, 2048, (MICRO_BATCH, LENGTH + 1))
    times = []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        for part in range(ACCUMULATION):
            model.require_backward_grad_sync = part == ACCUMULATION - 1
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            (loss / ACCUMULATION).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    tokens = LENGTH * MICRO_BATCH * ACCUMULATION * processes
    if os.environ.get("RANK", "0") == "0":
        arguments.output.write_text(
            json.dumps(tokens / statistics.median(times[WARM_UP:])), encoding="utf-8"
        )
    if processes > 1:
        del model  # with its gradients' buckets: otherwise the group's end may wait for ever
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30, help="of a run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare_loop(arguments)
        return
    rates: dict[str, list[float]] = {"uptrain": [], "bare": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder)
        for number in range(arguments.rounds):
            for name in ("uptrain", "bare") if number % 2 else ("bare", "uptrain"):
                run = run_uptrain if name == "uptrain" else run_bare
                rates[name].append(run(arguments, folder, number))
    ratios = [ours / bare for ours, bare in zip(rates["uptrain"], rates["bare"], strict=True)]
    shape = {
        "size": "demo",
        "length": LENGTH,
        "micro_batch": MICRO_BATCH,
        "accumulation": ACCUMULATION,
        "precision": "no",
    }
    settings = {
        name: value for name, value in vars(arguments).items() if name not in ("output", "bare")
    } | shape
    found = {
        "tokens_per_second": {name: round(statistics.median(each)) for name, each in rates.items()},
        "uptrain_over_bare": [
            round(number, 4) for number in (statistics.median(ratios), min(ratios), max(ratios))
        ],
        **settings,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    text = json.dumps(found, indent=2) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
