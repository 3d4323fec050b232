"""T5-XXL's decoder against the number of K/V heads, as in Figure 6 of Ainslie et al. 2023, beside the paper's own
numbers.

    python benchmarks/paper_time.py --batch 1 8 32 64 --output paper-time.json --table paper-time.md --plot
    paper-time.svg

A few of its 24 layers are timed with random weights; 2048 tokens of input, 512 decoded, so that a step meets 256 cached
tokens on average.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from gqa_convert.measuring.benchmark import BenchmarkOptions, benchmark_model

PAPER = {64: ("MHA-XXL", 1.51, 47.2), 8: ("GQA-8-XXL", 0.28, 47.1), 1: ("MQA-XXL", 0.24, 46.6)}
"""Name, seconds per sample and average quality of Table 1; MHA-Large takes 0.37 s for 46.0."""
FASTER_THAN_MHA, OF_MQA = 5.4, 1.17
"""What the paper's times say of GQA-8."""
CONFIG = Path(__file__).parent.parent / "recipes" / "paper" / "t5-xxl.json"


def ratios(records: list[dict[str, Any]], key: str) -> tuple[dict[int, float], dict[int, float]]:
    """How many times faster than multi-head attention each N is, and how many times multi-query attention's time it
    takes.
    """
    values = {record["groups"]: record[key] for record in records}
    most, least = max(values), min(values)
    return {n: values[most] / value for n, value in values.items()}, {
        n: value / values[least] for n, value in values.items()
    }


def table(result: dict[str, Any]) -> str:
    """The figures as markdown, a table for each batch."""
    machine = result["machine"]
    speeds = [record["memory_bytes_per_second"] / 1e9 for record in result["results"]]
    lines = [
        "# T5-XXL's decoder against the number of K/V heads",
        "",
        f"    {result['command'] and ' '.join(result['command'])}",
        "",
        f"{machine['processor']}, {machine['device']}, {result['threads']} threads, {result['dtype']}, torch {machine['versions']['torch']};",
        f"{result['layers']} of {result['model_layers']} layers, attention function `{result['attention']}`;",
        f"memory read at {min(speeds):.1f} to {max(speeds):.1f} GB/s during the run.",
        "",
        "- attention: self- and cross-attention modules of a decode step (projections, cache, position bias), ms",
        "- projections: the linear maps in it that run at a decode step, ms",
        "- floor: to read those maps' weights and the K/V cache once at the memory speed of the same run, ms; in brackets the ratios of the floors",
        "- sample: seconds per sequence for 512 tokens and, where it was timed, prefill; the whole model, **estimated** from the layers' time",
        "- paper: seconds per sample on TPUv4 (Ainslie et al. 2023, Table 1)",
    ]
    for batch in dict.fromkeys(record["batch"] for record in result["results"]):
        records = [record for record in result["results"] if record["batch"] == batch]
        ours, floors = ratios(records, "attention_ms_per_token"), ratios(records, "attention_floor_ms_per_token")
        lines += [
            "",
            f"## Batch {batch}",
            "",
            "| N | attention | projections | floor | attention / floor | faster than MHA | times MQA | step | sample | paper |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for record in records:
            n = record["groups"]
            attention, floor = record["attention_ms_per_token"], record["attention_floor_ms_per_token"]
            sample = (record["prefill_ms"] or 0.0) * result["model_layers"] / result["layers"] + 512 * record[
                "estimated_decode_ms_per_token"
            ]
            lines.append(
                f"| {n} | {attention:.1f} | {record['attention_projections_ms_per_token']:.1f} | {floor:.1f} | {attention / floor:.2f} "
                f"| {ours[0][n]:.2f} ({floors[0][n]:.2f}) | {ours[1][n]:.2f} ({floors[1][n]:.2f}) | {record['decode_ms_per_token']:.1f} "
                f"| {sample / 1e3 / batch:.1f} | {PAPER[n][1] if n in PAPER else ''} |"
            )
        if any(record["groups"] == 8 for record in records):
            lines += [
                "",
                f"GQA-8: {ours[0][8]:.2f} times faster than MHA (paper {FASTER_THAN_MHA}), {ours[1][8]:.2f} times MQA (paper {OF_MQA}).",
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", help="cpu or cuda; by default a GPU if there is one")
    parser.add_argument("--prefill", action="store_true", help="time the encoder too, which is the same for every N")
    parser.add_argument("--output", type=Path, help="write the measurement here as JSON")
    parser.add_argument("--table", type=Path, help="write the tables here as markdown; else they are printed")
    parser.add_argument("--plot", type=Path, help="draw time against N here")
    given = parser.parse_args()
    options = BenchmarkOptions(
        groups=tuple(given.groups),
        batch=tuple(given.batch),
        context=(256,),
        encoder_tokens=2048,
        new_tokens=512,
        steps=given.steps,
        repetitions=given.repetitions,
        layers=given.layers,
        dtype=given.dtype,
        device=given.device,
        prefill=given.prefill,
        breakdown=True,
    )
    command = [
        "python",
        "benchmarks/paper_time.py",
        "--batch",
        *map(str, given.batch),
        "--layers",
        str(given.layers),
        "--dtype",
        given.dtype,
    ]
    result = benchmark_model(config=CONFIG, options=options, plot=given.plot, command=command).as_json()
    result |= {
        "model": "T5-XXL",
        "paper": {str(n): {"name": name, "sample_s": time, "quality": q} for n, (name, time, q) in PAPER.items()},
    }
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if given.table:
        given.table.write_text(table(result), encoding="utf-8")
    else:
        print(table(result))


if __name__ == "__main__":
    main()
