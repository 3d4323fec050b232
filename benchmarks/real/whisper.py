"""What merging the decoder of a model that hears loses: Whisper base, whose 8 K/V heads become 4, 2
and 1.

    python -m benchmarks.real.whisper --source openai/whisper-base --folder FOLDER [--kv-heads 2 1]
    [--seeds 0 1]

FOLDER gets the spoken sentences and the results; what it and the output hold is not made again, and
a killed command resumes when it is repeated. Each seed of calibration has sentences of its own. The
table goes into docs/results/README.md.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.pages import filled, table
from benchmarks.records import Cell, Records, gqa_convert

from .spoken import speak

OUTPUT, PAGE = Path("docs/results/whisper.json"), Path("docs/results/README.md")
METHODS = {
    "mean": "`--method mean`",
    "layers": "`fit` without its last stage (`--kl-steps 0`)",
    "no-texts": "`fit` on sound without texts",
    "fit": "`fit`, the default",
}
CALIBRATION_SENTENCES = 500


def scored(model: str | Path, source: str | Path, folder: Path) -> Cell:
    """Loss and divergence per token, and word errors, on the held-out sentences."""
    against = [] if model == source else ["--reference", source]
    found, _ = gqa_convert("evaluate", model, *against, "--data", folder / "held-out")
    scores = found["results"][0]
    difference = scores["difference"] or {}
    return {
        "loss": scores["loss"],
        "kl": scores["kl"],
        "word_errors": scores["word_error_rate"],
        "word_errors_error": scores["word_error_rate_standard_error"],
        "more": difference.get("word_error_rate"),
        "more_error": difference.get("word_error_rate_standard_error"),
    }


def spoken(folder: Path, count: int, *, held_out: bool, seed: int) -> Path:
    """A folder of sentences, which is made if it is not there."""
    if not folder.is_dir():
        speak(folder, count, held_out=held_out, seed=seed)
    return folder


def measure(cell: Cell, options: argparse.Namespace) -> None:
    """Convert by the cell's method, and score the result."""
    method, kv_heads, seed = cell["method"], cell["kv_heads"], cell["seed"]
    given: list[str | Path] = ["--method", "mean"]
    if method != "mean":
        sound = spoken(
            options.folder / f"calibration-{seed}", CALIBRATION_SENTENCES, held_out=False, seed=seed
        )
        given = [
            "--calibration",
            sound,
            "--seed",
            str(seed),
            *(["--kl-steps", "0"] if method == "layers" else []),
        ]
    out = options.folder / f"{method}-{kv_heads}-{seed}"
    _, took = gqa_convert(
        "convert", options.source, out, "--kv-heads", str(kv_heads), "--overwrite", *given
    )
    cell |= {"minutes": took["core_minutes"], **scored(out, options.source, options.folder)}


def report(data: dict[str, Any]) -> str:
    """The table: means over seeds, standard errors over sentences."""
    source = data["models"]["whisper-base"]["scores"]
    errors = f"{source['word_errors']:.1%} ± {100 * source['word_errors_error']:.1f}"
    rows = [["8", "source", "", "", f"{source['loss']:.2f}", "", errors, ""]]
    found: dict[tuple[int, str], list[Cell]] = {}
    for cell in data["cells"]:
        found.setdefault((cell["kv_heads"], cell["method"]), []).append(cell)
    for kv_heads, method in sorted(found, key=lambda key: (-key[0], list(METHODS).index(key[1]))):
        cells = found[kv_heads, method]
        row = [str(kv_heads), METHODS[method], str(len(cells)) if method != "mean" else ""]
        row.append(f"{statistics.mean(cell['minutes'] for cell in cells):.0f}")
        row.append(over_seeds([cell["loss"] for cell in cells], "{:.2f}"))
        row.append(over_seeds([cell["kl"] for cell in cells], "{:.3f}"))
        row.append(over_seeds([cell["word_errors"] for cell in cells], "{:.1%}"))
        added = over_seeds([100 * cell["more"] for cell in cells], "{:+.1f}")
        rows.append(
            [*row, f"{added} ± {100 * statistics.mean(cell['more_error'] for cell in cells):.1f}"]
        )
    header = [
        "K/V heads",
        "method",
        "seeds",
        "core minutes",
        "loss",
        "KL",
        "word errors",
        "more than the source",
    ]
    return table(header, rows)


def over_seeds(values: list[float], form: str) -> str:
    """The mean, and the range of several."""
    shown = form.format(statistics.mean(values))
    ends = [form.format(each) for each in (min(values), max(values))]
    return shown if len(values) == 1 else f"{shown} ({' to '.join(ends)})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", default="openai/whisper-base", help="folder or Hub id (%(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/gqa-convert/whisper"))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument(
        "--methods", nargs="+", choices=("mean", "layers", "fit"), default=["fit", "layers", "mean"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sentences", type=int, default=200, help="held out (default: 200)")
    options = parser.parse_args()
    options.folder = options.folder.expanduser()
    spoken(options.folder / "held-out", options.sentences, held_out=True, seed=0)
    records = Records(options.output, ("method", "kv_heads", "seed"), "benchmarks.real.whisper")
    source = records.data["models"].setdefault("whisper-base", {})
    if "scores" not in source:
        source["scores"] = scored(options.source, options.source, options.folder)
    for seed in options.seeds:
        for kv_heads in options.kv_heads:
            for method in options.methods:
                cell = records.cell(
                    model="whisper-base", method=method, kv_heads=kv_heads, seed=seed
                )
                if "loss" not in cell and (method != "mean" or not seed):
                    measure(cell, options)
                    records.write()
    PAGE.write_text(
        filled(PAGE.read_text(encoding="utf-8"), "whisper", report(records.data)), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
