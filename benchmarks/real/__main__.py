"""What each method loses on a real model, whose K/V heads are merged into one.

    python -m benchmarks.real smollm2 [--methods mean fit] [--seeds 0 1 2]
    python -m benchmarks.real qwen-0.5b --text code --methods mean closed layers

The folder (`--folder`) contains the models and the text, which are made once:

    python -m benchmarks.real.make_source smollm2 FOLDER/smollm2
    python -m benchmarks.real.text FOLDER/smollm2 FOLDER/text

Each cell is a conversion and its scores by `gqa-convert evaluate`: loss and divergence from the
source by kind of text and window length, and retrieval of facts. What the output has already is not
measured again, so a killed command resumes when it is repeated. `python -m benchmarks.real.report`
writes the tables of docs/results/README.md.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.records import Cell, Records, gqa_convert

from .make_source import MODELS
from .text import KINDS

OUTPUT = Path("docs/results/real.json")
FOLDER = Path("~/.cache/gqa-convert/real")
KV_HEADS = 1
OWN = "self"
METHODS: dict[str, list[str]] = {
    "mean": ["--method", "mean"],
    "first": ["--method", "first"],
    "factor": ["--method", "factor"],
    "default": [],
    "factor-calibrated": ["--method", "factor", "--calibration"],
    "closed": ["--fit-steps", "0", "--kl-steps", "0", "--calibration"],
    "layers": ["--kl-steps", "0", "--calibration"],
    "fit": ["--calibration"],
    "fit-200-last-steps": ["--kl-steps", "200", "--calibration"],
    "unmixed-100-last-steps": ["--no-mix", "--kl-steps", "100", "--calibration"],
    "budget": ["--kv-budget", "47%", "--calibration"],
}
"""The rows of the comparison, by the options of `convert`; those that end in `--calibration` get
text, and all but that with a budget `KV_HEADS`.
"""


def score(
    model: Path, source: Path, options: argparse.Namespace, scores: Cell, records: Records
) -> None:
    """Add what is missing to the scores of a model, which may be the source itself."""
    against = [] if model == source else ["--reference", source]
    asked = ["evaluate", model, *against, "--dtype", options.dtype]
    for window in options.windows:
        for kind in KINDS:
            measured = scores.setdefault("loss", {}).setdefault(kind, {})
            if str(window) not in measured:
                text = ["--data", options.folder / "text" / f"{kind}-held-out.jsonl"]
                found, _ = gqa_convert(
                    *asked, *text, "--tokens", str(options.tokens), "--window", str(window)
                )
                measured[str(window)] = losses(found["results"][0])
                records.write()
    if "retrieval" not in scores and options.lengths:
        lengths = ",".join(map(str, options.lengths))
        found, _ = gqa_convert(
            *asked, "--retrieval", "--lengths", lengths, "--questions", str(options.questions)
        )
        scores["retrieval"] = retrieval(found["results"][0]["retrieval"])
        records.write()


def losses(found: dict[str, Any]) -> Cell:
    """The loss, the excess over the source's and the divergence from it, with standard errors."""
    difference = found["difference"] or {"loss": 0.0, "loss_standard_error": 0.0}
    return {
        "tokens": found["tokens"],
        "loss": found["loss"],
        "loss_error": found["loss_standard_error"],
        "excess": difference["loss"],
        "excess_error": difference["loss_standard_error"],
        "kl": found["kl"] or 0.0,
        "kl_error": found["kl_standard_error"] or 0.0,
    }


def retrieval(found: list[dict[str, Any]]) -> dict[str, Cell]:
    """The shares that a model finds at each length, and of each kind."""
    cells: dict[str, Cell] = {}
    for each in found:
        if each["length"] is not None:
            cell = cells.setdefault(str(each["length"]), {"by_kind": {}})
            if each["kind"] is None:
                cell |= {
                    "questions": each["questions"],
                    "found": each["found"],
                    "found_error": each["found_standard_error"],
                }
            else:
                cell["by_kind"][each["kind"]] = each["found"]
    return cells


def measure(
    method: str, seed: int | None, source: Path, options: argparse.Namespace, records: Records
) -> None:
    """Convert by a method, and score the result."""
    text = None if seed is None else "+".join(options.text)
    keys = {
        "calibration": text,
        "calibration_tokens": options.calibration_tokens if text else None,
        "seed": seed,
    }
    cell = records.cell(model=source.name, kv_heads=KV_HEADS, method=method, **keys)
    out = options.folder / "converted" / f"{source.name}-{method}-{text}-{seed}"
    given: list[str | Path] = list(METHODS[method])
    if "--kv-budget" not in given:
        given = ["--kv-heads", str(KV_HEADS), *given]
    if text:
        files = [
            name if name == OWN else options.folder / "text" / f"{name}-calibration.jsonl"
            for name in options.text
        ]
        given += [files[0], *(each for name in files[1:] for each in ("--calibration", name))]
        given += ["--seed", str(seed)]
        given += (
            ["--calibration-tokens", str(options.calibration_tokens)]
            if options.calibration_tokens
            else []
        )
    scored = all(
        str(window) in cell.get("loss", {}).get(KINDS[-1], {}) for window in options.windows
    )
    if scored and ("retrieval" in cell or not options.lengths):
        return
    if not out.exists():
        _, took = gqa_convert("convert", source, out, *given)
        cell |= took
        records.write()
    score(out, source, options, cell, records)
    if not options.keep:
        shutil.rmtree(out)
    sys.stderr.write(f"{method}, seed {seed}: {cell['loss']}, {cell['minutes']} min\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="of models and text (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file (%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="of calibration (default: 0 1 2)"
    )
    parser.add_argument(
        "--text",
        nargs="+",
        choices=("mixed", OWN, *KINDS),
        default=["mixed"],
        help="of calibration, in equal shares; self is the source's own (mixed)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=8192,
        help="held-out, per kind of text and window (%(default)s)",
    )
    parser.add_argument(
        "--windows", nargs="+", type=int, default=[512, 2048], help="lengths (default: 512 2048)"
    )
    parser.add_argument(
        "--lengths", nargs="*", type=int, default=[512, 1024, 2048, 4096], help="of --retrieval"
    )
    parser.add_argument(
        "--questions", type=int, default=24, help="of each kind at each length (%(default)s)"
    )
    parser.add_argument("--calibration-tokens", type=int, help="default: the converter's own")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of scoring (%(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the results in FOLDER/converted")
    options = parser.parse_args(arguments)
    options.folder = options.folder.expanduser()
    source = options.folder / options.model
    records = Records(
        options.output,
        ("model", "kv_heads", "method", "calibration", "calibration_tokens", "seed"),
        "benchmarks.real",
    )
    own = records.data["models"].setdefault(options.model, {}).setdefault("scores", {})
    score(source, source, options, own, records)
    for method in options.methods:
        calibrated = METHODS[method][-1:] == ["--calibration"]
        for seed in options.seeds if calibrated else [None]:
            measure(method, seed, source, options, records)


if __name__ == "__main__":
    main()
