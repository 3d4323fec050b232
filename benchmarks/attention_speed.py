"""Attention with shared K/V heads: ours, transformers', torch's, full multi-head attention, and the time to read the
cache once.

    python benchmarks/attention_speed.py --threads 1 2 --output docs/results/attention-cpu.json --table
    docs/results/attention-cpu.md python benchmarks/attention_speed.py --device cuda --output
    docs/results/attention-cuda.json --table docs/results/attention-cuda.md python benchmarks/attention_speed.py --quick
    (a few cells, to look at while working)

Every round of a cell runs each contender once, in an order that alternates; the figure to read is the ratio within a
round, as a median with its range. A contender that takes less than a few milliseconds is repeated within its turn.
Tensors stay the same from call to call, so that a small cache stays in the processor's: for every contender alike, the
limit included.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from gqa_convert.attention import grouped_query_attention
from gqa_convert.attention.interface import attention_forward

HEADS, WIDTH = 32, 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = ("decode", "decode, padded", "prefill", "prefill, padded", "training")
STOCK = ("transformers sdpa", "transformers eager", "torch enable_gqa")
EAGER_LIMIT = 2**31
"""Bytes of float32 scores beyond which transformers' eager attention is left out."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    threads: int
    kind: str
    dtype: str
    groups: int
    length: int


