"""What `convert --calibration` would do with models of 7 to 70 billion parameters on GPUs of
several sizes and numbers.

    python -m benchmarks.dry_runs

The checkpoints are sparse files with the shapes of the real ones; the GPUs are stated, not there.
Prints a table for docs/converting.md.
"""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.estimate import Needs, estimate_needs
from gqa_convert.conversion.options import CalibrationOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.runtime.machine import STATED
from gqa_convert.runtime.messages import about

GPUS = ((1, 24, "RTX 4090"), (1, 48, "L40S"), (1, 80, "H100"), (8, 80, "H100"))
"""How many there are, with a process each, the free memory of each in GB, and its type."""


class Shape(NamedTuple):
    """A Llama, and the number of K/V heads to go to."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    kv_heads: int


MODELS = {
    "Llama-2-7B": Shape(4096, 11008, 32, 32, 32, 32000, 8),
    "Llama-3.1-8B": Shape(4096, 14336, 32, 32, 8, 128256, 4),
    "Llama-2-13B": Shape(5120, 13824, 40, 40, 40, 32000, 8),
    "Llama-2-70B": Shape(8192, 28672, 80, 64, 8, 32000, 4),
}


def tensors(shape: Shape) -> dict[str, list[int]]:
    """The shape of each tensor."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    kv = hidden // shape.num_attention_heads * shape.num_key_value_heads
    found = {
        "model.embed_tokens.weight": [shape.vocab_size, hidden],
        "lm_head.weight": [shape.vocab_size, hidden],
    }
    found["model.norm.weight"] = [hidden]
    for number in range(shape.num_hidden_layers):
        layer = f"model.layers.{number}"
        found |= {f"{layer}.self_attn.{name}_proj.weight": [hidden, hidden] for name in "qo"}
        found |= {f"{layer}.self_attn.{name}_proj.weight": [kv, hidden] for name in "kv"}
        found |= {f"{layer}.mlp.{name}_proj.weight": [wide, hidden] for name in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = [hidden, wide]
        found |= {
            f"{layer}.{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")
        }
    return found


def write_sparse(folder: Path, shape: Shape) -> None:
    """A checkpoint whose weights are a hole."""
    folder.mkdir()
    stated = {key: value for key, value in shape._asdict().items() if key != "kv_heads"}
    config = stated | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
    }
    config |= {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, dimensions in tensors(shape).items():
        end = offset + 2 * math.prod(dimensions)
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [offset, end]}
        offset = end
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + offset)


def dry_run(source: Path, kv_heads: int, processes: int, free: int, gpu: str) -> Needs:
    """The estimate of a conversion where so many GB of each process's GPU are free."""
    machine = {"gpu_driver": True, "gpu": True, "gpu_name": gpu, "bfloat16": True}
    os.environ[STATED] = json.dumps(machine | {"memory": free * 10**9})
    plan = make_plan(open_checkpoint(source), kv_heads, method="fit")
    return estimate_needs(plan, CalibrationOptions("python-stdlib"), processes)


def main() -> None:
    print("| model | N | GPUs | GB free | memory of each asked for, GB | time | left out |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, shape in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / name
            write_sparse(source, shape)
            heads = f"{shape.num_key_value_heads} -> {shape.kv_heads}"
            for processes, free, gpu in GPUS:
                found = dry_run(source, shape.kv_heads, processes, free, gpu)
                sizes = (found.least_memory_bytes, found.memory_bytes)
                asked = " to ".join(f"{nbytes / 1e9:.0f}" for nbytes in sizes)
                left_out = "; ".join(found.left_out) or "nothing"
                gpus, time = f"{processes} x {gpu}", about(found.hours or 0.0)
                print(f"| {name} | {heads} | {gpus} | {free} | {asked} | {time} | {left_out} |")


if __name__ == "__main__":
    main()
