"""Decoding: attention over a K/V cache against the time to read that cache once, and whole steps of a model.

    python -m benchmarks.decoding_speed --threads 1 2 --output docs/results/decoding-cpu.json --table docs/results/decoding-cpu.md
    python -m benchmarks.decoding_speed --device cuda --output docs/results/decoding-cuda.json --table docs/results/decoding-cuda.md

Every round runs each contender once, in an order that alternates; the figure to read is the ratio within a round, as a
median with its range. Successive calls read different caches, together more than `--cold` bytes, as the layers of a
model do, so that caches come from memory and not from the processor's own. Whole steps run a Llama of two layers with
random weights.

On a GPU, a turn ends when the GPU has finished, so that a call takes no less than Python takes to launch its kernels.
There, `gqa` leaves half precision without a mask to torch, and `kernel` is the kernel in every cell.
"""

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.attention_speed import DTYPES, HEADS, WIDTH, Layer, processor, shown, spread
from gqa_convert.attention import register
from gqa_convert.attention.decoding import cuda, operator
from gqa_convert.attention.interface import attention_forward
from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.errors import OptionError

Call = Callable[[], object]
KERNEL = {"cpu": (operator, "PROCESSOR", None), "cuda": (cuda, "ready", False)}
"""Type of device -> module and name of what says that there is a kernel, and its value without one."""
WITHOUT = {"cpu": "gqa without llvmlite", "cuda": "gqa without Triton"}
READING = {
    "cpu": "with the same threads (a dot product)",
    "cuda": "(the fastest of a dot product, sums, and a copy of as many bytes in all)",
}
STEP_SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 2, "vocab_size": 1024}


@dataclass(frozen=True)
class Cell:
    """Attention alone, with one query per sequence."""

    threads: int
    dtype: str
    batch: int
    groups: int
    keys: int
    padded: bool


@dataclass(frozen=True)
class Step:
    """A whole decoding step in bfloat16."""

    threads: int
    groups: int
    keys: int
    cache: str
    compiled: bool