class Layer(nn.Module):  # type: ignore[misc]  # torch is not followed
    """What transformers' functions ask of an attention layer."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = HEADS // groups
        self.is_causal = True


def contenders(cell: Cell, device: torch.device) -> dict[str, Call]:
    """The functions to time, each on the same tensors; "read" is the physical limit of decoding."""
    batch = 2 if "padded" in cell.kind else 1
    queries = 1 if cell.kind.startswith("decode") else cell.length
    dtype, training = DTYPES[cell.dtype], cell.kind == "training"

    def made(heads: int, length: int) -> Tensor:
        few = torch.randn(batch, heads, min(length, 512), WIDTH, device=device).to(dtype)
        return few.repeat(1, 1, -(-length // 512), 1)[:, :, :length].contiguous().requires_grad_(training)

    query, key, value = made(HEADS, queries), made(cell.groups, cell.length), made(cell.groups, cell.length)
    full_key, full_value = (
        (key, value) if cell.groups == HEADS else (made(HEADS, cell.length), made(HEADS, cell.length))
    )
    seen: Tensor | None = None
    if batch == 2:  # the second row of the batch is padded on the left by an eighth
        padding = torch.ones(batch, 1, 1, cell.length, dtype=torch.bool, device=device)
        padding[1, :, :, : cell.length // 8] = False
        seen = padding
        if queries > 1:
            order = torch.ones(queries, cell.length, dtype=torch.bool, device=device).tril()
            # transformers lets rows of padding see themselves, as some kernels make NaN of rows that see nothing
            seen = (padding & order) | torch.eye(cell.length, dtype=torch.bool, device=device)
    shown = seen
    if shown is None and queries > 1:
        shown = torch.ones(queries, cell.length, dtype=torch.bool, device=device).tril()[None, None]
    added = (
        None
        if shown is None
        else torch.zeros(shown.shape, dtype=dtype, device=device).masked_fill(~shown, torch.finfo(dtype).min)
    )
    causal = queries > 1 and seen is None
    layer, scale = Layer(cell.groups).train(training), WIDTH**-0.5
    calls: dict[str, Call] = {
        "ours": lambda: grouped_query_attention(query, key, value, mask=seen, causal=causal),
        "ours in transformers": lambda: attention_forward(layer, query, key, value, seen, scaling=scale)[0],
        "transformers sdpa": lambda: sdpa_attention_forward(layer, query, key, value, seen, scaling=scale)[0],
        "transformers eager": lambda: eager_attention_forward(layer, query, key, value, added, scaling=scale)[0],
        "torch enable_gqa": lambda: scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=causal, enable_gqa=True
        ),
        "full MHA": lambda: scaled_dot_product_attention(query, full_key, full_value, attn_mask=seen, is_causal=causal),
    }
    if batch * HEADS * queries * cell.length * 4 > EAGER_LIMIT:
        del calls["transformers eager"]
    if cell.length <= 1024:
        check(calls)
    if training:
        calls = {name: backward(call, [query, key, value, full_key, full_value], query) for name, call in calls.items()}
    if cell.kind.startswith("decode"):
        first, second = key.view(-1).view(torch.float32), value.view(-1).view(torch.float32)
        calls["read by dot"] = lambda: torch.dot(first, second)
        calls["read by sum"] = lambda: (first.sum(), second.sum())
    return calls


def backward(call: Call, inputs: list[Tensor], like: Tensor) -> Call:
    """The call with its backward pass."""
    gradient = torch.randn_like(like)

    def step() -> None:
        for tensor in inputs:
            tensor.grad = None
        out: Any = call()
        out.backward(gradient if out.shape == gradient.shape else gradient.transpose(1, 2))

    return step


def check(calls: dict[str, Call]) -> None:
    """All contenders but full MHA, whose weights differ, compute the same."""
    with torch.no_grad():
        expected: Any = calls["ours"]()
        for name, call in calls.items():
            if name != "full MHA":
                out: Any = call()
                out = out if name in ("ours", "torch enable_gqa") else out.transpose(1, 2)
                torch.testing.assert_close(
                    out, expected, rtol=0.02, atol=0.02 if expected.element_size() == 2 else 1e-4
                )


def measure(cell: Cell, device: torch.device, budget: float, least: int, most: int) -> dict[str, list[float]]:
    """Seconds per call of every contender in every round."""
    torch.set_num_threads(cell.threads)
    torch.manual_seed(0)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with torch.set_grad_enabled(cell.kind == "training"):
        calls = contenders(cell, device)

        def turn(call: Call, repeats: int) -> float:
            sync()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            sync()
            return (time.perf_counter() - began) / repeats

        repeats = {}
        for name, call in calls.items():
            first = turn(call, 1)
            repeats[name] = 1 if first > 0.1 else max(1, int(0.003 / turn(call, 1)))
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        began = time.perf_counter()
        for number in range(most):
            for name in calls if number % 2 == 0 else reversed(calls):
                seconds[name].append(turn(calls[name], repeats[name]))
            if number + 1 >= least and time.perf_counter() - began > budget:
                break
    if "read by dot" in seconds:
        seconds["read"] = [
            min(pair) for pair in zip(seconds.pop("read by dot"), seconds.pop("read by sum"), strict=True)
        ]
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    return {"min": round(min(values), 3), "median": round(statistics.median(values), 3), "max": round(max(values), 3)}


def summary(cell: Cell, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """How many times ours' time each contender takes, and ours over the best of the stock paths and over the limit."""
    ours = seconds["ours"]
    ratios = {
        name: spread([x / y for x, y in zip(times, ours, strict=True)])
        for name, times in seconds.items()
        if name != "ours"
    }
    best = min((name for name in STOCK if name in seconds), key=lambda name: statistics.median(seconds[name]))
    inside = seconds["ours in transformers"]
    return {
        **vars(cell),
        "rounds": len(ours),
        "milliseconds": {name: round(1e3 * statistics.median(times), 4) for name, times in seconds.items()},
        "times_ours": ratios,
        "best_stock": best,
        "ours_over_best_stock": spread([x / y for x, y in zip(ours, seconds[best], strict=True)]),
        "ours_in_transformers_over_its_sdpa": spread(
            [x / y for x, y in zip(inside, seconds["transformers sdpa"], strict=True)]
        ),
        "ours_over_read": spread([x / y for x, y in zip(ours, seconds["read"], strict=True)])
        if "read" in seconds
        else None,
    }


def as_json(report: dict[str, Any]) -> str:
    """One line per cell."""
    head = json.dumps({name: value for name, value in report.items() if name != "cells"}, indent=1)
    return head[:-2] + ',\n "cells": [\n  ' + ",\n  ".join(map(json.dumps, report["cells"])) + "\n ]\n}"


