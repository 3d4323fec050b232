"""The memory that the last stage of `fit` takes on a CPU beside the weights of its source, against
what is estimated.

    python -m benchmarks.last_stage_memory

Each shape is a process of its own, with random weights: what it takes does not depend on them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.pages import table
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.layers.last_stage import Student, train_together
from gqa_convert.conversion.layers.layer_store import LayerStore, SharedStore, layer_key
from gqa_convert.conversion.layers.model_loading import open_model, precision_of
from gqa_convert.conversion.layers.source_layers import SourceLayer, layouts_of, open_layers
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.resources import holds_halves, is_reduced, last_stage_bytes
from gqa_convert.merging.attention_heads import Tensors, regroup_heads

TOKENS = 1024
SHAPES = {
    "wide": {
        "hidden_size": 2048,
        "num_hidden_layers": 3,
        "intermediate_size": 5632,
        "vocab_size": 32_000,
    },
    "deep": {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "intermediate_size": 2816,
        "vocab_size": 32_000,
    },
    "many words": {
        "hidden_size": 896,
        "num_hidden_layers": 4,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
    },
}
HEADS, KV_HEADS = 16, 4


def measure(shape: str, *, recompute: bool) -> dict[str, float]:
    """The bytes that were estimated, and by how much the peak of this process grew."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        config = LlamaConfig(
            **SHAPES[shape], num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=64
        )
        LlamaForCausalLM(config).bfloat16().save_pretrained(source)
        plan = make_plan(open_checkpoint(source), KV_HEADS, method="factor")
        with LayerStore(Path(folder) / "out", {}, keep=False) as store:
            layouts = layouts_of(plan)
            with open_layers(plan) as read_layer:
                for number, (layer, kv_heads) in enumerate(plan.merged_layers):
                    source_layer = read_layer(layouts[layer.module])
                    store.write(layer_key(number), pooled(source_layer, kv_heads), {})
            model = open_model(source, halves=holds_halves(plan, "cpu"))
            batches = [{"input_ids": torch.randint(config.vocab_size, (1, TOKENS))}]
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = peak()
            shared = SharedStore(store)
            cpu = torch.device("cpu")
            precision = precision_of(is_reduced(plan, cpu), cpu)
            student = Student(plan, shared, model, precision, recompute=recompute)
            train_together(student, shared, batches, [0, 0], {}, lambda _: None)
            estimated = last_stage_bytes(plan, TOKENS, "cpu", recompute=recompute)
            return {"estimated": estimated, "measured": peak() - before}


def pooled(layer: SourceLayer, kv_heads: int) -> Tensors:
    """A layer's tensors with pooled heads."""
    heads = layer.layout.split_heads(layer.tensors)
    keys, values = regroup_heads(heads.keys, kv_heads), regroup_heads(heads.values, kv_heads)
    return layer.layout.merge_heads(
        replace(heads, keys=keys, values=values), layer.tensors, kv_heads
    )


def peak() -> int:
    """Bytes of this process's memory at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, help="only this one, as JSON")
    parser.add_argument(
        "--recompute", action="store_true", help="of --shape: compute activations again"
    )
    options = parser.parse_args()
    if options.shape:
        print(json.dumps(measure(options.shape, recompute=options.recompute)))
        return
    lines = []
    for shape in SHAPES:
        for flags in ([], ["--recompute"]):
            command = [
                sys.executable,
                "-m",
                "benchmarks.last_stage_memory",
                "--shape",
                shape,
                *flags,
            ]
            found = json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
            sizes = [f"{found[name] / 1e9:.2f}" for name in ("measured", "estimated")]
            lines.append(
                [
                    shape,
                    "again" if flags else "kept",
                    *sizes,
                    f"{found['estimated'] / found['measured']:.2f}",
                ]
            )
    print(table(["shape", "activations", "measured, GB", "estimated, GB", "ratio"], lines))


if __name__ == "__main__":
    main()