def attention_calls(cell: Cell, cold: int, device: torch.device) -> dict[str, Call]:
    """Calls that go through several caches in turn."""
    dtype = DTYPES[cell.dtype]
    one = 2 * cell.batch * cell.groups * cell.keys * WIDTH * dtype.itemsize
    few = torch.randn(cell.batch, cell.groups, min(cell.keys, 512), WIDTH, device=device).to(dtype)

    def made() -> Tensor:
        return few.repeat(1, 1, -(-cell.keys // 512), 1)[:, :, : cell.keys].contiguous()

    caches = [(made(), made()) for _ in range(max(2, cold // one))]
    query = torch.randn(cell.batch, HEADS, 1, WIDTH, device=device).to(dtype)
    mask = None
    if cell.padded:  # a static cache of which an eighth is not in use, and another eighth is padding in some sequences
        mask = torch.ones(cell.batch, 1, 1, cell.keys, dtype=torch.bool, device=device)
        mask[..., cell.keys * 7 // 8 :] = False
        mask[::2, ..., : cell.keys // 8] = False
    layer, turn = Layer(cell.groups), itertools.count()

    def following() -> tuple[Tensor, Tensor]:
        return caches[next(turn) % len(caches)]

    def read() -> None:
        key, value = following()
        torch.dot(key.view(-1).view(torch.float32), value.view(-1).view(torch.float32))

    def read_by_sum() -> None:
        for tensor in following():
            tensor.view(torch.float32).sum()

    def without_kernel() -> object:
        module, name, missing = KERNEL[device.type]
        found = getattr(module, name)
        setattr(module, name, missing)
        try:
            return attention_forward(layer, query, *following(), mask, scaling=WIDTH**-0.5)
        finally:
            setattr(module, name, found)

    calls: dict[str, Call] = {
        "gqa": lambda: attention_forward(layer, query, *following(), mask, scaling=WIDTH**-0.5),
        WITHOUT[device.type]: without_kernel,
        "sdpa": lambda: sdpa_attention_forward(layer, query, *following(), mask, scaling=WIDTH**-0.5),
        "read": read,
    }
    if device.type == "cuda":
        target = torch.empty_like(caches[0][0])
        calls["kernel"] = lambda: operator.decode(query, *following(), mask, WIDTH**-0.5)
        # the limit is the best of three, of which the copy writes as much as it reads, and copies keys alone
        calls["read by sum"] = read_by_sum
        calls["read by copy"] = lambda: target.copy_(following()[0])
    return calls


def model(groups: int, device: torch.device) -> Any:
    config = LlamaConfig(
        **STEP_SIZES, num_attention_heads=HEADS, num_key_value_heads=groups, max_position_embeddings=1 << 20
    )
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    made = made.to(torch.bfloat16).to_empty(device=device)
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    made.model.rotary_emb = type(made.model.rotary_emb)(config).to(device)
    return made.eval()


def step_calls(step: Step, device: torch.device) -> dict[str, Call]:
    """One decoding step under each attention implementation, on a cache filled with random numbers."""
    register()
    calls: dict[str, Call] = {}
    token = torch.ones(1, 1, dtype=torch.int64, device=device)
    room = 4096  # for the steps of all rounds
    for implementation in ("gqa", "sdpa"):
        made = model(step.groups, device)
        made.set_attn_implementation(implementation)
        cache: Any = (
            StaticCache(config=made.config, max_cache_len=step.keys + room)
            if step.cache == "static"
            else DynamicCache(config=made.config)
        )
        for number in range(STEP_SIZES["num_hidden_layers"]):
            key, value = (
                torch.randn(1, step.groups, step.keys, WIDTH, device=device).to(torch.bfloat16) for _ in range(2)
            )
            cache.update(key, value, number)
        run = torch.compile(made) if step.compiled else made

        def call(run: Any = run, cache: Any = cache) -> None:
            run(token, past_key_values=cache, use_cache=True)
            if step.cache == "dynamic":
                cache.crop(-1)

        calls[implementation] = call
    return calls


def measure(calls: dict[str, Call], least: int, budget: float, device: torch.device) -> dict[str, list[float]]:
    """Seconds per call of every contender in every round."""
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def turn(call: Call, repeats: int) -> float:
        finish()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        finish()
        return (time.perf_counter() - began) / repeats

    repeats = {}
    for name, call in calls.items():
        turn(call, 1)
        repeats[name] = max(1, int(0.005 / turn(call, 1)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for number in range(60):
        for name in calls if number % 2 == 0 else reversed(calls):
            seconds[name].append(turn(calls[name], repeats[name]))
        if number + 1 >= least and time.perf_counter() - began > budget:
            break
    if "read by sum" in seconds:
        ways = (seconds["read"], seconds.pop("read by sum"), seconds.pop("read by copy"))
        seconds["read"] = [min(times) for times in zip(*ways, strict=True)]
    return seconds


def ratio(seconds: dict[str, list[float]], first: str, second: str) -> dict[str, float]:
    return spread([x / y for x, y in zip(seconds[first], seconds[second], strict=True)])


def summary(cell: Cell | Step, seconds: dict[str, list[float]]) -> dict[str, Any]:
    record: dict[str, Any] = {
        **asdict(cell),
        "rounds": len(seconds["gqa"]),
        "milliseconds": {name: round(1e3 * statistics.median(times), 4) for name, times in seconds.items()},
        "sdpa_over_gqa": ratio(seconds, "sdpa", "gqa"),
    }
    if "read" in seconds:
        record["gqa_over_read"] = ratio(seconds, "gqa", "read")
        record["without_over_read"] = ratio(seconds, next(name for name in WITHOUT.values() if name in seconds), "read")
    if "kernel" in seconds:
        record["kernel_over_read"] = ratio(seconds, "kernel", "read")
    return record


def cells(arguments: argparse.Namespace) -> Iterator[Cell | Step]:
    for threads in arguments.threads:
        for dtype, batch, groups, keys in itertools.product(
            arguments.dtypes, arguments.batches, arguments.groups, arguments.lengths
        ):
            if 2 * batch * groups * keys * WIDTH * DTYPES[dtype].itemsize <= arguments.largest:
                yield Cell(threads, dtype, batch, groups, keys, padded=False)
                if batch == 8 and groups in (4, 8):
                    yield Cell(threads, dtype, batch, groups, keys, padded=True)
        for groups, keys in itertools.product(arguments.step_groups, arguments.step_lengths):
            for cache, compiled in (("dynamic", False), ("static", False), ("static", True)):
                if not compiled or keys in arguments.compiled_lengths:
                    yield Step(threads, groups, keys, cache, compiled)


def table(report: dict[str, Any]) -> str:
    gpu = report["device"] == "cuda"
    lines = [
        f"# Speed of decoding on a {'GPU' if gpu else 'CPU'}",
        "",
        *(f"    {command}" for command in report["commands"]),
        "",
        f"{report['machine']}; {report['versions']}; load average before and after: {report['load_averages']}. {HEADS} query heads with a",
        "head_dim of 128, one query per sequence. Ratios are medians within rounds, with their range. Caches come from memory: successive calls",
        f"read different ones, together more than {report['cold'] >> 20} MiB. Made by `benchmarks/decoding_speed.py`; milliseconds are in the JSON file beside this page.",
        "",
        f'- gqa / read: time of `attn_implementation="gqa"` over that of reading keys and values once {READING[report["device"]]}',
        f"- without / read: the same without {'Triton' if gpu else 'llvmlite'}",
        *["- kernel / read: the same for the kernel alone, also where `gqa` leaves the call to torch"] * gpu,
        "- sdpa / gqa: how many times as long transformers' `sdpa` takes",
        "- padded: a mask hides the last eighth of the keys, and the first eighth in every second sequence",
    ]
    for threads, found in itertools.groupby(report["cells"], key=lambda cell: cell["threads"]):
        records = list(found)
        where = "" if gpu else f", {threads} thread{'s' * (threads > 1)}"
        lines += [
            "",
            f"## Attention{where}",
            "",
            f"| type | batch | K/V heads | keys | gqa, ms | gqa / read | without / read |{' kernel / read |' * gpu} sdpa / gqa |",
            "|---|---|---|---|---|---|---|---|" + "---|" * gpu,
        ]
        for cell in records:
            if "padded" in cell:
                keys = f"{cell['keys']}{', padded' * cell['padded']}"
                names = ["gqa_over_read", "without_over_read", *["kernel_over_read"] * gpu, "sdpa_over_gqa"]
                lines.append(
                    f"| {cell['dtype']} | {cell['batch']} | {cell['groups']} | {keys} | {cell['milliseconds']['gqa']:.3f} "
                    f"| {' | '.join(shown(cell[name]) for name in names)} |"
                )
        lines += [
            "",
            f"## Whole steps{where}",
            "",
            "A Llama of two layers in bfloat16: "
            + ", ".join(f"{name} {size}" for name, size in STEP_SIZES.items())
            + ".",
            "",
            "| K/V heads | keys | cache | torch.compile | gqa, ms | sdpa, ms | sdpa / gqa |",
            "|---|---|---|---|---|---|---|",
        ]
        for cell in records:
            if "cache" in cell:
                times = cell["milliseconds"]
                lines.append(
                    f"| {cell['groups']} | {cell['keys']} | {cell['cache']} | {'yes' if cell['compiled'] else 'no'} | {times['gqa']:.1f} "
                    f"| {times['sdpa']:.1f} | {shown(cell['sdpa_over_gqa'])} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="one table for each, on a CPU")
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8, 32], help="K/V heads")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 32768], help="of the cache")
    parser.add_argument("--largest", type=int, default=1 << 30, help="bytes of a cache beyond which a cell is left out")
    parser.add_argument("--cold", type=int, default=150 << 20, help="bytes of all caches of a cell, at least")
    parser.add_argument("--step-groups", type=int, nargs="*", default=[4], help="K/V heads of whole steps")
    parser.add_argument("--step-lengths", type=int, nargs="*", default=[4096, 32768], help="caches of whole steps")
    parser.add_argument("--compiled-lengths", type=int, nargs="*", default=[4096], help="steps under torch.compile")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per cell, once it had its least rounds")
    parser.add_argument("--least", type=int, default=5, help="rounds of a cell")
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    parser.add_argument("--table", type=Path, help="write the tables here as markdown")
    arguments = parser.parse_args()
    try:
        device = torch.device(chosen_device(arguments.device))
    except OptionError as error:
        parser.exit(2, f"{error}\n")
    if device.type == "cuda":
        arguments.threads = [1]
    load, records = os.getloadavg()[0], []
    for cell in cells(arguments):
        torch.set_num_threads(cell.threads)
        torch.manual_seed(0)
        torch._dynamo.reset()
        with torch.inference_mode():
            calls = (
                attention_calls(cell, arguments.cold, device) if isinstance(cell, Cell) else step_calls(cell, device)
            )
            records.append(summary(cell, measure(calls, arguments.least, arguments.budget, device)))
        if device.type == "cuda" and not cuda.ready:
            parser.exit(
                1, "the Triton kernel does not work here, as the warning above says: there is nothing to compare\n"
            )
        del calls
        gc.collect()
        print(json.dumps(records[-1]), flush=True)
    report = {
        "commands": [" ".join(["python", "-m", "benchmarks.decoding_speed", *sys.argv[1:]])],
        "device": device.type,
        "machine": f"{processor(device)}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}",
        "load_averages": f"{load:.1f}, {os.getloadavg()[0]:.1f}",
        "cold": arguments.cold,
        "cells": records,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.table:
        arguments.table.parent.mkdir(parents=True, exist_ok=True)
        arguments.table.write_text(table(report))


if __name__ == "__main__":
    main()