def unrest(record: dict[str, Any]) -> float:
    """How widely the ratios of a cell are spread."""
    shown = [record[name] for name in ("ours_over_best_stock", "ours_in_transformers_over_its_sdpa", "ours_over_read")]
    return float(max(ratio["max"] / ratio["min"] for ratio in shown if ratio))


def disturbance(record: dict[str, Any]) -> float:
    """The time of all contenders together: other work on the machine only adds to it, and evens out ratios where
    threads wait for each other.
    """
    return float(sum(record["milliseconds"].values()))


def following(records: dict[Cell, dict[str, Any] | None], tries: dict[Cell, int], more: bool) -> Cell | None:
    """The next cell to measure: one without figures; then, if there is time, the most doubtful for its number of
    tries.
    """
    for cell, record in records.items():
        if record is None:
            return cell
    doubts = {}
    for cell, record in records.items():
        assert record
        fewer = [
            other for other in records if other.threads < cell.threads and replace(other, threads=cell.threads) == cell
        ]
        slower = max((disturbance(record) / disturbance(records[other] or record) for other in fewer), default=0.0)
        doubt = max(unrest(record), 5 * slower if slower > 0.9 else 0.0)
        if doubt > 1.3 and tries[cell] < 5:
            doubts[cell] = doubt / 2 ** tries[cell]
    return max(doubts, key=lambda cell: doubts[cell]) if doubts and more else None


def table(report: dict[str, Any]) -> str:
    """The figures as markdown: one table per kind and number of threads."""
    lines = [
        "# Speed of attention",
        "",
        *(f"    {command}" for command in report["commands"]),
        "",
        f"{report['machine']}; {report['versions']}. {HEADS} query heads of width {WIDTH}. How many times as long as ours each contender takes",
        "(median of the ratios within a round, range in brackets): above 1, ours is faster. Made by `benchmarks/attention_speed.py`; absolute",
        "times are in the JSON file beside this page.",
        "",
        "- ours: `grouped_query_attention`; in transformers: ours as its attention implementation `gqa`",
        "- sdpa, eager: transformers' own attention implementations, as its models call them; enable_gqa: torch's function",
        f"- full MHA: torch's function with {HEADS} K/V heads",
        "- ours / read: our time over that of reading keys and values once with the same threads, by the faster of a dot product and sums",
        "- ours / best: our time over that of the fastest among sdpa, eager and enable_gqa in that cell",
        "",
        "Padded cells have two rows in the batch and a boolean mask that hides an eighth of the second.",
        f"Eager attention is left out where its scores would exceed {EAGER_LIMIT >> 30} GiB. Load averages of the machine before and after each",
        f"run: {', '.join(map(str, report['load_averages']))}. Disturbed cells (a wide range, or slower than with fewer threads) were measured again;",
        "that measurement is shown in which all contenders together took the least time.",
        *([report["note"]] if "note" in report else []),
    ]
    names = {
        "transformers sdpa": "sdpa",
        "transformers eager": "eager",
        "torch enable_gqa": "enable_gqa",
        "full MHA": "full MHA",
    }
    for (threads, kind), cells in itertools.groupby(report["cells"], key=lambda cell: (cell["threads"], cell["kind"])):
        reads = kind.startswith("decode")
        where = "" if report["device"] == "cuda" else f", {threads} thread{'s' if threads > 1 else ''}"
        header = [
            "type",
            "K/V heads",
            "length",
            *names.values(),
            "in transformers / sdpa",
            "ours / best",
            *["ours / read"] * reads,
        ]
        lines += [
            "",
            f"## {kind[0].upper()}{kind[1:]}{where}",
            "",
            f"| {' | '.join(header)} |",
            "|" + "---|" * len(header),
        ]
        for cell in cells:
            row = [cell["dtype"], str(cell["groups"]), str(cell["length"])]
            row += [shown(cell["times_ours"].get(name)) for name in names]
            row += [shown(cell["ours_in_transformers_over_its_sdpa"]), shown(cell["ours_over_best_stock"])]
            row += [shown(cell["ours_over_read"])] * reads
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def shown(values: dict[str, float] | None) -> str:
    return "" if values is None else f"{values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"


