"""Losses over a vocabulary, forward and backward: ours, the plain formula in float32, torch's on the logits as they
are, transformers'.

    python benchmarks/loss_speed.py --output docs/results/losses-cpu.json
    python benchmarks/loss_speed.py --device cuda --rows 8192 --vocabulary 128256 --output docs/results/losses-cuda.json

Every round runs each contender once, in an order that alternates, on logits copied before its clock starts; the figure
to read is the ratio to ours within a round, as a median with its range. Memory is the peak beyond the logits of student
and teacher: on a GPU as torch counts it, on a CPU that of a process which runs one contender once, in units of the
logits' size.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers.loss.loss_utils import ForCausalLMLoss

from gqa_convert.text.losses import combined_loss, compress, kl_loss, lm_loss

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOP_K = 64

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of logits [1, n, V], the teacher's, and labels [1, n]."""


def plain_lm(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def torch_lm(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def transformers_lm(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001
    loss: Tensor = ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch=1, shift_labels=labels)
    return loss


def plain_kl(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001
    return kl_div(logits.float().log_softmax(-1), teacher.float().log_softmax(-1), log_target=True, reduction="sum")


CONTENDERS: dict[str, dict[str, Loss]] = {
    "lm": {
        "ours": lambda logits, teacher, labels: lm_loss(logits, labels, overwrite=True)[0],
        "ours, logits kept": lambda logits, teacher, labels: lm_loss(logits, labels)[0],
        "plain": plain_lm,
        "torch, as they are": torch_lm,
        "transformers": transformers_lm,
    },
    "kl": {
        "ours": lambda logits, teacher, labels: kl_loss(logits, teacher, labels, overwrite=True)[0],
        "ours, logits kept": lambda logits, teacher, labels: kl_loss(logits, teacher, labels)[0],
        f"ours, top {TOP_K}": lambda logits, teacher, labels: kl_loss(
            logits, compress(teacher, TOP_K), labels, overwrite=True
        )[0],
        "plain": plain_kl,
    },
    "both": {
        "ours": lambda logits, teacher, labels: combined_loss(logits, labels, teacher, weight=0.5, overwrite=True).sum,
        "plain": lambda logits, teacher, labels: (
            plain_lm(logits, teacher, labels) / 2 + plain_kl(logits, teacher, labels) / 2
        ),
    },
}


def made(options: argparse.Namespace, dtype: str, seed: int) -> Tensor:
    """Logits [1, n, V]."""
    generator = torch.Generator(options.device).manual_seed(seed)
    few = 3 * torch.randn(min(options.rows, 256), options.vocabulary, generator=generator, device=options.device)
    return few.to(DTYPES[dtype]).repeat(-(-options.rows // 256), 1)[None, : options.rows]


def made_labels(options: argparse.Namespace) -> Tensor:
    return torch.arange(options.rows, device=options.device)[None] * 7 % options.vocabulary


def run(loss: Loss, logits: Tensor, teacher: Tensor, labels: Tensor) -> float:
    """Seconds of a loss and its gradient."""
    fresh = logits.clone().requires_grad_()
    synchronize(logits)
    began = time.perf_counter()
    loss(fresh, teacher, labels).backward()
    synchronize(logits)
    return time.perf_counter() - began


def synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def peak(options: argparse.Namespace, kind: str, name: str, dtype: str) -> float:
    """Memory beyond the logits, in units of their size."""
    logits, teacher, labels = made(options, dtype, 0), made(options, dtype, 1), made_labels(options)
    size: int = logits.numel() * logits.element_size()
    if logits.is_cuda:
        logits.requires_grad_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        CONTENDERS[kind][name](logits, teacher, labels).backward()
        return float((torch.cuda.max_memory_allocated() - before) / size)
    logits.requires_grad_()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew at what is in memory
    before = resident()
    CONTENDERS[kind][name](logits, teacher, labels).backward()
    return (resident() - before) / size


def resident() -> int:
    """Bytes that this process had in memory at most; getrusage would start at what its parent had."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:")
    )
    return 1024 * int(line.split()[1])


def peak_elsewhere(options: argparse.Namespace, kind: str, name: str, dtype: str) -> float:
    """The same in a process of its own, as a CPU's memory is not counted by torch."""
    sizes = ["--rows", str(options.rows), "--vocabulary", str(options.vocabulary), "--threads", str(options.threads)]
    command = [sys.executable, __file__, *sizes, "--peak", kind, name, dtype]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def spread(values: list[float]) -> dict[str, float]:
    return {"min": round(min(values), 3), "median": round(statistics.median(values), 3), "max": round(max(values), 3)}


def cell(options: argparse.Namespace, kind: str, dtype: str) -> dict[str, Any]:
    """Time and memory of all contenders for one loss and type."""
    logits, teacher, labels = made(options, dtype, 0), made(options, dtype, 1), made_labels(options)
    losses = CONTENDERS[kind]
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for loss in losses.values():
        run(loss, logits, teacher, labels)
    for number in range(options.rounds):
        for name in losses if number % 2 == 0 else reversed(losses):
            seconds[name].append(run(losses[name], logits, teacher, labels))
    del logits, teacher
    measure = peak if options.device == "cuda" else peak_elsewhere
    return {
        "loss": kind,
        "dtype": dtype,
        "seconds": {name: round(statistics.median(times), 4) for name, times in seconds.items()},
        "times_ours": {
            name: spread([x / y for x, y in zip(times, seconds["ours"], strict=True)])
            for name, times in seconds.items()
            if name != "ours"
        },
        "peak_over_logits": {name: round(measure(options, kind, name, dtype), 2) for name in losses},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="positions")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--peak", nargs=3, metavar=("LOSS", "CONTENDER", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak(options, *options.peak))
        return
    report = {
        "command": "python benchmarks/loss_speed.py " + " ".join(sys.argv[1:]),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "rows": options.rows,
        "vocabulary": options.vocabulary,
        "rounds": options.rounds,
        "cells": [cell(options, kind, dtype) for kind in CONTENDERS for dtype in DTYPES],
    }
    text = json.dumps(report, indent=2)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
