"""Losses from the input of the output layer, with gradients: ours in parts and from whole logits, the plain formula, torch's.

    python -m benchmarks.linear_loss_speed --output docs/results/linear-losses-cpu.json

Sizes are those of SmolLM2-135M by default. Every round runs each contender once, in an order that alternates; the
figure to read is the ratio to ours within a round. Memory is the peak beyond states, layers and the gradients that all
contenders return, of a process that runs one contender once.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, linear, linear_cross_entropy

from benchmarks.loss_speed import resident, spread
from gqa_convert.text.linear_losses import linear_loss
from gqa_convert.text.losses import combined_loss
from gqa_convert.text.output_layers import OutputLayer


class Given(NamedTuple):
    """States [1, n, d] and output layers [V, d] of student and teacher, and labels [1, n]."""

    states: Tensor
    weight: Tensor
    teacher: Tensor
    teacher_weight: Tensor
    labels: Tensor


def ours_lm(given: Given) -> Tensor:
    return linear_loss(given.states, OutputLayer(given.weight), given.labels).sum


def whole_lm(given: Given) -> Tensor:
    return combined_loss(linear(given.states, given.weight), given.labels, overwrite=True).sum


def plain_lm(given: Given) -> Tensor:
    logits = linear(given.states, given.weight).float()
    return cross_entropy(logits.flatten(0, 1), given.labels.flatten(), reduction="sum")


def torch_lm(given: Given) -> Tensor:
    return linear_cross_entropy(given.states.flatten(0, 1), given.weight, given.labels.flatten(), reduction="sum")


def ours_kl(given: Given) -> Tensor:
    layers = OutputLayer(given.weight), OutputLayer(given.teacher_weight)
    return linear_loss(given.states, layers[0], given.labels, given.teacher, layers[1], weight=1.0).sum


def whole_kl(given: Given) -> Tensor:
    theirs = linear(given.teacher, given.teacher_weight)
    return combined_loss(linear(given.states, given.weight), given.labels, theirs, weight=1.0, overwrite=True).sum


def plain_kl(given: Given) -> Tensor:
    ours, theirs = linear(given.states, given.weight), linear(given.teacher, given.teacher_weight)
    ours, theirs = ours.float().log_softmax(-1), theirs.float().log_softmax(-1)
    return kl_div(ours, theirs, log_target=True, reduction="sum")


CONTENDERS: dict[str, dict[str, Callable[[Given], Tensor]]] = {
    "cross-entropy": {
        "ours": ours_lm,
        "ours, whole logits": whole_lm,
        "plain": plain_lm,
        "torch, linear_cross_entropy": torch_lm,
    },
    "divergence": {"ours": ours_kl, "ours, whole logits": whole_kl, "plain": plain_kl},
}


def made(options: argparse.Namespace) -> Given:
    generator = torch.Generator().manual_seed(0)
    n, d, v = options.positions, options.hidden_size, options.vocabulary

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    weights = [numbers(v, d) * (3 / d**0.5) for _ in range(2)]
    states = [numbers(1, n, d) for _ in range(2)]
    labels = torch.randint(v, (1, n), generator=generator)
    return Given(states[0].requires_grad_(), weights[0].requires_grad_(), states[1], weights[1], labels)


def run(loss: Callable[[Given], Tensor], given: Given) -> float:
    """Processor seconds of a loss and its gradients, on one thread."""
    given.states.grad = given.weight.grad = None
    began = time.process_time()
    loss(given).backward()
    return time.process_time() - began


def peak(options: argparse.Namespace, kind: str, name: str) -> float:
    """Megabytes that a loss takes at most, without what it returns."""
    given = made(options)
    given.states.grad, given.weight.grad = torch.zeros_like(given.states), torch.zeros_like(given.weight)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident()
    CONTENDERS[kind][name](given).backward()
    return (resident() - before) / 1e6


def peak_elsewhere(options: argparse.Namespace, kind: str, name: str) -> float:
    sizes = [
        f"--{each}={getattr(options, each.replace('-', '_'))}" for each in ("positions", "hidden-size", "vocabulary")
    ]
    command = [sys.executable, "-m", "benchmarks.linear_loss_speed", *sizes, "--peak", kind, name]
    return round(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def cell(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Time and memory of all contenders for one loss."""
    given, losses = made(options), CONTENDERS[kind]
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for number in range(options.rounds):
        for name in losses if number % 2 == 0 else reversed(losses):
            seconds[name].append(run(losses[name], given))
    times_ours = {
        name: spread([x / y for x, y in zip(times, seconds["ours"], strict=True)])
        for name, times in seconds.items()
        if name != "ours"
    }
    return {
        "loss": kind,
        "processor_seconds": {name: round(statistics.median(times), 3) for name, times in seconds.items()},
        "times_ours": times_ours,
        "peak_megabytes": {name: peak_elsewhere(options, kind, name) for name in losses},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--peak", nargs=2, metavar=("LOSS", "CONTENDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        print(peak(options, *options.peak))
        return
    report = {
        "command": "python -m benchmarks.linear_loss_speed " + " ".join(sys.argv[1:]),
        "machine": platform.machine(),
        "versions": f"torch {torch.__version__}",
        "sizes": {"positions": options.positions, "hidden_size": options.hidden_size, "vocabulary": options.vocabulary},
        "rounds": options.rounds,
        "cells": [cell(options, kind) for kind in CONTENDERS],
    }
    text = json.dumps(report, indent=2)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