def processor(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        names = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="one table for each, on a CPU")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 32], help="K/V heads")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 4096, 16384], help="of the cache")
    parser.add_argument(
        "--longest-prefill", type=int, default=4096, help="more than these --lengths are left out of prefill"
    )
    parser.add_argument(
        "--longest-padded", type=int, default=512, help="more than these --lengths are left out of padded prefill"
    )
    parser.add_argument(
        "--training", type=int, nargs="+", default=[512, 1024, 2048], help="lengths of the training step"
    )
    parser.add_argument(
        "--long-groups",
        type=int,
        nargs="+",
        default=[4],
        help="K/V heads of prefill over 1024 and training over 512 tokens",
    )
    parser.add_argument(
        "--calm",
        type=float,
        default=120.0,
        help="seconds after the start until which cells with a wide spread are repeated",
    )
    parser.add_argument("--resume", type=Path, help="a report whose cells are taken over")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per cell, once it had its least rounds")
    parser.add_argument("--rounds", type=int, nargs=2, default=[3, 15], metavar=("LEAST", "MOST"))
    parser.add_argument("--quick", action="store_true", help="few cells and rounds")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    parser.add_argument("--table", type=Path, help="write the tables here as markdown")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.groups, arguments.lengths, arguments.training, arguments.budget, arguments.longest_prefill = (
            [4],
            [512, 4096],
            [512],
            0.2,
            512,
        )
    device, limits = torch.device(arguments.device), (arguments.longest_prefill, arguments.longest_padded)
    lengths = dict.fromkeys(KINDS, arguments.lengths) | {"training": arguments.training}
    lengths |= {
        kind: [n for n in arguments.lengths if n <= limit]
        for kind, limit in zip(("prefill", "prefill, padded"), limits, strict=True)
    }
    threads = arguments.threads if device.type == "cpu" else [torch.get_num_threads()]
    wanted = [
        Cell(count, kind, dtype, groups, length)
        for count, kind, dtype, groups in itertools.product(
            threads, arguments.kinds, arguments.dtypes, arguments.groups
        )
        for length in lengths[kind]
        if groups in arguments.long_groups or length <= {"prefill": 1024, "training": 512}.get(kind, length)
    ]
    earlier = (
        json.loads(arguments.resume.read_text())
        if arguments.resume
        else {"cells": [], "commands": [], "load_averages": []}
    )
    found = {tuple(record[name] for name in Cell.__annotations__): record for record in earlier["cells"]}
    records = {cell: found.get(tuple(vars(cell).values())) for cell in wanted}
    load, began, tries = os.getloadavg()[0], time.perf_counter(), dict.fromkeys(wanted, 0)
    while cell := following(records, tries, time.perf_counter() - began < arguments.calm):
        record = summary(cell, measure(cell, device, arguments.budget, *arguments.rounds))
        tries[cell] += 1
        records[cell] = min(record, records[cell] or record, key=disturbance)
        if not arguments.json:
            print(
                f"{cell.threads} {cell.kind:<16}{cell.dtype:<9}{cell.groups:>3}{cell.length:>6}  {record['milliseconds']['ours']:9.3f} ms  "
                + "  ".join(f"{name} {ratio['median']:.2f}" for name, ratio in record["times_ours"].items()),
                flush=True,
            )
    report = {
        "commands": [*earlier["commands"], " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])],
        "device": device.type,
        "machine": f"{processor(device)}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}",
        "capability": torch.backends.cpu.get_cpu_capability()
        if device.type == "cpu"
        else list(torch.cuda.get_device_capability(device)),
        "load_averages": [*earlier["load_averages"], round(load, 2), round(os.getloadavg()[0], 2)],
        "cells": list(records.values()),
    }
    if arguments.json:
        print(as_json(report))
    for path, text in ((arguments.output, as_json(report) + "\n"), (arguments.table, table(report))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main()
