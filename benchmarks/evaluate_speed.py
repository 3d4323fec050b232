"""`evaluate`'s scoring against a bare loop of the same forward passes, on a CPU: time and memory.

    python -m benchmarks.evaluate_speed --output docs/results/evaluate-cpu.json

A Llama of SmolLM2-135M's sizes with random weights scores windows of 1,024 tokens. The bare loop runs the model and
torch's cross-entropy on all logits of a batch. Each way runs in a process of its own, in turn; the times are those of
the process on its core, which other work on the machine lengthens but does not add to.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONTEXT = 1024
WAYS = ("bare", "evaluate")


def build(dtype: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def measured(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a way, and the bytes by which it exceeds the peak of building the model."""
    import numpy as np
    import torch

    from gqa_convert.text.scoring.forward import score
    from gqa_convert.text.scoring.texts import WindowBatches
    from gqa_convert.text.scoring.windows import cut_windows

    torch.set_num_threads(1)
    model = build(options.dtype)
    count = options.windows * CONTEXT
    ids = np.random.default_rng(0).integers(3, 49152, count)
    batches = WindowBatches(ids, cut_windows([(0, count)], CONTEXT, CONTEXT), options.batch)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if way == "bare":
        total = 0.0
        with torch.inference_mode():
            for number in range(len(batches)):
                batch = batches[number]
                logits = model(input_ids=torch.from_numpy(batch.inputs["input_ids"]), use_cache=False).logits
                rows, targets = torch.from_numpy(batch.rows), torch.from_numpy(batch.targets)
                total += float(
                    torch.nn.functional.cross_entropy(logits.flatten(0, 1)[rows].float(), targets, reduction="sum")
                )
        loss = total / (count - options.windows)
    else:
        found = score(model, batches, count)
        loss = float(found.loss.sum(dtype=np.float64)) / (count - options.windows)
    spent = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": spent, "bytes": 1024 * peak, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="windows at once (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measured(options.way, options)))
        return
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, done in runs.items():
            command = [sys.executable, "-m", "benchmarks.evaluate_speed", *sys.argv[1:], "--way", way]
            done.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    ratios = [ours["seconds"] / bare["seconds"] for bare, ours in zip(*runs.values(), strict=True)]
    report = {
        "command": " ".join(["python", "-m", "benchmarks.evaluate_speed", *sys.argv[1:]]),
        "time_ratio": [min(ratios), statistics.median(ratios), max(ratios)],
        "bytes": {way: max(each["bytes"] for each in done) for way, done in runs.items()},
        "runs": runs,
    }
    print(json.dumps({key: report[key] for key in ("time_ratio", "bytes")}, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
