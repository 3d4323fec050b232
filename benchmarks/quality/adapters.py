"""What training adapters recovers, beside training all weights, on the same tokens.

    python -m benchmarks.quality.adapters [--tokens 50000] [--output docs/results/adapters.json]

The bundled model is converted by mean pooling and trained with its source as teacher, by `recipes/tiny.yaml` with
another budget. Each cell is a run with one learning rate; its loss is that on held-out text at the end. Cells that the
output has already are not measured again.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.records import Records
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.demo.files import CHECKPOINT
from gqa_convert.training.uptrain import uptrain_checkpoint

OUTPUT = Path("docs/results/adapters.json")
HELD_OUT_TOKENS = 8192
WAYS: dict[str, str] = {
    "all weights": "null",
    "rank 8, attention": "{rank: 8, targets: attention}",
    "rank 8, all-linear": "{rank: 8, targets: all-linear}",
    "rank 64, all-linear": "{rank: 64, targets: all-linear}",
}


def run(model: Path, way: str, learning_rate: float, tokens: int, folder: Path) -> dict[str, Any]:
    """One run: its loss at the start, of the source and at the end, in nats per token."""
    overrides = [
        f"model={model}",
        f"output={folder / 'run'}",
        f"lora={WAYS[way]}",
        f"learning_rate={learning_rate}",
        f"tokens={tokens}",
        "tokens_per_step=1024",
        "save_every=1000",
        f"evaluation_tokens={HELD_OUT_TOKENS}",
        "evaluate_every=null",
    ]
    summary = uptrain_checkpoint("recipes/tiny.yaml", overrides)
    assert summary is not None
    assert summary.evaluation is not None
    evaluation = summary.evaluation
    return {
        "start": round(evaluation.start, 4),
        "source": round(evaluation.source or 0.0, 4),
        "loss": round(evaluation.final, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    records = Records(arguments.output, ("way", "learning_rate", "tokens"))
    records.begin("benchmarks.quality.adapters", HELD_OUT_TOKENS)
    with tempfile.TemporaryDirectory() as home:
        model = Path(home) / "model"
        convert_checkpoint(CHECKPOINT, model, 3, method="mean")
        for way in arguments.ways:
            for rate in arguments.learning_rates:
                keys = {"way": way, "learning_rate": rate, "tokens": arguments.tokens}
                if records.find(**keys) is not None:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    cell = keys | run(model, way, rate, arguments.tokens, Path(folder))
                records.add(cell)
                sys.stdout.write(f"{way}, {rate:g}: {cell['start']} -> {cell['loss']}, source {cell['source']}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
